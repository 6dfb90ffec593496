"""Run the target over the packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from dcut_sglang.host.draft import DraftBlock
from dcut_sglang.host.window import BlockWindow, PackedRows


@dataclass(frozen=True)
class TargetOutput:
    """What the target says about the packed rows.

    Attributes:
        logits: [rows, vocab].
        hidden: [rows, features], the target layers that the drafter reads.
        result: SGLang's result of the forward, for what the scheduler wants passed on.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    result: Any


def verify(
    worker: Any, batch: Any, window: BlockWindow, drafts: DraftBlock, rows: PackedRows
) -> TargetOutput:
    """One TARGET_VERIFY forward of exactly ``rows.num_rows`` tokens.

    ``batch`` is changed as SGLang's own workers do; the scheduler restores it after the step.

    Raises:
        RuntimeError: the target ran another number of rows, or captured no hidden states.
    """
    block_size = window.block_size
    verify_input = DFlashVerifyInput(
        draft_token=window.anchors if rows.is_plain else drafts.tokens.view(-1)[rows.index],
        positions=rows.positions,
        draft_token_num=block_size,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        ragged_verify_layout=rows.layout,
        kv_loc_plan=window.plan,
        kv_loc_cols=rows.index,
    )
    draft_input = batch.spec_info
    batch.out_cache_loc, batch.seq_lens = rows.slots, window.prefix_lens
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = window.host_lens + block_size
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    elif draft_input.nxt_kv_lens_cpu is not None:
        batch.seq_lens_cpu = draft_input.nxt_kv_lens_cpu
        batch.seq_lens_sum = int(draft_input.nxt_kv_lens_sum)
    forward_batch, _ = verify_input.prepare_for_verify(batch, worker.target_worker)
    result = worker.target_worker.forward_batch_generation(
        batch=None,
        forward_batch=forward_batch,
        is_verify=True,
        skip_attn_backend_init=True,
    )
    logits = result.logits_output.next_token_logits
    hidden = result.logits_output.hidden_states
    if hidden is None:
        raise RuntimeError("the target captured no hidden states for the drafter in a verify step")
    if logits.shape[0] < rows.num_rows:
        raise RuntimeError(f"the target ran {logits.shape[0]} rows, {rows.num_rows} were packed")
    return TargetOutput(logits[: rows.num_rows], hidden[: rows.num_rows], result)
