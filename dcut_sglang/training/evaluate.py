"""Offline evaluation: greedy speculative decoding replayed on the target's own greedy text.

Greedy verification accepts exactly the drafts that equal the target's greedy text, so the text
alone tells what a server would accept; the target need not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dcut_sglang.training.blocks import block_token_ids
from dcut_sglang.training.drafter import Drafter
from dcut_sglang.training.responses import Response

Propose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(request indices int64 [n], anchors int64 [n]) -> (drafts int64 [n, D-1], confidence float32
[n, D-1])."""

_LAZY_DRAFTS = 3


@dataclass(frozen=True)
class Walk:
    """Steps of a replay, in the order they were taken; n steps in all.

    request: int64 [n]; offset: int64 [n], anchor position counted from the end of the prompt;
    confidence: float32 [n, D-1]; accepts: int64 [n], accepted drafts, bonus not counted;
    num_inside: int64 [n], drafts that lie inside the text; is_whole: bool [n], false where the
    text was cut at a length inside the block, so that `accepts` is only a lower bound.
    """

    request: Tensor
    offset: Tensor
    confidence: Tensor
    accepts: Tensor
    num_inside: Tensor
    is_whole: Tensor

    def accept_length(self, requests: Sequence[int] | None = None) -> float:
        """Returns the mean of accepted drafts + 1 over whole steps, of some requests or of all."""
        chosen = self.is_whole
        if requests is not None:
            chosen = chosen & torch.isin(self.request, torch.tensor(list(requests)))
        return (self.accepts[chosen].float().mean() + 1).item()

    def reach(self, num_drafts: int) -> float:
        """Returns the share of whole steps that accept at least this many drafts."""
        return (self.accepts[self.is_whole] >= num_drafts).float().mean().item()


def walk(responses: Sequence[Response], propose: Propose, block_size: int) -> Walk:
    """Replays greedy speculative decoding with blocks of `block_size` (anchor included).

    The first anchor is the first token behind the prompt, which a server has from its prefill.
    """
    lengths = torch.tensor([len(r.token_ids) for r in responses])
    starts = torch.tensor([r.num_prompt_tokens for r in responses])
    ends = torch.tensor([r.ends for r in responses])
    ids = pad_sequence([r.token_ids for r in responses], batch_first=True)
    anchors = starts.clone()
    active = (anchors < lengths - 1).nonzero()[:, 0]
    steps: list[tuple[Tensor, ...]] = []
    while len(active):
        drafts, confidence = propose(active, anchors[active])
        places = anchors[active, None] + torch.arange(1, block_size)
        inside = places < lengths[active, None]
        truth = ids[active].gather(1, places.clamp(max=ids.shape[1] - 1))
        accepts = ((drafts == truth) & inside).long().cumprod(1).sum(1)
        num_inside = inside.sum(1)
        steps.append(
            (
                active,
                anchors[active] - starts[active],
                confidence,
                accepts,
                num_inside,
                ends[active] | (num_inside == block_size - 1),
            )
        )
        anchors[active] += accepts + 1
        active = active[anchors[active] < lengths[active] - 1]
    return Walk(*(torch.cat(column) for column in zip(*steps, strict=True)))


@torch.no_grad()
def drafter_proposer(
    drafter: Drafter,
    embed: Tensor,
    head: Tensor,
    responses: Sequence[Response],
    block_size: int,
    is_lazy: bool = False,
) -> Propose:
    """Returns a `Propose` that runs the drafter on the given responses.

    embed, head: the target's embedding and output matrices, float [vocab, hidden]; drafts come
    from the drafter's own vocabulary. The drafter runs on their device; what it proposes is on
    the CPU. A lazy one stops a few drafts behind the
    first wrong one: what it left out has token id -1 and confidence 0. Accept lengths are the
    same, at a third of the cost, since the head is the costly part; only calibration needs all.
    """
    device = embed.device
    vocabulary = torch.tensor(drafter.config.draft_vocabulary or range(len(head)))
    vocabulary = vocabulary.to(device)
    head = head[vocabulary] if drafter.config.draft_vocabulary else head
    ids = pad_sequence([r.token_ids for r in responses], batch_first=True).to(device)
    features = pad_sequence([r.features for r in responses], batch_first=True)
    context = drafter.context(features.to(device).float())
    mask_token_id = drafter.config.mask_token_id

    @torch.no_grad()
    def propose(requests: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        requests, anchors = requests.to(device), anchors.to(device)
        blocks = block_token_ids(ids[requests], anchors[:, None], block_size, mask_token_id)
        # Nothing behind the last anchor is attended to: leave it out of the copy.
        known = int(anchors.max())
        key_values = [(key[requests, :known], value[requests, :known]) for key, value in context]
        hidden = drafter(embed[blocks], anchors[:, None], key_values)[:, 0, 1:]
        if not is_lazy:
            confidence, drafts = (hidden @ head.T).float().softmax(-1).max(-1)
            return vocabulary[drafts].cpu(), confidence.cpu()
        num_drafts = block_size - 1
        drafts = torch.full((len(requests), num_drafts), -1, device=device)
        confidence = torch.zeros(drafts.shape, device=device)
        places = (anchors[:, None] + torch.arange(1, block_size, device=device)).clamp(
            max=ids.shape[1] - 1
        )
        truth = ids[requests].gather(1, places)
        rows = torch.arange(len(requests), device=device)
        for start in range(0, num_drafts, _LAZY_DRAFTS):
            part = slice(start, min(start + _LAZY_DRAFTS, num_drafts))
            shares, chosen = (hidden[rows, part] @ head.T).float().softmax(-1).max(-1)
            chosen = vocabulary[chosen]
            drafts[rows, part], confidence[rows, part] = chosen, shares
            rows = rows[(chosen == truth[rows, part]).all(1)]
        return drafts.cpu(), confidence.cpu()

    return propose
