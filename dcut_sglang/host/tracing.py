"""The worker's decision trace, when the configuration names a file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dcut_sglang.accept import Accepted
from dcut_sglang.config import ConfigError, DCutConfig
from dcut_sglang.host.draft import DraftBlock
from dcut_sglang.host.metrics import StepTimer
from dcut_sglang.selector import Decision
from dcut_sglang.trace import TraceWriter

logger = logging.getLogger(__name__)


def open_trace(
    config: DCutConfig, block_size: int, conditions: dict[str, Any]
) -> TraceWriter | None:
    """The writer that the configuration asks for, or None.

    Raises:
        ConfigError: the file exists, or cannot be created.
    """
    if config.trace_path is None:
        return None
    path = Path(config.trace_path).expanduser()
    try:
        return TraceWriter(path, block_size, int(config.trace_max_mb * 2**20), conditions)
    except FileExistsError as error:
        raise ConfigError(
            f"trace_path: {path} exists and is not overwritten; move it away or name another file"
        ) from error
    except OSError as error:
        raise ConfigError(f"trace_path: cannot write {path}: {error}") from error


def write_step(
    trace: TraceWriter,
    *,
    last_step: int,
    batch: Any,
    contexts: torch.Tensor,
    drafts: DraftBlock | None,
    verify_lens: torch.Tensor,
    accepted: Accepted,
    timer: StepTimer,
    decision: Decision | None,
    draft_gains: Sequence[float],
    forced: str,
    draft_block_size: int,
    with_tokens: bool,
) -> None:
    """Append one step; one of several passes as so many, each with its part of the time.

    A disk that fails ends the trace, not the serving. Copies the step's tensors to the host, which
    syncs: tracing has a price on CUDA.

    Args:
        last_step: number of the step, or of its last pass.
    """
    passes = accepted.num_passes
    phase_ms = {phase: ms / passes for phase, ms in timer.phase_ms.items()}
    for part, whole in (("head", "draft"), ("confidence", "draft"), ("settle", "commit")):
        phase_ms[whole] = phase_ms.get(whole, 0.0) + phase_ms.pop(part, 0.0)
    nan = float("nan")
    lens, num_accepted, at = (t.cpu().numpy() for t in (verify_lens, accepted.num_drafts, contexts))
    try:
        for number in range(passes):
            trace.write_step(
                step=last_step - passes + 1 + number,
                request_ids=[request.rid for request in batch.reqs],
                verify_lens=lens,
                accepted=num_accepted,
                contexts=at + number,
                mode="plain" if drafts is None else "speculate",
                confidence=None if drafts is None else drafts.confidence.float().cpu().numpy(),
                predicted_ms=nan if decision is None else decision.predicted_ms,
                measured_ms=nan if timer.step_ms is None else timer.step_ms / passes,
                phase_ms=phase_ms,
                tokens=drafts.tokens.cpu().numpy() if with_tokens and drafts is not None else None,
                forced=forced,
                draft_block_size=draft_block_size,
                head_rows=() if drafts is None else drafts.computed.rows,
                candidates=None if decision is None else decision.candidates,
                draft_gains=() if decision is None else draft_gains,
            )
    except OSError as error:
        logger.error("DCUT: the trace ends at step %d: %s", last_step, error)
        trace.full = True
