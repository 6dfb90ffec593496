"""What is kept of a step: its counts for ``/server_info``, and its place in the decision trace."""

from __future__ import annotations

from typing import Any

import torch

from dcut_sglang.accept import Accepted
from dcut_sglang.host.draft import DraftBlock
from dcut_sglang.host.metrics import StepTimer
from dcut_sglang.host.tracing import write_step
from dcut_sglang.plan import Plan
from dcut_sglang.selector import Decision


def record(
    worker: Any,
    *,
    batch: Any,
    contexts: torch.Tensor,
    plan: Plan,
    drafts: DraftBlock,
    verify_lens: torch.Tensor,
    num_rows: int,
    verified_rows: int,
    accepted: Accepted,
    decision: Decision | None,
    timer: StepTimer,
) -> None:
    """Add a step to the worker's metrics, and to its trace if it writes one. No host sync for the
    first.

    Args:
        contexts: int64 [bs], committed tokens before the step.
        verify_lens: int32 [bs].
        num_rows: their sum.
        verified_rows: rows that the target ran in each pass.
        decision: for one pass; None where it was forced.
    """
    worker.metrics.add(
        timer,
        bs=len(verify_lens),
        num_rows=num_rows,
        verified_rows=verified_rows,
        mode=plan.mode,
        num_drafted=drafts.num_drafted,
        num_drafts=drafts.num_drafts,
        num_accepted=accepted.num_drafts,
        decision=decision,
        num_passes=accepted.num_passes,
    )
    if worker.trace is None:
        return
    write_step(
        worker.trace,
        last_step=worker.metrics.steps,
        batch=batch,
        contexts=contexts,
        drafts=drafts if drafts.num_drafted else None,
        verify_lens=verify_lens,
        accepted=accepted,
        timer=timer,
        decision=decision,
        draft_gains=worker.controller.draft_gains.tolist(),
        forced=worker.forced.describe() if worker.forced is not None else "",
        draft_block_size=plan.block_size,
        with_tokens=worker.config.trace_tokens,
    )
