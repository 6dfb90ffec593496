"""Plain passes that follow one plan, since weighing what drafting is worth takes time as well.

A plan holds for a few passes. Where drafting was worth clearly less than its price it outlives a
request that leaves, and one that joins too if strangers are worth clearly less.

Several passes make a step, where the host allows it, within a limit of time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from dcut_sglang.cost import BatchCosts, CostTable
from dcut_sglang.plan import Plan
from dcut_sglang.value import ValueModel

# Passes that one plan is good for. Weighing takes 3 % of one on the CPU it was measured on.
_LENGTH = 8


class PlainRun:
    """The plan that is being followed, and the steps that did.

    Args:
        values: told of the passes that were made, when somebody needs to know.
        step_ms: that a step of several passes may take.
    """

    def __init__(self, values: ValueModel, step_ms: float = 0.0) -> None:
        self._values = values
        self._step_ms = step_ms
        self._most_passes = 1  # in that time
        self._plan: Plan | None = None
        self._requests: list[Hashable] = []
        self._is_clear = self._is_open = False
        self._num_left = 0
        # Passes of these requests that are not noted yet, and those of the run that are.
        self._num_new = self._num_noted = 0

    def begin(
        self,
        plan: Plan,
        requests: Sequence[Hashable],
        is_clear: bool,
        is_open: bool,
        most_passes: int = 1,
    ) -> Plan:
        """The plan of a plain step, which the next ones may follow.

        Args:
            is_clear: drafting for whomever is worth clearly less than it costs.
            is_open: so is drafting for strangers.
            most_passes: that the host lets a step make.
        """
        self._requests = list(requests)
        self._plan = replace(plan, is_followed=True)
        self._is_clear, self._is_open = is_clear, is_open
        self._num_left = _LENGTH
        self._most_passes = self.passes_in_time(plan.costs)
        return replace(plan, num_passes=self._take(most_passes))

    def follow(
        self,
        requests: Sequence[Hashable],
        context: float,
        table: CostTable,
        most_passes: int = 1,
    ) -> Plan | None:
        """The plan of the next step; None where the step has to be weighed."""
        plan = self._plan
        if plan is None or not self._num_left or plan.costs.table is not table:
            return None
        if requests != self._requests:
            if not self._holds_for(requests):
                return None
            self._note()
            costs = table.at(len(requests), context)
            self._plan = plan = replace(plan, costs=costs, context=context)
            self._most_passes = self.passes_in_time(costs)
            self._requests = list(requests)
        num_passes = self._take(most_passes)
        return plan if num_passes == 1 else replace(plan, num_passes=num_passes)

    def passes_in_time(self, costs: BatchCosts) -> int:
        """Passes of this batch that fit into a step; one always does."""
        return max(1, int(self._step_ms / costs.plain_ms))

    def _take(self, most_passes: int) -> int:
        num_passes = min(most_passes, self._most_passes, self._num_left)
        self._num_left -= num_passes
        return num_passes

    def _holds_for(self, requests: Sequence[Hashable]) -> bool:
        return self._is_clear and (self._is_open or set(requests) <= set(self._requests))

    def give_back(self, num_passes: int) -> None:
        """A step made so many passes less than it was to."""
        self._num_left += num_passes

    def passed(self, num_passes: int = 1) -> None:
        """A step that followed the plan has run: a token per request and pass."""
        self._num_new += num_passes

    def end(self) -> int:
        """Follow no longer; returns the passes that did."""
        self._note()
        self._plan, num_passes, self._num_noted = None, self._num_noted, 0
        return num_passes

    def _note(self) -> None:
        if self._num_new:
            self._values.pass_by(self._requests, self._num_new)
            self._num_noted += self._num_new
            self._num_new = 0
