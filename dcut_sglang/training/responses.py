"""A target's own greedy text, with the hidden states that a drafter reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def mixed_precision(dtype: str, device: torch.device) -> torch.autocast:
    """Returns a context whose matrix products are in `dtype`; "float32": as without it."""
    is_mixed = dtype != "float32"
    chosen = getattr(torch, dtype) if is_mixed else None
    return torch.autocast(device.type, chosen, enabled=is_mixed)


@dataclass(frozen=True)
class Response:
    """Prompt and greedy continuation of one request.

    token_ids: int64 [S]; features: float [S, feature_size], the target's hidden states after the
    chosen layers, concatenated; num_prompt_tokens: where the continuation starts; ends: whether
    the last token is the end of the text (otherwise it was cut at a length).
    """

    token_ids: Tensor
    features: Tensor
    num_prompt_tokens: int
    ends: bool


@torch.no_grad()
def greedy_token_ids(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], max_length: int, eos_token_id: int
) -> list[list[int]]:
    """Continues each prompt greedily up to `max_length` tokens in all, the prompt included.

    All prompts run in step at the same position, each fed its own prompt first, so that no padding
    is needed; sort them by length beforehand to waste less. The end-of-text token is kept.
    """
    from transformers import DynamicCache

    shortest = min(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), max_length, dtype=torch.long)
    given = torch.zeros(len(prompts), max_length, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        given[row, : len(prompt)] = True
    cache = DynamicCache()
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    fed = 0
    for place in range(shortest, max_length):
        logits = target(ids[:, fed:place], past_key_values=cache, logits_to_keep=1).logits[:, -1]
        fed = place
        ids[:, place] = torch.where(given[:, place], ids[:, place], logits.argmax(-1))
        ended |= ~given[:, place] & (ids[:, place] == eos_token_id)
        if ended.all():
            break
    texts = []
    for row, prompt in enumerate(prompts):
        text = ids[row, : place + 1].tolist()
        if ended[row]:
            text = text[: text.index(eos_token_id, len(prompt)) + 1]
        texts.append(text)
    return texts


@torch.no_grad()
def hidden_features(target: PreTrainedModel, ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
    """Returns hidden states after the given layers, concatenated: [B, S, len(layer_ids) * hidden].

    transformers' list starts with the embeddings, so the state after layer i is its entry i + 1.
    """
    states = target.model(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in layer_ids], dim=-1)


def collect_responses(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    max_length: int,
    eos_token_id: int,
    batch_size: int = 128,
) -> list[Response]:
    """Decodes all prompts greedily and stores the features of every position, in prompt order."""
    responses: dict[int, Response] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        texts = greedy_token_ids(target, [prompts[i] for i in chunk], max_length, eos_token_id)
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for t in texts], batch_first=True)
        features = hidden_features(target, ids, layer_ids)
        for row, index in enumerate(chunk):
            length = len(texts[row])
            responses[index] = Response(
                token_ids=ids[row, :length].clone(),
                features=features[row, :length].clone(),
                num_prompt_tokens=len(prompts[index]),
                ends=texts[row][-1] == eos_token_id,
            )
    return [responses[i] for i in range(len(prompts))]


@torch.no_grad()
def responses_of_texts(
    target: PreTrainedModel,
    token_ids: Sequence[Sequence[int]],
    num_prompt_tokens: Sequence[int],
    ends: Sequence[bool],
    layer_ids: Sequence[int],
    batch_size: int = 32,
    dtype: str = "float32",
    log: Callable[[str], None] = print,
) -> tuple[list[Response], float]:
    """Computes the features of texts that were decoded earlier; `dtype`: of the matrix products.

    Returns the responses and the share of their tokens that are this target's greedy choice: one
    means that the texts are its own, up to rounding.
    """
    order = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
    found: dict[int, Response] = {}
    num_same = num_all = 0
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        rows = [torch.tensor(token_ids[i], device=target.device) for i in chunk]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        # The call keeps the last state normed: that is what the head reads.
        with mixed_precision(dtype, target.device):
            states = target.model(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1].float() for i in layer_ids], dim=-1)
        for row, index in enumerate(chunk):
            length, first = len(rows[row]), num_prompt_tokens[index]
            chosen = target.lm_head(
                states[-1][row, first - 1 : length - 1].to(target.dtype)
            ).argmax(-1)
            num_same += int((chosen == rows[row][first:]).sum())
            num_all += length - first
            found[index] = Response(
                token_ids=rows[row].cpu(),
                features=features[row, :length].float().cpu().half(),
                num_prompt_tokens=first,
                ends=ends[index],
            )
        log(f"features: {len(found)} of {len(order)} texts")
    return [found[i] for i in range(len(token_ids))], num_same / max(num_all, 1)
