"""Counters of the decode step, as ``/server_info`` shows them under ``dcut``."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

PHASES = ("draft", "decide", "verify", "commit")


class StepTimer:
    """Wall time of a step's phases, in ms, on the host clock.

    On a CPU the host clock is the device clock. On CUDA, work is only queued here, and the
    figures are launch times.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.phase_ms: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """End ``phase`` now; the next one starts."""
        now = time.perf_counter()
        self.phase_ms[phase] = (now - self._last) * 1e3
        self._last = now

    @property
    def total_ms(self) -> float:
        return sum(self.phase_ms.values())


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
        self.plain_steps = 0
        self.request_steps = 0
        self.drafts_proposed = 0
        self.drafts_kept = 0
        self.rows_decided = 0
        self.rows_verified = 0
        self.keep_ratio_counts: Counter[str] = Counter()
        self.phase_ms: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._drafts_accepted: torch.Tensor | int = 0

    def start_step(self) -> StepTimer:
        return StepTimer()

    def end_step(
        self,
        timer: StepTimer,
        *,
        bs: int,
        num_rows: int,
        verified_rows: int,
        drafted: bool,
        num_accepted: torch.Tensor,
    ) -> None:
        """Add one step. ``num_accepted``: int64 [bs], kept on the device. No host sync."""
        num_drafts = bs * (self.block_size - 1) if drafted else 0
        kept = num_rows - bs
        self.steps += 1
        self.plain_steps += not drafted
        self.request_steps += bs
        self.drafts_proposed += num_drafts
        self.drafts_kept += kept
        self.rows_decided += num_rows
        self.rows_verified += verified_rows
        self.keep_ratio_counts[_ratio_label(kept, num_drafts)] += 1
        for phase, ms in timer.phase_ms.items():
            self.phase_ms[phase] += ms
        self._drafts_accepted = self._drafts_accepted + num_accepted.sum()

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers for ``/server_info``. Syncs once with the device."""
        accepted = int(self._drafts_accepted)
        return {
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "plain_share": _share(self.plain_steps, self.steps),
            "request_steps": self.request_steps,
            "drafts_proposed": self.drafts_proposed,
            "drafts_kept": self.drafts_kept,
            "drafts_accepted": accepted,
            "rows_decided": self.rows_decided,
            "rows_verified": self.rows_verified,
            "tokens_emitted": accepted + self.request_steps,
            "accept_length": _share(accepted + self.request_steps, self.request_steps),
            "accepted_over_kept": _share(accepted, self.drafts_kept),
            "keep_ratio_counts": dict(sorted(self.keep_ratio_counts.items())),
            **{f"{phase}_ms": round(ms, 3) for phase, ms in self.phase_ms.items()},
        }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def _ratio_label(kept: int, num_drafts: int) -> str:
    """Kept share of the proposed drafts, to a tenth of a percent; "plain" where none were."""
    return f"{kept / num_drafts:.3f}" if num_drafts else "plain"
