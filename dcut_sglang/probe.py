"""Measure a cost table within a time budget.

The grid is as fine as the budget allows: a few timed steps predict what each grid would take,
the finest that fits is measured once from small batches to large, and the time that is left
goes into repeats, whose median counts. No step starts after the deadline, so the budget holds to
within one step even where the prediction was wrong; the table then ends at the largest batch
size that was measured, and extrapolates.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dcut_sglang.cost import CostTable
from dcut_sglang.survival import num_kept_at_ratio

MAX_REPEATS = 5
# Predictions come from a handful of steps on a machine that may be busy.
_SAFETY = 1.3
# Share of the budget that the first pass over the grid may be predicted to take.
_FIRST_PASS_SHARE = 0.6
# Most steps keep a draft or two per request, so the grid is finest there.
_ALL_RATIOS = (0.0, 0.1, 0.25, 0.5, 1.0)
# Finest first: factor between batch sizes, keep ratios.
_LEVELS: tuple[tuple[int, tuple[float, ...]], ...] = (
    (2, _ALL_RATIOS),
    (4, _ALL_RATIOS),
    (4, (0.0, 0.25, 1.0)),
    (8, (0.0, 0.25, 1.0)),
    (1 << 30, (0.0, 0.25, 1.0)),
)


class ProbeError(RuntimeError):
    """The costs could not be measured; the server must not start with invented ones."""


class StepRunner(Protocol):
    """Runs real steps for the probe; every call returns when its work is done."""

    def open(self, bs: int, context: int) -> None:
        """Prepare a batch of ``bs`` requests with ``context`` committed tokens each."""

    def draft(self, block_size: int) -> None:
        """Draft forward over one block of this size of every request of the open batch."""

    def head(self, num_rows: int) -> None:
        """Tokens and confidences of ``num_rows`` drafts; needs no open batch."""

    def verify(self, num_rows: int) -> int:
        """Verify ``num_rows`` rows of the open batch; returns the rows that really ran."""


@dataclass(frozen=True)
class ProbeReport:
    """The table, and how it was obtained."""

    table: CostTable
    probe_s: float
    num_steps: int


def probe_costs(
    runner: StepRunner,
    *,
    block_size: int,
    short_blocks: Sequence[int] = (),
    max_bs: int,
    contexts: Sequence[int],
    budget_s: float,
    fingerprint: Mapping[str, Any],
    clock: Callable[[], float] = time.perf_counter,
    step_clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda line: None,
) -> ProbeReport:
    """Measure verify and draft costs.

    Args:
        runner: executes the steps.
        short_blocks: block sizes below ``block_size`` that can be drafted too, ascending.
        max_bs: largest batch the server can run.
        contexts: context lengths to measure at, ascending.
        budget_s: seconds this may take; also covers the steps that predict.
        fingerprint: stored in the table.
        clock: seconds of wall time, for the budget.
        step_clock: seconds as steps are timed; on a CPU, time that other processes take from
            this one is best left out.
        progress: receives one line per batch size.

    Raises:
        ProbeError: a step ran another number of rows than asked.
    """
    probe = _Probe(
        runner, block_size, tuple(short_blocks), clock, step_clock, deadline=clock() + budget_s
    )
    start = clock()
    estimate = probe.estimate(max_bs, contexts[0])
    batch_sizes, ratios = _finest_grid(
        max_bs, contexts, block_size, estimate, _FIRST_PASS_SHARE * (probe.deadline - clock())
    )
    progress(
        f"measuring up to {len(batch_sizes)} batch sizes x {len(ratios)} keep ratios x "
        f"{len(contexts)} contexts, at most {budget_s:.0f} s"
    )
    done: list[int] = []
    for bs in batch_sizes:
        expected_s = len(contexts) * _row_seconds(bs, ratios, block_size, estimate)
        # A table that ends at small batches says nothing about large ones, where a wrong cost
        # hurts most: the coarsest grid is measured whole, whatever the time.
        is_least = bs == batch_sizes[0] or len(batch_sizes) == 2
        deadline = math.inf if is_least else probe.deadline
        if clock() + expected_s > deadline or not all(
            probe.measure(bs, ratios, context, deadline) for context in contexts
        ):
            progress(f"stopping before bs {bs}: no time left; larger batches are extrapolated")
            break
        done.append(bs)
        progress(f"bs {bs}: {clock() - start:.1f} of {budget_s:.0f} s")
    head_rows = _head_rows(done[-1] * (block_size - 1))
    probe.measure_head(head_rows, math.inf)
    for _ in range(MAX_REPEATS - 1):
        probe.measure_head(head_rows, probe.deadline)
        for bs in done:
            for context in contexts:
                if clock() + probe.last_seconds(bs, context) <= probe.deadline:
                    probe.measure(bs, ratios, context, probe.deadline)
    grid = (tuple(done), ratios, tuple(contexts), head_rows)
    table = probe.table(*grid, fingerprint).monotone()
    return ProbeReport(table, probe_s=clock() - start, num_steps=probe.num_steps)


@dataclass(frozen=True)
class _Estimate:
    """Seconds of a step: a base, and a slope per row, for verify and draft."""

    verify_base_s: float
    verify_row_s: float
    draft_base_s: float
    draft_request_s: float


class _Probe:
    def __init__(
        self,
        runner: StepRunner,
        block_size: int,
        short_blocks: tuple[int, ...],
        clock: Callable[[], float],
        step_clock: Callable[[], float],
        deadline: float,
    ) -> None:
        self.runner = runner
        self.block_size = block_size
        self.short_blocks = short_blocks
        self.clock = clock
        self.step_clock = step_clock
        self.deadline = deadline
        self.num_steps = 0
        self._verify_ms: dict[tuple[int, float, int], list[float]] = {}
        # By block size, batch size and context.
        self._draft_ms: dict[tuple[int, int, int], list[float]] = {}
        self._head_ms: dict[int, list[float]] = {}
        self._seconds: dict[tuple[int, int], float] = {}

    def measure(
        self, bs: int, ratios: Sequence[float], context: int, deadline: float = math.inf
    ) -> bool:
        """One sample of every ratio, and of the draft, at one batch size and context.

        Returns:
            False where the deadline passed before all of them had run.
        """
        start = self.clock()
        self.runner.open(bs, context)
        for size in (*self.short_blocks, self.block_size):
            self._draft_ms.setdefault((size, bs, context), []).append(self.time_draft(size))
        for ratio in ratios:
            if self.clock() >= deadline:
                return False
            num_rows = bs + num_kept_at_ratio(ratio, bs, self.block_size)
            sample_ms = self.time_verify(num_rows)
            self._verify_ms.setdefault((bs, ratio, context), []).append(sample_ms)
        self._seconds[bs, context] = self.clock() - start
        return True

    def measure_head(self, head_rows: Sequence[int], deadline: float) -> None:
        """One sample of every number of rows, as far as there is time."""
        for rows in head_rows:
            if self.clock() >= deadline:
                return
            self._head_ms.setdefault(rows, []).append(self.time_head(rows))

    def time_head(self, num_rows: int) -> float:
        """Milliseconds of the draft head over so many rows on the step clock."""
        start = self.step_clock()
        self.runner.head(num_rows)
        return (self.step_clock() - start) * 1e3

    def time_verify(self, num_rows: int) -> float:
        """Milliseconds of one verify on the step clock."""
        start = self.step_clock()
        executed = self.runner.verify(num_rows)
        elapsed_ms = (self.step_clock() - start) * 1e3
        self.num_steps += 1
        if executed != num_rows:
            raise ProbeError(
                f"the cost probe asked for {num_rows} rows and {executed} ran: the table would "
                "hold the cost of something else"
            )
        return elapsed_ms

    def time_draft(self, block_size: int) -> float:
        """Milliseconds of one draft forward on the step clock."""
        start = self.step_clock()
        self.runner.draft(block_size)
        return (self.step_clock() - start) * 1e3

    def last_seconds(self, bs: int, context: int) -> float:
        """Wall seconds that the last ``measure`` of these took."""
        return self._seconds[bs, context]

    def estimate(self, max_bs: int, context: int) -> _Estimate:
        """Time a few small steps; the first ones also warm caches and allocators up."""
        big = min(4, max_bs)
        timed: dict[int, tuple[float, float, float]] = {}
        for bs in dict.fromkeys((1, big)):
            self.runner.open(bs, context)
            full = bs * self.block_size
            for _ in range(2):
                timed[bs] = (
                    self._wall_ms(self.time_draft, self.block_size),
                    self._wall_ms(self.time_verify, bs),
                    self._wall_ms(self.time_verify, full),
                )
        draft_ms, anchor_ms, full_ms = timed[big]
        row_ms = max(0.0, full_ms - anchor_ms) / (big * (self.block_size - 1))
        draft_row_ms = max(0.0, draft_ms - timed[1][0]) / max(1, big - 1)
        scale = _SAFETY / 1e3
        return _Estimate(
            anchor_ms * scale, row_ms * scale, timed[1][0] * scale, draft_row_ms * scale
        )

    def _wall_ms(self, step: Callable[..., float], *args: int) -> float:
        start = self.clock()
        step(*args)
        return (self.clock() - start) * 1e3

    def table(
        self,
        batch_sizes: tuple[int, ...],
        ratios: tuple[float, ...],
        contexts: tuple[int, ...],
        head_rows: tuple[int, ...],
        fingerprint: Mapping[str, Any],
    ) -> CostTable:
        verify = [
            [[statistics.median(self._verify_ms[bs, r, x]) for x in contexts] for r in ratios]
            for bs in batch_sizes
        ]
        draft = [
            [[statistics.median(self._draft_ms[d, bs, x]) for x in contexts] for bs in batch_sizes]
            for d in (*self.short_blocks, self.block_size)
        ]
        return CostTable(
            self.block_size,
            batch_sizes,
            ratios,
            contexts,
            np.array(verify),
            np.array(draft[-1]),
            fingerprint,
            head_rows,
            np.array([statistics.median(self._head_ms[rows]) for rows in head_rows]),
            self.short_blocks,
            np.array(draft[:-1]).reshape(-1, len(batch_sizes), len(contexts)),
        )


def _finest_grid(
    max_bs: int, contexts: Sequence[int], block_size: int, estimate: _Estimate, allowed_s: float
) -> tuple[list[int], tuple[float, ...]]:
    for factor, ratios in _LEVELS:
        batch_sizes = sorted({min(max_bs, factor**i) for i in range(max_bs.bit_length() + 1)})
        needed_s = len(contexts) * sum(
            _row_seconds(bs, ratios, block_size, estimate) for bs in batch_sizes
        )
        if needed_s <= allowed_s:
            break
    return batch_sizes, ratios


def _head_rows(most: int) -> tuple[int, ...]:
    """Numbers of rows to measure the head at; beyond the last it grows in a line."""
    return tuple(sorted({min(rows, most) for rows in (1, 4, 16, 64, 256)}))


def _row_seconds(bs: int, ratios: Sequence[float], block_size: int, estimate: _Estimate) -> float:
    """Predicted seconds of one ``measure``."""
    rows = [bs + num_kept_at_ratio(ratio, bs, block_size) for ratio in ratios]
    verify_s = sum(estimate.verify_base_s + n * estimate.verify_row_s for n in rows)
    return verify_s + estimate.draft_base_s + bs * estimate.draft_request_s


def format_table(table: CostTable) -> str:
    """The table as text, one line per batch size and context, milliseconds."""
    head = [f"{100 * ratio:.0f} %" for ratio in table.keep_ratios]
    lines = [f"{'bs':>4} {'context':>8} {'draft':>8} " + " ".join(f"{h:>8}" for h in head)]
    for i, bs in enumerate(table.batch_sizes):
        for k, context in enumerate(table.contexts):
            cells = " ".join(f"{ms:8.1f}" for ms in table.verify_ms[i, :, k])
            lines.append(f"{bs:4d} {context:8d} {table.draft_ms[i, k]:8.1f} {cells}")
    head_ms = ", ".join(
        f"{rows}: {ms:.1f}" for rows, ms in zip(table.head_rows, table.head_ms, strict=True)
    )
    return "\n".join([*lines, f"draft head by rows: {head_ms}"])
