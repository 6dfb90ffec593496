"""Drafting for one or two requests more only to find out, on a small share of the time.

What is known of a request ages once it is no longer drafted for, and nothing is known of a new
one. A step sets a little time aside; when enough has come together for two requests, it is spent:
on strangers first, then on those not drafted for the longest. Two at once, since most of what
looking costs is there for the first already. A look that finds strangers worth drafting for is
paid back, so that the next one comes at once: there may be more, if texts have become easier.
"""

from __future__ import annotations

import numpy as np

from dcut_sglang.cost import BatchCosts
from dcut_sglang.value import FloatArray, IntArray, Prices, ValueModel

# Requests looked at in one step, where there are as many.
_REQUESTS = 2
# Two drafts tell an easy request from a hard one.
_ROWS = 2
_TIME_SHARE = 0.01
# Share of its price that a look is paid back whose strangers were all worth drafting for.
_PAID_BACK = 1.0


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

    def save(self, costs: BatchCosts, num_passes: int = 1) -> None:
        """Set a share of a step's time aside."""
        self._saved_ms += _TIME_SHARE * num_passes * costs.plain_ms

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
            look_ms = _look_ms(count, len(drafted), costs, prices, own_ms)
            if not self._can_spend(look_ms, costs):
                return np.arange(0)
        waiting = np.argsort(self._values.drafted_at(rows[others]), kind="stable")
        return others[waiting[:count]]

    def found(self, values: FloatArray, costs: BatchCosts, prices: Prices) -> None:
        """Pay back a look at strangers, whose blocks were worth ``values`` [n] in tokens."""
        if not len(values):
            return
        forward_tokens = prices.tokens_per_ms * float(costs.draft_forward(costs.bs)) / costs.bs
        self._saved_ms += _PAID_BACK * float(np.mean(values > forward_tokens)) * self._price_ms

    def _can_spend(self, look_ms: float, costs: BatchCosts) -> bool:
        """Pay for a look, if enough has been set aside."""
        self.save(costs)
        # More than a few looks' worth lapses.
        self._saved_ms = min(self._saved_ms, 4 * look_ms)
        self._price_ms = look_ms
        if not self.is_due:
            return False
        self._saved_ms -= look_ms
        return True


def _look_ms(
    count: int, num_drafted: int, costs: BatchCosts, prices: Prices, own_ms: float
) -> float:
    """What looking at ``count`` requests costs."""
    after_ms = float(costs.draft_forward(num_drafted + count))
    if num_drafted:
        before_ms = float(costs.draft_forward(num_drafted))
        return after_ms - before_ms + count * _ROWS * prices.head_row_ms
    return after_ms + float(costs.head(count * _ROWS)) + own_ms
