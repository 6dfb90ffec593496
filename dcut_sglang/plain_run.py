"""Plain steps that follow one plan, since weighing what drafting is worth takes time as well.

A plan holds for a few steps, longer where drafting was worth clearly less than its price. Then
it outlives a request that leaves, and one that joins too if strangers are worth clearly less.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from dcut_sglang.cost import CostTable
from dcut_sglang.plan import Plan
from dcut_sglang.value import ValueModel

# Steps that one plan is good for. Weighing takes 3 % of a step of the CPU it was measured on.
_LENGTH, _UNCLEAR_LENGTH = 8, 4


class PlainRun:
    """The plan that is being followed, and the steps that did.

    Args:
        values: told of the steps that have passed, when somebody needs to know.
    """

    def __init__(self, values: ValueModel) -> None:
        self._values = values
        self._plan: Plan | None = None
        self._requests: list[Hashable] = []
        self._is_clear = self._is_open = False
        self._num_left = 0
        # Steps of these requests that are not noted yet, and those of the run that are.
        self._num_new = self._num_noted = 0

    def begin(
        self, plan: Plan, requests: Sequence[Hashable], is_clear: bool, is_open: bool
    ) -> None:
        """Let the next steps follow a plain plan.

        Args:
            is_clear: drafting for whomever is worth clearly less than it costs.
            is_open: so is drafting for strangers.
        """
        self._plan, self._requests = replace(plan, is_followed=True), list(requests)
        self._is_clear, self._is_open = is_clear, is_open
        self._num_left = (_LENGTH if is_clear else _UNCLEAR_LENGTH) - 1

    def follow(self, requests: Sequence[Hashable], context: float, table: CostTable) -> Plan | None:
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
            self._requests = list(requests)
        self._num_left -= 1
        return plan

    def _holds_for(self, requests: Sequence[Hashable]) -> bool:
        return self._is_clear and (self._is_open or set(requests) <= set(self._requests))

    def passed(self) -> None:
        """A step that followed the plan has run: it emitted a token per request."""
        self._num_new += 1

    def end(self) -> int:
        """Follow no longer; returns the steps that did."""
        self._note()
        self._plan, num_steps, self._num_noted = None, self._num_noted, 0
        return num_steps

    def _note(self) -> None:
        if self._num_new:
            self._values.pass_by(self._requests, self._num_new)
            self._num_noted += self._num_new
            self._num_new = 0
