"""What servers say about a wave: counters, the decision trace, and each answer's ``meta_info``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dcut_sglang.bench.endpoint import Endpoint
from dcut_sglang.bench.steady import Timeline
from dcut_sglang.calibration import Calibration
from dcut_sglang.trace import TraceError, TraceStep, read_trace

IntArray = npt.NDArray[np.int64]
Fields = dict[str, Any]

PHASES = ("draft", "head", "confidence", "decide", "verify", "commit")
NUM_SAMPLED_STEPS = 64
NUM_BINS = 10
# Every field of a row that comes from here; null where a server does not offer it.
FIELDS = (
    *("accept_length", "accept_histogram", "position_verified", "position_accepted"),
    *("steps", "rows_per_step", "keep_ratio", "keep_ratio_counts", "plain_share"),
    *("phase_ms", "step_ms", "step_sample", "by_batch_size", "reliability"),
    *("cost_table", "dcut"),
)


class DCutObserver:
    """Follows one DCUT server over the waves of a run.

    Args:
        trace: its decision trace, if it is within reach.

    Attributes:
        requests_drafted: requests that it drafted for in all waves so far.
    """

    def __init__(self, server: Endpoint, trace: Path | None) -> None:
        self._server = server
        self._trace = trace
        self._known_steps = 0
        self.requests_drafted = 0

    def begin(self) -> None:
        """A wave begins: its counters start at zero."""
        self._server.set_state(dcut_reset_metrics=1)
        self._known_steps = len(self._steps(0))

    def end(self) -> Fields:
        """Row fields of the wave."""
        state = self._server.dcut()
        self.requests_drafted += state["requests_drafted"]
        steps = self._steps(self._known_steps)
        return {**from_counters(state), **from_trace(steps, state["calibration"])}

    def _steps(self, first: int) -> Sequence[TraceStep]:
        if self._trace is None or not self._trace.exists():
            return ()
        try:
            return read_trace(self._trace).steps[first:]
        except TraceError as error:
            raise TraceError(f"the trace of {self._server.url}: {error}") from error


def from_counters(state: Fields) -> Fields:
    """Row fields of the ``dcut`` object of ``/server_info``."""
    steps = state["steps"]
    per_step = {phase: _ratio(state[f"{phase}_ms"], steps) for phase in PHASES}
    selected = state["selected_steps"]
    return {
        "accept_length": state["accept_length"],
        "steps": steps,
        "rows_per_step": _ratio(state["rows_verified"], steps),
        "keep_ratio": _ratio(state["drafts_kept"], state["drafts_proposed"]),
        "keep_ratio_counts": state["keep_ratio_counts"],
        "plain_share": state["plain_share"],
        "phase_ms": per_step if steps else None,
        "step_ms": {
            "predicted": _ratio(state["predicted_ms"], selected),
            "measured": _ratio(state["selected_ms"], selected),
        }
        if selected
        else None,
        "cost_table": state["cost_table"],
        "dcut": {k: v for k, v in state.items() if k not in ("cost_table", "config")},
    }


def from_trace(steps: Sequence[TraceStep], calibration: Fields) -> Fields:
    """Row fields of a wave's decode steps; none without a trace.

    Args:
        calibration: the server's parameters at the end of the wave.
    """
    steps = [step for step in steps if step.bs]
    if not steps:
        return {}
    kept = np.concatenate([step.verify_lens for step in steps]) - 1
    accepted = np.minimum(np.concatenate([step.accepted for step in steps]), kept)
    depth = max(1, int(kept.max()))
    place = np.arange(1, depth + 1)
    timed = [step for step in steps if np.isfinite([step.predicted_ms, step.measured_ms]).all()]
    spread = np.linspace(0, len(timed) - 1, min(NUM_SAMPLED_STEPS, len(timed)))
    return {
        "accept_histogram": np.bincount(accepted).tolist(),
        "position_verified": (kept[:, None] >= place).sum(axis=0).tolist(),
        "position_accepted": (accepted[:, None] >= place).sum(axis=0).tolist(),
        "step_sample": [_step_sample(timed[i]) for i in spread.astype(int)],
        "by_batch_size": _by_batch_size(steps),
        "reliability": reliability(steps, Calibration.from_json(calibration)),
    }


def _step_sample(step: TraceStep) -> list[float]:
    times = [round(step.predicted_ms, 3), round(step.measured_ms, 3)]
    return [step.bs, int(step.verify_lens.sum()), *times]


def _by_batch_size(steps: Sequence[TraceStep]) -> list[list[int]]:
    sums: dict[int, IntArray] = {}
    for step in steps:
        drafts = 0 if step.confidence is None else int((step.confidence > 0).sum())
        found = [1, drafts, int(step.verify_lens.sum()) - step.bs, step.mode == "plain"]
        sums[step.bs] = sums.get(step.bs, np.zeros(4, dtype=np.int64)) + np.array(found)
    return [[bs, *total.tolist()] for bs, total in sorted(sums.items())]


def reliability(steps: Sequence[TraceStep], calibration: Calibration) -> Fields | None:
    """Confidences against outcomes, in ten bins of the raw confidence.

    Counts drafts that were verified and whose predecessors were all accepted, so that an outcome
    is what the confidence predicts. None where there are none.
    """
    raw, calibrated, right = [], [], []
    for step in steps:
        if step.confidence is None:
            continue
        place = np.arange(1, step.confidence.shape[1] + 1)
        kept, accepted = step.verify_lens - 1, step.accepted
        seen = place <= np.minimum(kept, accepted + 1)[:, None]
        seen &= step.confidence > 0
        raw.append(step.confidence[seen])
        calibrated.append(calibration.apply(step.confidence)[seen])
        right.append((place <= accepted[:, None])[seen])
    if not raw or not sum(map(len, raw)):
        return None
    confidence = np.concatenate(raw)
    bins = np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    sums: dict[str, npt.NDArray[Any]] = {
        "count": np.ones(len(bins)),
        "raw": confidence,
        "calibrated": np.concatenate(calibrated),
        "accepted": np.concatenate(right),
    }
    return {
        name: np.round(np.bincount(bins, values, NUM_BINS), 3).tolist()
        for name, values in sums.items()
    }


def from_answers(timelines: Sequence[Timeline], is_chain: bool) -> Fields:
    """Row fields of what SGLang says with each answer about its speculation; none for a server
    that does not speculate.

    Args:
        is_chain: whether every step verifies the same number of drafts, each behind the last.
    """
    histograms = [t.meta.get("spec_correct_drafts_histogram") for t in timelines]
    known = [h for h in histograms if h]
    if not known:
        return {}
    counts = np.zeros(max(map(len, known)), dtype=np.int64)
    for histogram in known:
        counts[: len(histogram)] += np.array(histogram)
    fields: Fields = {
        "accept_length": round(float((np.arange(len(counts)) + 1) @ counts / counts.sum()), 6),
        "accept_histogram": counts.tolist(),
    }
    proposed = sum(t.meta.get("spec_num_proposed_drafts", 0) for t in timelines)
    verified = sum(t.meta.get("spec_verify_ct", 0) for t in timelines)
    if is_chain and verified:
        depth = round(proposed / verified)
        accepted = counts[::-1].cumsum()[::-1][1 : depth + 1]
        fields["position_verified"] = [int(counts.sum())] * depth
        fields["position_accepted"] = [*accepted.tolist(), *([0] * (depth - len(accepted)))]
        fields["keep_ratio"] = 1.0
    return fields


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
