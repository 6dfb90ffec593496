"""A decision trace as data for the page's step viewer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcut_sglang.candidates import Candidates
from dcut_sglang.report.errors import ReportError
from dcut_sglang.report.reasons import expected_and_deviation, recompute
from dcut_sglang.selector import Selector
from dcut_sglang.trace import PHASES, Trace, TraceStep

# A step surprises when its time is this far from the prediction, as a share of it, or its tokens
# this many standard deviations from what the confidences promised.
TIME_SURPRISE = 0.25
TOKEN_SURPRISE = 2.5
_MOST_CANDIDATES = 64


@dataclass(frozen=True)
class Window:
    """Which steps of a trace the page holds: by place from 1, ``first`` and ``last`` included."""

    first: int = 1
    last: int = 1000

    @classmethod
    def parse(cls, text: str) -> Window:
        """Read ``A:B``.

        Raises:
            ReportError: anything else, or A > B.
        """
        first, colon, last = text.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ReportError(
                f"--steps: expected two places A:B with 1 <= A <= B, as in 1:1000; got {text!r}"
            )
        return cls(int(first), int(last))


def trace_data(
    trace: Trace, name: str, window: Window, selector: Selector | None = None
) -> dict[str, Any]:
    """Plain data of a trace.

    Args:
        selector: recomputes the candidates of steps that were recorded without; None: they stay
            without.

    Raises:
        ReportError: no step inside the window, or the selector's costs are of another block size.
    """
    if selector is not None and selector.cost.block_size != trace.block_size:
        raise ReportError(
            f"{name}: expected a cost table for blocks of {trace.block_size}, "
            f"got one for blocks of {selector.cost.block_size}; name another with --costs"
        )
    steps = trace.steps[window.first - 1 : window.last]
    if not steps:
        raise ReportError(
            f"{name}: expected steps in {window.first}:{window.last}, "
            f"the trace has {len(trace.steps)}"
        )
    used = sorted({int(request) for step in steps for request in step.requests})
    place = {request: i for i, request in enumerate(used)}
    data = [_step_data(step, place, selector) for step in steps]
    return {
        "name": name,
        "block_size": trace.block_size,
        "conditions": _flat(trace.conditions),
        "end": trace.end,
        "dropped_steps": trace.dropped_steps,
        "num_steps": len(trace.steps),
        "first": window.first,
        "phases": list(PHASES),
        "requests": [trace.names[request] for request in used],
        "recomputed": sum(step["why"] == "recomputed" for step in data),
        "costs_differ": _differing(trace, selector),
        "steps": data,
    }


def _step_data(
    step: TraceStep, place: Mapping[int, int], selector: Selector | None
) -> dict[str, Any]:
    """Short keys where there is one per step and request: pages of a thousand steps stay small."""
    kept = step.verify_lens - 1
    expected, deviation = expected_and_deviation(step)
    emitted = step.bs + int(step.accepted.sum())
    candidates, why = step.candidates, "recorded"
    if candidates is None:
        why = ""
        if selector is not None and step.bs:
            candidates, why = recompute(step, selector), "recomputed"
    data: dict[str, Any] = {
        "step": step.step,
        "mode": step.mode,
        "forced": step.forced,
        "predicted_ms": _number(step.predicted_ms),
        "measured_ms": _number(step.measured_ms),
        "phase_ms": [_number(ms) for ms in step.phase_ms.tolist()],
        "request": [place[int(request)] for request in step.requests],
        "context": step.contexts.tolist(),
        "kept": kept.tolist(),
        "accepted": step.accepted.tolist(),
        # Per request, the confidences of the computed drafts, in thousandths.
        "confidence": _confidences(step),
        "block_size": step.draft_block_size,
        "head_rows": list(step.head_rows),
        "expected": _number(expected),
        "deviation": _number(deviation),
        "emitted": emitted,
        "why": why,
    }
    if candidates is not None:
        data["candidates"] = _candidates(
            candidates.thinned(_MOST_CANDIDATES, int(kept.sum())), step
        )
    if step.draft_gains:
        data["draft_gains"] = [_number(gain) for gain in step.draft_gains]
    data["surprise"] = _surprises(step, emitted, expected, deviation)
    return data


def _confidences(step: TraceStep) -> list[list[int]]:
    if step.confidence is None:
        return [[] for _ in range(step.bs)]
    depth = (step.confidence > 0).sum(axis=1)
    thousandths = np.round(np.nan_to_num(step.confidence) * 1000).astype(int)
    return [row[:d].tolist() for row, d in zip(thousandths, depth, strict=True)]


def _candidates(candidates: Candidates, step: TraceStep) -> dict[str, Any]:
    """With the place of the best. Of equal utilities (float32 in a trace), the chosen one's."""
    utility = candidates.tokens_per_ms
    best = int(np.argmax(utility))
    chosen = np.flatnonzero(candidates.num_kept == int(step.verify_lens.sum()) - step.bs)
    if len(chosen) and utility[chosen[0]] >= utility[best] * (1 - 1e-6):
        best = int(chosen[0])
    return {
        "kept": candidates.num_kept.tolist(),
        "tokens": _numbers(candidates.expected_tokens),
        "ms": _numbers(candidates.predicted_ms),
        "best": best,
    }


def _surprises(step: TraceStep, emitted: int, expected: float, deviation: float) -> list[str]:
    found = []
    error = step.measured_ms / step.predicted_ms - 1 if step.predicted_ms > 0 else math.nan
    if abs(error) > TIME_SURPRISE:
        found.append(f"took {abs(error):.0%} {'more' if error > 0 else 'less'} time than predicted")
    if deviation > 0 and abs(emitted - expected) > TOKEN_SURPRISE * deviation:
        off = (emitted - expected) / deviation
        found.append(f"emitted {emitted} tokens, expected {expected:.1f} ({off:+.1f} s.d.)")
    return found


def _differing(trace: Trace, selector: Selector | None) -> list[str]:
    """Conditions under which the cost table was not measured as the trace was recorded."""
    if selector is None:
        return []
    table, run = selector.cost.fingerprint, trace.conditions
    common = ("device", "threads", "ranks", "dtype", "attention_backend", "target", "drafter")
    return [key for key in common if key in table and key in run and table[key] != run[key]]


def _flat(conditions: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in conditions.items()}


def _numbers(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    """Five significant digits; None for what JSON has no number for."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
