"""Replay the recorded decisions of a server run and set its times beside the cost table's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcut_sglang.cost import CostTable
from dcut_sglang.trace import PHASES, Trace, TraceStep


@dataclass(frozen=True)
class Reproduction:
    """Totals of a recorded run.

    Attributes:
        steps, plain_steps: recorded steps.
        tokens: sum over steps and requests of min(accepted, kept) + 1.
        rows: tokens that the target saw.
        predicted_ms: the cost table's milliseconds of the timed steps.
        recorded_prediction_ms: what the server predicted for them; nan where it did not.
        measured_ms: wall milliseconds of the timed steps.
        timed_steps: steps with a measured time, to which the three times above refer.
        server_error: (predicted - measured) / measured of what the server predicted, over the steps
            for which it did (it does not where they are forced); nan without any. It adds what it
            has learnt that a step spends outside of draft and verify, which no cost table holds.
        median_step_error: median over timed steps of |predicted - measured| / measured.
        phase_ms: measured milliseconds by phase, over steps that measured them.
        truncated: the trace may lack steps.
    """

    steps: int
    plain_steps: int
    tokens: int
    rows: int
    predicted_ms: float
    recorded_prediction_ms: float
    measured_ms: float
    timed_steps: int
    server_error: float
    median_step_error: float
    phase_ms: dict[str, float]
    truncated: bool

    @property
    def time_error(self) -> float:
        """(predicted - measured) / measured; nan without timed steps."""
        return self.predicted_ms / self.measured_ms - 1 if self.measured_ms else float("nan")


def draft_ms(step: TraceStep, cost: CostTable, context: float) -> float:
    """The table's milliseconds of what the step drafted: forward, and the head's stages."""
    num_drafted = step.num_drafted
    if not num_drafted:
        return 0.0
    rows = step.head_rows or (num_drafted * (cost.block_size - 1),)
    size = step.draft_block_size or cost.block_size
    forward_ms = float(cost.draft_forward(num_drafted, context, size))
    return forward_ms + float(cost.head(np.array(rows)).sum())


def reproduce(trace: Trace, cost: CostTable) -> Reproduction:
    """Run the recorded decisions through the replay's counting and the cost table.

    A request's last step may count tokens that the host dropped after a stop: the trace is
    written by the worker, which cannot know.

    Raises:
        ValueError: the table was measured for another block size.
    """
    if trace.block_size != cost.block_size:
        raise ValueError(
            f"the trace has blocks of {trace.block_size}, the cost table of {cost.block_size}"
        )
    tokens = rows = plain_steps = 0
    predicted, recorded, measured = [], [], []
    phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for step in trace.steps:
        kept = step.verify_lens - 1
        tokens += int(np.minimum(step.accepted, kept).sum()) + step.bs
        rows += int(kept.sum()) + step.bs
        plain = step.mode == "plain"
        plain_steps += plain
        for name, ms in zip(PHASES, step.phase_ms.tolist(), strict=True):
            phases[name] += 0.0 if np.isnan(ms) else ms
        if np.isnan(step.measured_ms) or not step.bs:
            continue
        context = float(step.contexts.mean())
        verify_ms = float(cost.verify(step.bs, int(kept.sum()) + step.bs, context))
        predicted.append(verify_ms + draft_ms(step, cost, context))
        recorded.append(step.predicted_ms)
        measured.append(step.measured_ms)
    foreseen = ~np.isnan(recorded)
    by_server, in_fact = np.sum(recorded, where=foreseen), np.sum(measured, where=foreseen)
    errors = np.abs(np.array(predicted) / np.array(measured) - 1)
    return Reproduction(
        steps=len(trace.steps),
        plain_steps=plain_steps,
        tokens=tokens,
        rows=rows,
        predicted_ms=float(np.sum(predicted)),
        recorded_prediction_ms=float(np.sum(recorded)),
        measured_ms=float(np.sum(measured)),
        timed_steps=len(measured),
        server_error=float(by_server / in_fact - 1) if foreseen.any() else float("nan"),
        median_step_error=float(np.median(errors)) if len(errors) else float("nan"),
        phase_ms=phases,
        truncated=trace.truncated,
    )
