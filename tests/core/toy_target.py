"""A target of known probabilities, decoded through the real selection and acceptance.

The toy's next token depends on the last one alone, so the probability of every short text is a
product that the tests can compare counts with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch

from dcut_sglang.accept import accept
from dcut_sglang.survival import keep_best, survival

VOCAB, BLOCK = 6, 4
_generator = torch.Generator().manual_seed(5)
# Peaked and flat rows; drafts are often right, and confidences are wrong as confidences are.
LOGITS = 1.5 * torch.randn(VOCAB, VOCAB, generator=_generator)
DRAFT_LOGITS = LOGITS + 0.7 * torch.randn(VOCAB, VOCAB, generator=_generator)
DRAFTS = DRAFT_LOGITS.argmax(dim=-1)
CONFIDENCE = DRAFT_LOGITS.softmax(dim=-1).max(dim=-1).values

# (rows' places in the flattened window, request of each row, last token of each) -> choices
Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def filtered(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = VOCAB,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """Probabilities of one row, by the definitions of the four parameters: float64 [vocab].

    Top-k and top-p look at the whole distribution, min-p at its largest probability.
    """
    probs = (logits.double() / temperature).softmax(dim=-1)
    kept = torch.zeros_like(probs)
    before = 0.0
    for rank, token in enumerate(probs.argsort(descending=True).tolist()):
        if rank < top_k and before <= top_p and probs[token] >= min_p * probs.max():
            kept[token] = probs[token]
        before += float(probs[token])
    return kept / kept.sum()


def text_probabilities(rows: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Probability of every text of ``length`` tokens behind ``start``: [vocab ** length].

    Args:
        rows: [vocab, vocab], next-token probabilities.
    """
    probs = rows[start]
    for _ in range(length - 1):
        last = torch.arange(probs.numel()) % VOCAB
        probs = (probs[:, None] * rows[last]).reshape(-1)
    return probs


@cache
def _verify_lens(anchors: tuple[int, ...], num_kept: int) -> tuple[int, ...]:
    confidence = torch.stack([_block(a)[1] for a in anchors])
    return tuple(keep_best(survival(confidence), num_kept).tolist())


@cache
def _block(anchor: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = [anchor]
    for _ in range(BLOCK - 1):
        tokens.append(int(DRAFTS[tokens[-1]]))
    return torch.tensor(tokens), CONFIDENCE[torch.tensor(tokens[:-1])]


def decode(num_groups: int, bs: int, ratio: float, length: int, draw: Draw) -> torch.Tensor:
    """Texts of ``num_groups`` independent batches of ``bs`` requests: int64 [n, length].

    Each step drafts greedily, keeps the batch's best drafts, draws a token at every kept row
    and accepts.
    """
    n = num_groups * bs
    num_kept = math.ceil(ratio * bs * (BLOCK - 1))
    blocks = torch.stack([_block(a)[0] for a in range(VOCAB)])
    anchors = torch.zeros(n, dtype=torch.int64)
    texts = torch.full((n, length + BLOCK), -1)
    done = torch.zeros(n, dtype=torch.int64)
    while int(done.min()) < length:
        groups = anchors.view(num_groups, bs).tolist()
        verify_lens = torch.tensor([_verify_lens(tuple(g), num_kept) for g in groups]).view(-1)
        tokens = blocks[anchors]
        kept = torch.arange(BLOCK) < verify_lens[:, None]
        index = kept.view(-1).nonzero().view(-1)
        chosen = draw(index, index // BLOCK, tokens.view(-1)[index])
        accepted = accept(tokens, chosen, index, verify_lens)
        places = done[:, None] + torch.arange(BLOCK)
        emitted = torch.arange(BLOCK) < accepted.num_emitted[:, None]
        emitted &= places < texts.shape[1]
        request = torch.arange(n)[:, None].expand_as(places)
        texts[request[emitted], places[emitted]] = accepted.out_tokens[emitted]
        done = (done + accepted.num_emitted).clamp_(max=length)
        anchors = accepted.bonus
    return texts[:, :length]


def tail_probability(texts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chance of counts at least this far from ``probabilities`` (Pearson), 0 when an impossible
    text was emitted; texts that are expected fewer than five times are counted together."""
    place = VOCAB ** torch.arange(texts.shape[1] - 1, -1, -1)
    counts = torch.bincount((texts * place).sum(dim=1), minlength=probabilities.numel()).double()
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * texts.shape[0]
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    possible = expected > 0
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-300))[possible].sum()
    freedom = int(possible.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2))
