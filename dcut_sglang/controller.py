"""For whom a step drafts, and how deep: for those requests whose drafts pay.

Every millisecond has a price, the tokens that plain decoding of the same batch earns in it.
Drafting for a request pays when the tokens its block is expected to add exceed the price of the
draft forward, the head's rows and the verify rows. (By Dinkelbach's rule the price of the greatest
ratio of tokens to time is what the run itself earns, which is more where speculation does well. On
recorded texts that price serves no better; and it is learnt, so that a burst of requests behind a
single easy one would be weighed at what that one earned.) A step in which nobody's drafts pay
drafts nothing and costs what plain decoding costs.

A small share of the time goes into looking (looking.py): drafting for one or two more requests,
strangers first, then those not drafted for the longest.

Decisions follow from the cost table and from confidences, never from a clock, so equal requests
in equal batches take equal decisions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from dcut_sglang.calibration import Calibration
from dcut_sglang.cost import BatchCosts
from dcut_sglang.force import Forced
from dcut_sglang.looking import Looking
from dcut_sglang.plain_run import PlainRun
from dcut_sglang.plan import Mode, Plan
from dcut_sglang.selector import Decision, Selector
from dcut_sglang.stages import Computed, PayingStages, Stages, WholeBlock
from dcut_sglang.token_cap import capped
from dcut_sglang.value import Float32Array, FloatArray, IntArray, Prices, ValueModel

_EXPLORE_TIME_SHARE = 0.005
# Tokens per request by which the gain may fall short before drafting stops.
_HYSTERESIS = 0.04
# Steps over which the drafts kept per request are averaged, for the price of a row.
_PRICE_STEPS = 30
# Share of its price up to which drafting is worth clearly less.
_CLEARLY_LESS = 0.8
_STRANGER = np.array([-1])
# Confidence assumed of a request of which nothing is known.
_STRANGER_PACE = 0.5


class Controller:
    """Plans steps, and learns from what they show.

    Args:
        selector: its costs and configuration decide what pays.
        has_stages: whether the head may run in stages; each needs its result on the host.
    """

    def __init__(self, selector: Selector, has_stages: bool = True) -> None:
        self.selector = selector
        self.has_stages = has_stages
        self.mode: Mode = "speculate"
        self.values = ValueModel(selector.cost.block_size - 1)
        self.calibration = Calibration(selector.cost.block_size - 1)
        # What a step spends outside of draft, head and verify: a plain one, one that drafts.
        self.overhead_ms = (0.0, 0.0)
        # What the last plan expected of drafting for the 1, 2, .. best requests, for the trace.
        self.draft_gains: FloatArray = np.zeros(0)
        self._is_calibrating = selector.config.calibration and not selector.config.deterministic
        self._kept_per_request = 1.0
        self._looking = Looking(self.values)
        # Whom the last plan drafts for, for the first time, only to find out.
        self._met: set[Hashable] = set()
        self._explore_budget_ms = 0.0
        self._plain_run = PlainRun(self.values, selector.config.plain_step_ms)
        # Whether drafting was worth clearly less than its price: for whomever, for strangers.
        self._is_clear = self._is_open = False

    def plan(self, requests: Sequence[Hashable], context: float, most_passes: int = 1) -> Plan:
        """Plan the next step of this batch.

        Args:
            requests: a key per request, the same over its lifetime.
            context: mean committed tokens per request.
            most_passes: forwards that a plain step may make.
        """
        table = self.selector.cost
        if not self._looking.is_due:
            followed = self._plain_run.follow(requests, context, table, most_passes)
            if followed is not None:
                self._looking.save(followed.costs, followed.num_passes)
                return followed
        self._kept_per_request *= (1 - 1 / _PRICE_STEPS) ** self._plain_run.end()
        bs, config = len(requests), self.selector.config
        costs = table.at(bs, context)
        prices = self.prices(costs)
        rows = self.values.rows_of(requests)
        if config.plain_steps:
            drafted = self._paying(rows, prices, costs)
            paying = len(drafted)
            own_ms = max(0.0, self.overhead_ms[1] - self.overhead_ms[0])
            looked_at = self._looking.places(rows, drafted, costs, prices, own_ms)
            self._met = {requests[i] for i in looked_at if rows[i] < 0}
            drafted = np.concatenate([drafted, looked_at])
            self.mode = "speculate" if paying else "look" if len(drafted) else "plain"
            drafted = np.sort(drafted)
        else:
            drafted = np.arange(bs)
        block_size = self._block_size(rows[drafted], prices, costs)
        stages = self._stages(rows[drafted], prices, block_size - 1)
        plan = self._make_plan(self.mode, drafted, stages, block_size, costs, prices, context)
        if self.mode == "plain":
            run = self._plain_run
            plan = run.begin(plan, requests, self._is_clear, self._is_open, most_passes)
            self._looking.save(costs, plan.num_passes - 1)
        return plan

    def cut_short(self, plan: Plan, num_passes: int) -> Plan:
        """The plan of a plain step that ended after ``num_passes``."""
        num_less = plan.num_passes - num_passes
        if plan.mode != "forced":
            self._plain_run.give_back(num_less)
            self._looking.save(plan.costs, -num_less)
        return replace(plan, num_passes=num_passes)

    def forced(
        self, forced: Forced, bs: int, context: float, step: int, most_passes: int = 1
    ) -> Plan:
        """The plan of a step whose choices are forced."""
        costs = self.selector.cost.at(bs, context)
        drafted = forced.drafted(bs, step).numpy()
        block_size = forced.draft_block_size(tuple(sorted(costs.forward_ms)), step)
        stages = forced.stages(block_size - 1, step)
        prices = self.prices(costs)
        plan = self._make_plan("forced", drafted, stages, block_size, costs, prices, context)
        most_passes = min(most_passes, self._plain_run.passes_in_time(costs))
        return replace(plan, num_passes=forced.num_passes(most_passes, len(drafted), step))

    def following(
        self,
        mode: Mode,
        drafted: IntArray,
        block_size: int,
        bs: int,
        context: float,
    ) -> Plan:
        """The plan of a rank that does as another one decided."""
        costs, stages = self.selector.cost.at(bs, context), WholeBlock(block_size - 1)
        prices = self.prices(costs)
        return self._make_plan(mode, drafted, stages, block_size, costs, prices, context)

    def _make_plan(
        self,
        mode: Mode,
        drafted: IntArray,
        stages: Stages,
        block_size: int,
        costs: BatchCosts,
        prices: Prices,
        context: float,
    ) -> Plan:
        overhead_ms = self.overhead_ms[len(drafted) > 0]
        calibrate = self.calibration.apply
        return Plan(
            mode, drafted, stages, block_size, costs, prices, context, overhead_ms, calibrate
        )

    def prices(self, costs: BatchCosts) -> Prices:
        """What time is worth in a batch like this."""
        bs = costs.bs
        usual_rows = max(1, round(self._kept_per_request * bs))
        plain_ms, usual_ms = costs.plain_ms, float(costs.verify(bs + usual_rows))
        all_rows = bs * self.values.depth
        head_ms = costs.head(np.array([1, all_rows]))
        return Prices(
            tokens_per_ms=bs / (plain_ms + self.overhead_ms[0]),
            row_ms=(usual_ms - plain_ms) / usual_rows,
            head_row_ms=float(head_ms[1] - head_ms[0]) / max(1, all_rows - 1),
        )

    def _paying(self, rows: IntArray, prices: Prices, costs: BatchCosts) -> IntArray:
        """The requests, best first, whose drafts together pay the most; none if none do."""
        bs, config = len(rows), self.selector.config
        self.draft_gains = np.zeros(0)
        if not self.values.has_seen_any:
            return np.arange(0)
        values = self.values.predict(rows, prices)
        order = np.argsort(-values, kind="stable")
        counts = np.arange(1, bs + 1) if config.draft_subsets else np.array([bs])
        fixed_ms = float(costs.head(1)) + self.overhead_ms[1] - self.overhead_ms[0]
        draft_ms = costs.draft_forward(counts) + fixed_ms
        price = prices.tokens_per_ms * draft_ms
        net = np.cumsum(values[order])[counts - 1] - price
        self.draft_gains = net
        self._is_clear = bool(np.all(net < (_CLEARLY_LESS - 1.0) * price))
        if self._is_clear:
            stranger = self.values.predict(_STRANGER, prices)
            self._is_open = bool(np.all(counts * stranger < _CLEARLY_LESS * price))
        if config.max_token_ms is not None:
            net, relief = capped(
                net,
                counts,
                rows[order],
                config.max_token_ms,
                self.values,
                prices,
                costs,
                self.overhead_ms,
            )
            if relief:
                return order
        best = int(np.argmax(net))
        # To go on takes less than to begin, or the mode would follow the noise at break-even.
        least = config.min_gain - (_HYSTERESIS if self.mode == "speculate" else 0.0)
        pays = net[best] > max(0.0, least) * bs
        return order[: counts[best]] if pays else np.arange(0)

    def _block_size(self, rows: IntArray, prices: Prices, costs: BatchCosts) -> int:
        """The block size that pays most: a shorter one costs less and forgoes the last drafts."""
        sizes = sorted(costs.forward_ms)
        if len(sizes) == 1 or not len(rows) or not self.selector.config.short_blocks:
            return sizes[-1]
        forgone = [float(self.values.beyond(rows, size - 1, prices).sum()) for size in sizes]
        price = [
            prices.tokens_per_ms * float(costs.draft_forward(len(rows), size)) for size in sizes
        ]
        return sizes[int(np.argmin(np.add(forgone, price)))]

    def _stages(self, rows: IntArray, prices: Prices, depth: int) -> Stages:
        boundaries = self.selector.config.head_stages
        if not self.has_stages or not boundaries:
            return WholeBlock(depth)
        pace = np.where(rows < 0, _STRANGER_PACE, self.values.pace(rows))
        inner = [b for b in boundaries if self.selector.config.min_drafts <= b < depth]
        return PayingStages([*inner, depth], self.selector.cost, prices, pace)

    def explored(self, decision: Decision, plan: Plan, num_drafts: int) -> Decision:
        """The decision, now and then with a few more drafts than pay.

        Outcomes are only seen of what is verified: a drafter taken for worse than it is would
        never be seen to be better. A small share of the time goes into a draft more for each
        request drafted for, the best of those that were cut.
        """
        extra = min(len(plan.drafted), num_drafts - decision.num_kept)
        allowed = _EXPLORE_TIME_SHARE * decision.predicted_ms
        price_ms = extra * plan.prices.row_ms
        self._explore_budget_ms = min(self._explore_budget_ms + allowed, 10 * allowed + price_ms)
        is_capped = self.selector.config.max_token_ms is not None
        can = self._is_calibrating and self.selector.is_free and not is_capped and extra > 0
        if not can or price_ms > self._explore_budget_ms:
            return decision
        self._explore_budget_ms -= price_ms
        rows = decision.num_rows + np.array([0, extra])
        before_ms, after_ms = plan.costs.verify(rows)
        return replace(
            decision,
            num_kept=decision.num_kept + extra,
            num_rows=decision.num_rows + extra,
            predicted_ms=decision.predicted_ms + float(after_ms - before_ms),
        )

    def observe(
        self,
        requests: Sequence[Hashable],
        computed: Computed,
        confidence: Float32Array,
        kept: IntArray,
        accepted: IntArray,
        plan: Plan,
    ) -> None:
        """Learn from the n requests that were drafted for.

        Args:
            confidence: float32 [n, D-1], raw.
            kept, accepted: int [n], verified drafts and how many of them held.
        """
        if not len(requests):
            return
        worth = self.values.observe(requests, computed.survival, computed.depth, plan.prices)
        if self._met:
            is_met = np.array([request in self._met for request in requests])
            self._looking.found(worth[is_met], plan.costs, plan.prices)
            self._met = set()
        if self._is_calibrating:
            self.calibration.learn(confidence, kept, accepted)

    def advance(
        self,
        requests: Sequence[Hashable],
        kept: IntArray,
        emitted: IntArray,
        decision: Decision,
        plan: Plan,
    ) -> None:
        """Learn what came of a step: verified drafts [bs] and emitted tokens [bs]."""
        if plan.is_followed:
            self._plain_run.passed(plan.num_passes)
            return
        self.values.advance(requests, kept, emitted)
        bs = len(requests)
        per_request = decision.num_kept / bs
        self._kept_per_request += (per_request - self._kept_per_request) / _PRICE_STEPS
