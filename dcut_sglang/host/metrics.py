"""Counters of the decode step, as ``/server_info`` shows them under ``dcut``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dcut_sglang.host.device import step_clock
from dcut_sglang.selector import Decision

DRAFT_PHASES = ("draft", "head", "confidence")
PHASES = (*DRAFT_PHASES, "decide", "verify", "commit", "settle")


class StepTimer:
    """Times a step's phases.

    ``phase_ms`` is wall time on the host; on CUDA, work is only queued there, and the figures
    are launch times. ``priced_ms`` and ``step_ms`` are on the clock that the cost table was
    measured on, where reading it costs nothing (empty and None on CUDA).
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._clock = step_clock(device)
        self._priced = torch.device(device).type == "cpu"
        self._start = self._last = self._now()
        self._apart = (0.0, 0.0)
        self.phase_ms: dict[str, float] = {}
        self.priced_ms: dict[str, float] = {}
        self.step_ms: float | None = None

    def mark(self, phase: str) -> None:
        """End ``phase`` now; the next one starts."""
        now = self._now()
        self._add(phase, now, self._last, self._apart)
        self._last, self._apart = now, (0.0, 0.0)

    @contextmanager
    def apart(self, phase: str) -> Iterator[None]:
        """Count what runs inside under ``phase`` instead of the phase that is running."""
        outer, self._apart = self._apart, (0.0, 0.0)
        start = self._now()
        yield
        end = self._now()
        self._add(phase, end, start, self._apart)
        self._apart = (outer[0] + end[0] - start[0], outer[1] + end[1] - start[1])

    def stop(self) -> None:
        """End the step."""
        if self._priced:
            self.step_ms = (self._now()[1] - self._start[1]) * 1e3

    @property
    def started_s(self) -> float:
        """Start of the step on the cost table's clock."""
        return self._start[1]

    @property
    def ended_s(self) -> float:
        """End of the last phase on the cost table's clock."""
        return self._last[1]

    def priced(self, *phases: str) -> float:
        """Milliseconds of these phases on the cost table's clock."""
        return sum(self.priced_ms.get(phase, 0.0) for phase in phases)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), self._clock() if self._priced else 0.0

    def _add(
        self,
        phase: str,
        end: tuple[float, float],
        start: tuple[float, float],
        apart: tuple[float, float],
    ) -> None:
        wall_ms, priced_ms = ((e - s - a) * 1e3 for e, s, a in zip(end, start, apart, strict=True))
        self.phase_ms[phase] = self.phase_ms.get(phase, 0.0) + wall_ms
        if self._priced:
            self.priced_ms[phase] = self.priced_ms.get(phase, 0.0) + priced_ms


class StepMetrics:
    """Totals over all decode steps of one worker.

    A step of a request that the overlap scheduler had already finished counts too: it was
    paid for.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Start over from zero."""
        self.steps = 0
        self.scheduler_steps = 0
        self.plain_steps = 0
        self.first_plain_step: int | None = None
        self.look_steps = 0
        self.look_ms = 0.0
        self.steps_ms = 0.0
        self.request_steps = 0
        self.requests_drafted = 0
        self.drafts_proposed = 0
        self.drafts_kept = 0
        self.rows_decided = 0
        self.rows_verified = 0
        self.keep_ratio_counts: Counter[str] = Counter()
        self.phase_ms: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._drafts_accepted: torch.Tensor | int = 0
        # Of the steps that the selector chose, to compare its predictions with what came.
        self.selected_steps = 0
        self.selected_ms = 0.0
        self.predicted_ms = 0.0
        self.predicted_tokens = 0.0

    def add(
        self,
        timer: StepTimer,
        *,
        bs: int,
        num_rows: int,
        verified_rows: int,
        mode: str,
        num_drafted: int,
        num_drafts: int,
        num_accepted: torch.Tensor,
        decision: Decision | None,
        num_passes: int = 1,
    ) -> None:
        """Add one step, or as many plain ones as it made passes. No host sync.

        Args:
            num_rows, verified_rows: of one pass.
            mode: the plan's.
            num_drafted: requests that were drafted for.
            num_drafts: drafts that were computed for them.
            num_accepted: int64 [bs], kept on the device.
            decision: for one pass.
        """
        kept = num_rows - bs
        if num_drafted == 0:
            self.plain_steps += num_passes
            self.first_plain_step = self.first_plain_step or self.steps + 1
        self.steps += num_passes
        self.scheduler_steps += 1
        if mode == "look":
            self.look_steps += 1
            self.look_ms += sum(timer.phase_ms.get(phase, 0.0) for phase in DRAFT_PHASES)
        self.steps_ms += sum(timer.phase_ms.values())
        self.request_steps += num_passes * bs
        self.requests_drafted += num_drafted
        self.drafts_proposed += num_drafts
        self.drafts_kept += kept
        self.rows_decided += num_passes * num_rows
        self.rows_verified += num_passes * verified_rows
        self.keep_ratio_counts[_ratio_label(kept, num_drafts)] += num_passes
        for phase, ms in timer.phase_ms.items():
            self.phase_ms[phase] += ms
        self._drafts_accepted = self._drafts_accepted + num_accepted.sum()
        if decision is not None and timer.step_ms is not None:
            self.selected_steps += num_passes
            self.predicted_ms += num_passes * decision.predicted_ms
            self.predicted_tokens += num_passes * decision.expected_tokens
            self.selected_ms += timer.step_ms

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers for ``/server_info``. Syncs once with the device."""
        accepted = int(self._drafts_accepted)
        return {
            "steps": self.steps,
            # Fewer where plain steps made several passes (passes.py).
            "scheduler_steps": self.scheduler_steps,
            "plain_steps": self.plain_steps,
            "first_plain_step": self.first_plain_step,
            "look_steps": self.look_steps,
            # Drafting only to find out, of all the time in decode steps.
            "look_share": round(self.look_ms / self.steps_ms, 6) if self.steps_ms else None,
            "plain_share": _share(self.plain_steps, self.steps),
            "request_steps": self.request_steps,
            "requests_drafted": self.requests_drafted,
            "drafts_proposed": self.drafts_proposed,
            "drafts_kept": self.drafts_kept,
            "drafts_accepted": accepted,
            "rows_decided": self.rows_decided,
            "rows_verified": self.rows_verified,
            "tokens_emitted": accepted + self.request_steps,
            "accept_length": _share(accepted + self.request_steps, self.request_steps),
            "accepted_over_kept": _share(accepted, self.drafts_kept),
            "keep_ratio_counts": dict(sorted(self.keep_ratio_counts.items())),
            "selected_steps": self.selected_steps,
            "selected_ms": round(self.selected_ms, 3),
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_tokens": round(self.predicted_tokens, 3),
            **{f"{phase}_ms": round(ms, 3) for phase, ms in self.phase_ms.items()},
        }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def _ratio_label(kept: int, num_drafts: int) -> str:
    """Kept share of the proposed drafts, to a twentieth; "plain" where none were."""
    return f"{round(20 * kept / num_drafts) / 20:.2f}" if num_drafts else "plain"
