"""Draw each row's token as plain decoding draws it, with SGLang's own sampler.

How the noise of a seed meets the tokens depends, in SGLang, on whether anyone in the batch
filters (top-k, top-p, min-p, or greedy): with a filter by rank, without by token id. So that a
seeded request emits the same tokens whoever else is served, requests are drawn in groups of
their own kind, here and in prefill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.ops.sampling import softmax as sampler_softmax
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from dcut_sglang.host.device import argmax_rows
from dcut_sglang.host.row_table import RowTable
from dcut_sglang.host.window import PackedRows


def is_greedy(params: Any) -> bool:
    return params.top_k <= 1


def _is_filtered(params: Any) -> bool:
    return params.top_k != TOP_K_ALL or params.top_p != 1.0 or params.min_p > 0


def choose_tokens(
    sampler: Any, logits: torch.Tensor, batch: Any, rows: PackedRows, table: RowTable
) -> torch.Tensor:
    """The target's token after each row: int64 [rows].

    Greedy requests take the largest logit. The others draw from softmax(logits / temperature)
    after top-k, top-p and min-p, independently at each row.

    Args:
        sampler: the target's ``Sampler``.
        logits: [rows, vocab], with everything applied that the request asks for.
    """
    groups: dict[str, list[int]] = {"greedy": [], "whole": [], "filtered": []}
    for i, req in enumerate(batch.reqs):
        params = req.sampling_params
        kind = "greedy" if is_greedy(params) else "filtered" if _is_filtered(params) else "whole"
        groups[kind].append(i)
    if len(groups["greedy"]) == len(batch.reqs):
        return argmax_rows(logits)
    chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for kind, places in groups.items():
        if not places:
            continue
        index = table.of(places)
        if kind == "greedy":
            chosen[index] = argmax_rows(logits[index])
            continue
        chosen[index] = _draw(
            sampler,
            logits[index],
            _info_of_rows(batch.sampling_info, rows.request[index], batch.reqs, places),
            rows.positions[index],
            whole=kind == "whole",
        )
    return chosen


def _info_of_rows(info: Any, request: torch.Tensor, reqs: Any, places: list[int]) -> Any:
    """SGLang's sampling record with one entry per row, for rows of the requests at ``places``."""
    top_ks = [reqs[i].sampling_params.top_k for i in places]
    return dataclasses.replace(
        info,
        temperatures=info.temperatures[request],
        top_ps=info.top_ps[request],
        top_ks=info.top_ks[request],
        min_ps=info.min_ps[request],
        sampling_seed=None if info.sampling_seed is None else info.sampling_seed[request],
        need_min_p_sampling=any(reqs[i].sampling_params.min_p > 0 for i in places),
        max_top_k=max(top_ks) if max(top_ks) < TOP_K_ALL else None,
        sampling_mask_batch_indices=None,
    )


def _draw(
    sampler: Any, logits: torch.Tensor, info: Any, positions: torch.Tensor, whole: bool
) -> torch.Tensor:
    logits = logits.div_(info.temperatures)
    # As ``Sampler.forward`` has it.
    probs = (
        torch.softmax(logits, dim=-1) if sampler.enable_deterministic else sampler_softmax(logits)
    )
    tokens, _ = sampler._sample_from_probs(probs, info, positions, whole)
    return tokens.view(-1).to(torch.int64)


def sample_by_kind(
    sample: Callable[..., Any],
    sampler: Any,
    probs: torch.Tensor,
    sampling_info: Any,
    positions: torch.Tensor,
    simple_sampling_case: bool,
) -> Any:
    """AROUND hook on ``Sampler._sample_from_probs``: seeded requests in groups of their kind.

    One host sync, when seeds are on and a batch's requests filter.
    """
    from dcut_sglang.host.hooks import dcut_active

    info = sampling_info
    if info.sampling_seed is None or simple_sampling_case or not dcut_active():
        return sample(sampler, probs, info, positions, simple_sampling_case)
    whole = (info.top_ks == TOP_K_ALL) & (info.top_ps == 1.0) & (info.min_ps <= 0)
    index = whole.nonzero().view(-1)
    if index.numel() == 0 or info.sampling_mask_batch_indices is not None:
        return sample(sampler, probs, info, positions, False)
    # Sampling may change its input, and what is returned of it are log-probabilities.
    own = dataclasses.replace(info, sampling_seed=info.sampling_seed[index])
    drawn, _ = sample(sampler, probs[index], own, positions[index], True)
    tokens, capture = sample(sampler, probs, info, positions, False)
    tokens = tokens.view(-1)
    tokens[index] = drawn.view(-1).to(tokens.dtype)
    return tokens, capture
