"""How many drafts of a request get tokens and confidences: the draft head, in stages.

The draft forward yields a hidden state for every place of the block at once. The target's head,
which turns them into tokens and confidences, costs per row, and on a CPU most of what drafting
costs. So it runs over the first few drafts of every request, and goes on only where what it found
promises that the next drafts pay for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dcut_sglang.cost import BatchCosts, CostTable
from dcut_sglang.value import BoolArray, Float32Array, FloatArray, IntArray, Prices

# (places int64 [m], lo, hi) -> confidences [m, hi - lo] of drafts lo + 1 .. hi.
Head = Callable[[IntArray, int, int], Float32Array]


class Stages(Protocol):
    """A rule for one step."""

    def next(self, survival: Float32Array, places: IntArray) -> tuple[BoolArray, int]:
        """Whose drafts to compute next, and up to which.

        Args:
            survival: [n, lo] of the requests still in the running; lo = 0 at the start.
            places: int64 [n], which of the plan's requests they are.

        Returns:
            (bool [n], depth > lo); the step's head is done when nobody is chosen.
        """


class WholeBlock:
    """Every draft of every request, at once."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def next(self, survival: Float32Array, places: IntArray) -> tuple[BoolArray, int]:
        return np.full(len(places), survival.shape[1] == 0), self.depth


class PayingStages:
    """Goes on where the next drafts are expected to be worth more tokens than they cost.

    The expectation continues a request's survival at the pace it has shown so far. Of the
    boundaries ahead, the one with the greatest expected gain less the head's price is taken:
    far ones where a GEMM costs much whatever its rows, near ones where rows are what costs.

    Args:
        boundaries: depths at which the head may stop, ascending, the last is D-1.
        cost: gives the head's price, its fixed part included.
        prices: of the step.
        pace: [n], confidence expected of each of the plan's requests before anything is known.
    """

    def __init__(
        self, boundaries: Sequence[int], cost: CostTable, prices: Prices, pace: FloatArray
    ) -> None:
        self._boundaries = boundaries
        self._cost = cost
        self._prices = prices
        self._pace = pace

    def next(self, survival: Float32Array, places: IntArray) -> tuple[BoolArray, int]:
        lo = survival.shape[1]
        ahead = [depth for depth in self._boundaries if depth > lo]
        if not ahead or not len(places):
            return np.zeros(len(places), dtype=bool), lo
        if lo:
            last = survival[:, -1].astype(np.float64)
            pace = np.maximum(last, 1e-9) ** (1.0 / lo)
        else:
            last, pace = np.ones(len(places)), self._pace[places]
        expected = last[:, None] * pace[:, None] ** np.arange(1, ahead[-1] - lo + 1)
        gains = np.maximum(expected - self._prices.row_tokens, 0.0).cumsum(axis=1)
        best: tuple[float, BoolArray, int] | None = None
        for depth in ahead:
            num_rows = depth - lo
            net = gains[:, num_rows - 1] - self._prices.head_row_tokens * num_rows
            # What was drafted for is looked at: the first stage is everybody's.
            chosen = net > 0 if lo else np.ones(len(places), dtype=bool)
            head_ms = float(self._cost.head(int(chosen.sum()) * num_rows))
            total = gains[chosen, num_rows - 1].sum() - self._prices.tokens_per_ms * head_ms
            if best is None or total > best[0]:
                best = (float(total), chosen, depth)
        assert best is not None
        total, chosen, depth = best
        if lo and total <= 0:
            return np.zeros(len(places), dtype=bool), lo
        return chosen, depth


@dataclass(frozen=True)
class Computed:
    """What the head found.

    Attributes:
        survival: float32 [n, D-1], 0 beyond the computed depth.
        depth: int64 [n], drafts computed of each request.
        rows: rows of each stage, for their price.
    """

    survival: Float32Array
    depth: IntArray
    rows: tuple[int, ...]

    def head_ms(self, cost: CostTable | BatchCosts) -> float:
        """Milliseconds of all stages."""
        return float(cost.head(np.array(self.rows)).sum()) if self.rows else 0.0


def nothing_computed(depth: int) -> Computed:
    """Of a step that drafts for nobody."""
    return Computed(np.zeros((0, depth), dtype=np.float32), np.zeros(0, dtype=np.int64), ())


def compute_in_stages(stages: Stages, num_requests: int, depth: int, head: Head) -> Computed:
    """Run the head over ``num_requests`` blocks of ``depth`` drafts, as deep as ``stages`` says."""
    survival = np.zeros((num_requests, depth), dtype=np.float32)
    depths = np.zeros(num_requests, dtype=np.int64)
    rows: list[int] = []
    live, lo = np.arange(num_requests), 0
    while lo < depth:
        chosen, hi = stages.next(survival[live, :lo], live)
        live = live[chosen]
        if not len(live):
            break
        last = survival[live, lo - 1] if lo else np.ones(len(live), dtype=np.float32)
        confidence = np.asarray(head(live, lo, hi), dtype=np.float32)
        # As in ``survival.survival``: a broken confidence may cost speed, and not for good.
        confidence = np.where(np.isfinite(confidence), confidence, 0.0).clip(0.0, 1.0)
        survival[live, lo:hi] = last[:, None] * np.cumprod(confidence, axis=1, dtype=np.float32)
        depths[live] = hi
        rows.append(len(live) * (hi - lo))
        lo = hi
    return Computed(survival, depths, tuple(rows))
