"""Log-probabilities of the emitted tokens, where the scheduler looks for them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs

from dcut_sglang.host.row_table import RowTable
from dcut_sglang.host.sampling import is_greedy
from dcut_sglang.host.window import PackedRows


def fill_logprobs(
    output: Any,
    batch: Any,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    rows: PackedRows,
    table: RowTable,
    block_size: int,
) -> None:
    """Write one log-probability for each row, in the layout that SGLang reads: [bs, D] and lists
    of bs * D entries (``batch_result_processor._apply_decode_logprobs``).

    The token emitted at place j of a run is the one chosen at row j, accepted draft or bonus.
    As in plain decoding, a sampling request's values are those at its temperature, before
    top-k, top-p and min-p, and a greedy one's those of the adjusted logits. No host sync.

    Args:
        output: SGLang's logits output; its ``next_token_*logprobs*`` fields are set.
        logits: [rows, vocab], adjusted.
        chosen: int64 [rows].
    """
    places = [i for i, req in enumerate(batch.reqs) if req.return_logprob]
    index = table.of(places)
    wanted = logits[index]
    if not envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
        wanted = wanted / _temperatures(batch)[rows.request[index]].to(wanted.dtype)
    logprobs = torch.log_softmax(wanted, dim=-1)
    logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)

    bs = len(batch.reqs)
    dense = logprobs.new_zeros(bs * block_size)
    dense[rows.index[index]] = logprobs.gather(1, chosen[index, None]).squeeze(1)
    output.next_token_logprobs = dense.view(bs, block_size)

    top = batch.top_logprobs_nums or []
    if any(top[i] > 0 for i in places):
        values, ids = logprobs.topk(max(top[i] for i in places), dim=-1)
        output.next_token_top_logprobs_val = _by_place(values, places, table, bs, block_size, top)
        output.next_token_top_logprobs_idx = _by_place(ids, places, table, bs, block_size, top)

    asked = batch.token_ids_logprobs or []
    if any(asked[i] is not None for i in places):
        values_of: list[torch.Tensor] = []
        ids_of: list[list[int]] = []
        start = 0
        for i in range(bs):
            count = 0
            token_ids: list[int] = []
            if i in places:
                count, token_ids = table.lens[i], asked[i] or []
                columns = torch.tensor(token_ids, dtype=torch.int64).to(
                    logprobs.device, non_blocking=True
                )
                values_of += list(logprobs[start : start + count][:, columns])
                start += count
            values_of += [logprobs.new_empty(0)] * (block_size - count)
            ids_of += [token_ids] * block_size
        output.next_token_token_ids_logprobs_val = values_of
        output.next_token_token_ids_logprobs_idx = ids_of


def _temperatures(batch: Any) -> torch.Tensor:
    """float32 [bs, 1]; 1 for greedy requests, whose temperature has no effect."""
    greedy = torch.tensor([is_greedy(req.sampling_params) for req in batch.reqs])
    given = batch.sampling_info.temperatures
    return given.masked_fill(greedy.to(given.device, non_blocking=True)[:, None], 1.0)


def _by_place(
    values: torch.Tensor,
    places: list[int],
    table: RowTable,
    bs: int,
    block_size: int,
    widths: list[int],
) -> list[torch.Tensor]:
    """One entry for each place of the [bs, D] window: the row's first ``widths[i]`` values, or
    nothing where no row was verified or wanted."""
    nothing = values.new_empty(0)
    entries = [nothing] * (bs * block_size)
    row = 0
    for i in places:
        for depth in range(table.lens[i]):
            entries[i * block_size + depth] = values[row, : widths[i]]
            row += 1
    return entries
