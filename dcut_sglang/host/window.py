"""The slots a decode step may write, dense for the draft and packed for the verify.

A request's window is the D positions from its committed length on: the anchor and the D-1
drafts. The draft block covers the whole window; the verify covers the first n[i] rows of each
request, packed one after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout


@dataclass(frozen=True)
class BlockWindow:
    """Dense window of one step.

    Attributes:
        anchors: int64 [bs], last known token of each request.
        req_pool_indices: int [bs], rows of the scheduler's request table.
        prefix_lens: int [bs], committed lengths.
        host_lens: int [bs] on the host, at least the committed lengths (under overlap the
            scheduler's knowledge lags).
        positions: int64 [bs, D].
        slots: int64 [bs, D], KV slots, reserved by the scheduler before the step.
        plan: SGLang's id plan for the step, shared by draft, verify and hidden-state writes.
        first: column of the anchors; what lies in front of it, earlier passes have committed.
    """

    anchors: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    host_lens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    plan: KVLocPlan
    first: int = 0

    @property
    def bs(self) -> int:
        return self.positions.shape[0]

    @property
    def block_size(self) -> int:
        return self.positions.shape[1]


@dataclass(frozen=True)
class PackedRows:
    """Rows of the target's forward, request-major.

    Attributes:
        layout: verify lengths in SGLang's form; the attention backend reads them.
        request: int64 [rows], request of each row.
        index: int64 [rows], its place in the flattened [bs, D] window.
        positions: int64 [rows].
        slots: int64 [rows].
    """

    layout: RaggedVerifyLayout
    request: torch.Tensor
    index: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.index.numel()

    @property
    def is_plain(self) -> bool:
        """Whether these are the anchors' rows alone."""
        return self.num_rows == len(self.layout.verify_lens)


def open_window(worker: Any, batch: Any, block_size: int) -> BlockWindow:
    """Gather the step's window from the scheduler's tables. No host sync."""
    host_lens = batch.seq_lens_cpu
    return _gather_window(
        worker,
        batch.spec_info.bonus_tokens.view(-1),
        batch.req_pool_indices,
        batch.seq_lens,
        host_lens if host_lens is not None else batch.spec_info.nxt_kv_lens_cpu,
        block_size,
    )


def advanced(window: BlockWindow, anchors: torch.Tensor) -> BlockWindow:
    """The window behind a plain pass that emitted ``anchors`` int64 [bs]: one column less."""
    return replace(
        window,
        anchors=anchors,
        prefix_lens=window.prefix_lens + 1,
        host_lens=window.host_lens + 1,
        first=window.first + 1,
    )


def part_of(worker: Any, window: BlockWindow, places: torch.Tensor, block_size: int) -> BlockWindow:
    """The window of some of the batch's requests, over the first places of their blocks.

    Args:
        places: int64 [n] on the host, ascending.
        block_size: 2..D.
    """
    on_device = places.to(window.positions.device)
    return _gather_window(
        worker,
        window.anchors[on_device],
        window.req_pool_indices[on_device],
        window.prefix_lens[on_device],
        window.host_lens[places],
        block_size,
    )


def _gather_window(
    worker: Any,
    anchors: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    host_lens: torch.Tensor,
    block_size: int,
) -> BlockWindow:
    model_runner = worker.model_runner
    positions = prefix_lens.to(torch.int64)[:, None] + torch.arange(
        block_size, device=prefix_lens.device
    )
    rows = req_pool_indices.to(torch.int64)[:, None]
    slots = model_runner.req_to_token_pool.req_to_token[rows, positions].to(torch.int64)
    plan = model_runner.kv_index_translator.plan(
        req_pool_indices=req_pool_indices,
        seq_lens=prefix_lens,
        seq_lens_cpu=host_lens,
        write_virtual=slots.reshape(-1),
        read_extent=block_size,
    )
    return BlockWindow(anchors, req_pool_indices, prefix_lens, host_lens, positions, slots, plan)


def pack(window: BlockWindow, verify_lens: torch.Tensor, num_rows: int) -> PackedRows:
    """Pack the first ``verify_lens[i]`` rows of every request's window.

    Args:
        verify_lens: int32 [bs], 1..D each.
        num_rows: their sum, known on the host, so that nothing here syncs.
    """
    bs, device = window.bs, verify_lens.device
    if num_rows == bs:  # a plain step: the anchors' rows
        layout, request, index = _anchor_rows(bs, window.block_size, window.first, device)
    else:
        layout = RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=verify_lens, graph_num_tokens=num_rows
        )
        request = torch.repeat_interleave(
            torch.arange(bs, device=device), verify_lens.to(torch.int64), output_size=num_rows
        )
        first = layout.extend_start_loc.to(torch.int64)[request]
        depth = torch.arange(num_rows, device=device) - first
        index = request * window.block_size + depth
    return PackedRows(
        layout=layout,
        request=request,
        index=index,
        positions=window.positions.view(-1)[index],
        slots=window.slots.view(-1)[index],
    )


@functools.cache
def _anchor_rows(
    bs: int, block_size: int, first: int, device: torch.device
) -> tuple[RaggedVerifyLayout, torch.Tensor, torch.Tensor]:
    """Layout, requests and places of a plain pass's rows, which every one of that size shares."""
    layout = RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=torch.ones(bs, dtype=torch.int32, device=device), graph_num_tokens=bs
    )
    request = torch.arange(bs, device=device)
    return layout, request, request * block_size + first
