"""Costs that correct themselves: a probed table, moved slowly towards what steps really take.

A table measured at start-up is wrong where it interpolates, and becomes wrong when the machine
changes under it. Every step that is timed on the table's own clock moves the cells around it by
a part of the difference, each within bounds; the first visits of a cell count most. The cells are
those of a finer grid (``refined``), so that a table probed in haste comes right where steps run.

A machine that gets slower, because others use it too, slows all steps alike. Were that left to the
cells, those of the steps that run would soon be right and all others too cheap, and the next
decision would fall for one of these. So a factor common to all cells follows every step, and the
cells learn what it leaves.
What a step spends outside of the measured parts (planning, selection, bookkeeping) is kept as an
overhead, apart for steps that draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dcut_sglang import grid
from dcut_sglang.cost import BatchCosts, CostTable

FloatArray = npt.NDArray[np.float64]

# Share of a difference by which one step moves a cell that it lies on, once it has been visited
# often; the n-th visit moves it by 1/n before that.
_RATE = 0.05
# Most steps keep a draft or two per request, so the grid is finest there.
_KEEP_RATIOS = (0.0, 0.07, 0.14, 0.25, 0.5, 1.0)
# Share of a step's difference by which it moves the factor common to all cells.
_COMMON_RATE = 0.1
# One step never counts for more than this factor, and no cell moves by more than that one.
_MAX_STEP_FACTOR = 1.5
_MAX_FACTOR = 3.0
_MAX_COMMON_FACTOR = 10.0
# Steps after which the corrected table is used.
_REFRESH_STEPS = 8
# The alarm: a difference of more than 20 % on average over this many steps.
ALARM_RATIO = 1.2
_ALARM_STEPS = 100


@dataclass(frozen=True)
class MeasuredStep:
    """One step on the cost table's clock.

    Attributes:
        bs, rows, context: requests, rows of the verify, mean committed tokens.
        num_drafted: requests of the draft forward.
        draft_block_size: its block size.
        head_rows: rows of each stage of the head.
        forward_ms, head_ms, verify_ms: what these took; the last includes the commit.
        other_ms: the rest of the step.
        costs: those that the step was planned with, if they are at hand.
    """

    bs: int
    rows: int
    context: float
    num_drafted: int
    draft_block_size: int
    head_rows: tuple[int, ...]
    forward_ms: float
    head_ms: float
    verify_ms: float
    other_ms: float
    costs: BatchCosts | None = None


class CostCorrection:
    """Factors on a cost table's cells.

    Args:
        probed: the table as measured at start-up (``refined``: its cells are what can be
            corrected); its contexts share their factors.
    """

    def __init__(self, probed: CostTable) -> None:
        self.probed = probed
        self.table = probed
        self.num_steps = 0
        self._verify = _Factors((len(probed.batch_sizes), len(probed.keep_ratios)))
        self._forward = _Factors((len(probed.batch_sizes),))
        self._head = _Factors((len(probed.head_rows),))
        self._log_common = 0.0
        self._overhead_ms = {True: 0.0, False: 0.0}
        self._num_overheads = {True: 0, False: 0}
        self._log_error = 0.0
        self.alarm = False

    def overhead_ms(self, drafting: bool) -> float:
        """What a step spends outside of draft, head and verify."""
        return self._overhead_ms[drafting]

    @property
    def error_ratio(self) -> float:
        """Measured over predicted step time, a mean over the last hundred steps."""
        return math.exp(self._log_error)

    def observe(self, step: MeasuredStep) -> bool:
        """Learn from one step; returns whether the alarm has just gone off."""
        table = self.table
        costs = step.costs
        if costs is None or costs.table is not table:
            costs = table.at(step.bs, step.context)
        verify_ms = float(costs.verify(step.rows))
        forward_ms = head_ms = 0.0
        if step.num_drafted:
            forward_ms = float(costs.draft_forward(step.num_drafted, step.draft_block_size))
            head_ms = float(costs.head(np.array(step.head_rows)).sum())
        predicted = verify_ms + forward_ms + head_ms
        measured = step.verify_ms + step.forward_ms + step.head_ms
        # What the common factor takes up is not the cells' to learn.
        left = 1.0 / self._note_common(measured / predicted)
        ratio = (step.rows - step.bs) / (step.bs * (table.block_size - 1))
        at_size = grid.weights(table.batch_sizes, step.bs)
        weights = at_size[:, None] * grid.weights(table.keep_ratios, ratio)
        self._verify.move(weights, left * step.verify_ms, verify_ms)
        if step.num_drafted:
            at_count = grid.weights(table.batch_sizes, step.num_drafted)
            self._forward.move(at_count, left * step.forward_ms, forward_ms)
            of_stages = np.array([grid.weights(table.head_rows, rows) for rows in step.head_rows])
            self._head.move(of_stages.mean(axis=0), left * step.head_ms, head_ms)
        measured += step.other_ms
        predicted += self._overhead_ms[step.num_drafted > 0]
        self._note_overhead(step.num_drafted > 0, step.other_ms)
        self.num_steps += 1
        if self.num_steps % _REFRESH_STEPS == 0:
            self.table = self._corrected()
        return self._note_error(measured / predicted)

    def _corrected(self) -> CostTable:
        common, probed = math.exp(self._log_common), self.probed
        forward = common * self._forward.factors[:, None]
        return replace(
            probed,
            verify_ms=probed.verify_ms * common * self._verify.factors[:, :, None],
            draft_ms=probed.draft_ms * forward,
            short_draft_ms=probed.short_draft_ms * (forward if probed.short_blocks else 1.0),
            head_ms=probed.head_ms * common * self._head.factors,
        )

    def _note_common(self, ratio: float) -> float:
        """Follow a step that took ``ratio`` times what was predicted; returns by which factor."""
        if ratio <= 0:
            return 1.0
        before, most = self._log_common, math.log(_MAX_COMMON_FACTOR)
        moved = before + _COMMON_RATE * _step_error(ratio)
        self._log_common = min(max(moved, -most), most)
        return math.exp(self._log_common - before)

    def _note_overhead(self, drafting: bool, other_ms: float) -> None:
        before, count = self._overhead_ms[drafting], self._num_overheads[drafting]
        # A single slow step (a garbage collection, say) moves it little; a slow first one, which
        # nothing tells from others, is soon averaged away.
        moved = min(other_ms, 2 * before + 0.1) if count else other_ms
        rate = max(_RATE, 1 / (count + 1))
        self._overhead_ms[drafting] = before + rate * (moved - before)
        self._num_overheads[drafting] = count + 1

    def _note_error(self, ratio: float) -> bool:
        self._log_error += (math.log(max(ratio, 1e-3)) - self._log_error) / _ALARM_STEPS
        was, limit = self.alarm, math.log(ALARM_RATIO)
        # It goes off above the limit and rests again below half of it.
        self.alarm = abs(self._log_error) > (limit / 2 if was else limit)
        return self.alarm and not was

    def to_json(self) -> dict[str, Any]:
        """For ``/server_info``."""
        return {
            "steps": self.num_steps,
            "alarm": self.alarm,
            "error_ratio": round(self.error_ratio, 4),
            "common_factor": round(math.exp(self._log_common), 3),
            "overhead_ms": round(self._overhead_ms[False], 4),
            "overhead_drafting_ms": round(self._overhead_ms[True], 4),
            "verify_factor": np.round(self._verify.factors, 3).tolist(),
            "draft_factor": np.round(self._forward.factors, 3).tolist(),
            "head_factor": np.round(self._head.factors, 3).tolist(),
        }


def refined(probed: CostTable, max_bs: int) -> CostTable:
    """A probed table on a grid that is fine enough to be corrected, up to ``max_bs`` requests."""
    sizes = {min(1 << i, max_bs) for i in range(max_bs.bit_length() + 1)}
    return probed.resampled(tuple(sorted(sizes)), _KEEP_RATIOS)


def _step_error(ratio: float) -> float:
    """Logarithm of what one step says, within bounds."""
    return math.log(min(max(ratio, 1 / _MAX_STEP_FACTOR), _MAX_STEP_FACTOR))


class _Factors:
    """Factors on cells of one kind, as logarithms, and how often each was visited."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._log = np.zeros(shape)
        self._visits = np.zeros(shape)

    @property
    def factors(self) -> FloatArray:
        return np.exp(self._log)

    def move(self, weights: FloatArray, measured: float, predicted: float) -> None:
        """Move towards explaining what was measured, each cell by its weight."""
        if measured <= 0 or predicted <= 0:
            return
        error = _step_error(measured / predicted)
        self._visits += weights
        self._log += np.maximum(_RATE, 1 / (1 + self._visits)) * error * weights
        np.clip(self._log, -math.log(_MAX_FACTOR), math.log(_MAX_FACTOR), out=self._log)
