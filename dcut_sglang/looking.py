"""Drafting for one or two requests more only to find out, on a small share of the time.

What is known of a request ages once it is no longer drafted for, and nothing is known of a new
one. A step sets a little time aside; when enough has come together for drafting for a request,
it is spent: on strangers first, then on those not drafted for the longest.
"""

from __future__ import annotations

import numpy as np

from dcut_sglang.cost import BatchCosts
from dcut_sglang.value import FloatArray, IntArray, Prices, ValueModel

# Requests looked at in one step, at most.
_REQUESTS = 2
# Two drafts tell an easy request from a hard one.
_ROWS = 2
_TIME_SHARE = 0.01


class Looking:
    """The time set aside, and what it buys.

    Args:
        values: what is known of the requests.
    """

    def __init__(self, values: ValueModel) -> None:
        self._values = values
        self._saved_ms = 0.0
        self._price_ms = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the time set aside pays for another look, at the last one's price."""
        return self._saved_ms >= self._price_ms

    def save(self, costs: BatchCosts) -> None:
        """Set a share of a step's time aside."""
        self._saved_ms += _TIME_SHARE * costs.plain_ms

    def places(
        self, rows: IntArray, drafted: IntArray, costs: BatchCosts, prices: Prices, own_ms: float
    ) -> IntArray:
        """Places in the batch, int64, to look at in a step that drafts for ``drafted`` anyway.

        Args:
            rows: int64 [bs], the batch's rows in the memory of values.
            own_ms: what deciding costs in a step that drafts, over one that does not.
        """
        is_other = np.ones(len(rows), dtype=bool)
        is_other[drafted] = False
        others = np.flatnonzero(is_other)
        if not len(others):
            return others
        count = min(_REQUESTS, len(others))
        if self._values.has_seen_any:
            count = self._spend(_look_ms(len(drafted), costs, prices, own_ms)[:count], costs)
        if not count:
            return np.arange(0)
        waiting = np.argsort(self._values.drafted_at(rows[others]), kind="stable")
        return others[waiting[:count]]

    def _spend(self, look_ms: FloatArray, costs: BatchCosts) -> int:
        """How many of the prices ``look_ms`` [n] of 1..n requests to pay now."""
        self.save(costs)
        # More than a few looks' worth lapses.
        self._saved_ms = min(self._saved_ms, 4 * float(look_ms[-1]))
        self._price_ms = float(look_ms[0])
        count = int((look_ms <= self._saved_ms).sum())
        if count:
            self._saved_ms -= float(look_ms[count - 1])
        return count


def _look_ms(num_drafted: int, costs: BatchCosts, prices: Prices, own_ms: float) -> FloatArray:
    """What looking at 1, 2, .. requests costs: float64 [n]."""
    forward_ms = costs.draft_forward(num_drafted + np.arange(_REQUESTS + 1))
    if num_drafted:
        return forward_ms[1:] - forward_ms[0] + _ROWS * prices.head_row_ms
    return forward_ms[1:] + float(costs.head(_ROWS)) + own_ms
