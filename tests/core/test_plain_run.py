"""Following a plain plan is noted as weighing every step would have been."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from early import EARLY_COSTS
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_sglang.config import DCutConfig
from dcut_sglang.controller import Controller
from dcut_sglang.cost import CostTable
from dcut_sglang.plain_run import PlainRun
from dcut_sglang.plan import Plan
from dcut_sglang.selector import Selector
from dcut_sglang.value import Prices, ValueModel

TABLE = CostTable.load(EARLY_COSTS)
DEPTH = TABLE.block_size - 1
PRICES = Prices(tokens_per_ms=0.2, row_ms=1.0, head_row_ms=0.1)


def plain_plan(requests: list[Hashable]) -> Plan:
    controller = Controller(Selector(TABLE, DCutConfig()))
    return controller.following("plain", np.arange(0), TABLE.block_size, len(requests), 64.0)


def values_of(requests: list[Hashable]) -> ValueModel:
    """A memory in which each request has shown a block."""
    values = ValueModel(DEPTH)
    survival = np.linspace(0.9, 0.1, DEPTH, dtype=np.float32)[None].repeat(len(requests), 0)
    values.observe(requests, survival, np.full(len(requests), DEPTH), PRICES)
    return values


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), max_size=7),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
)
def test_as_if_every_pass_had_been_weighed(batches: list[list[int]], most: int, seed: int) -> None:
    """Whoever comes and goes, values are what ``advance`` at every pass makes of them."""
    everybody: list[Hashable] = list(range(6))
    followed, weighed = values_of(everybody), values_of(everybody)
    held = np.random.default_rng(seed).random(6)
    followed._held[:6], weighed._held[:6] = held, held
    run = PlainRun(followed, step_ms=1e6)
    begun = run.begin(plain_plan(everybody), everybody, is_clear=True, is_open=True)
    assert begun.num_passes == 1  # the most, unless it is said otherwise
    num_passes, rng = 0, np.random.default_rng(seed)
    for batch in batches:
        plan = run.follow(batch, 64.0, TABLE, most)
        if num_passes == 7:
            assert plan is None
            break
        assert plan is not None and plan.is_followed and plan.costs.bs == len(batch)
        assert plan.num_passes == min(most, 7 - num_passes)
        made = int(rng.integers(1, plan.num_passes + 1))  # somebody came
        run.give_back(plan.num_passes - made)
        run.passed(made)
        num_passes += made
        none = np.zeros(len(batch), dtype=np.int64)
        for _ in range(made):
            weighed.advance(batch, none, none + 1)
    assert run.end() == num_passes
    assert run.end() == 0
    rows = followed.rows_of(everybody)
    np.testing.assert_array_equal(followed._advanced[rows], weighed._advanced[rows])
    np.testing.assert_allclose(followed._held[rows], weighed._held[rows])


def test_how_long_a_plan_holds() -> None:
    requests: list[Hashable] = ["a", "b"]
    for is_clear in (True, False):
        run = PlainRun(ValueModel(DEPTH))
        assert run.follow(requests, 64.0, TABLE) is None
        run.begin(plain_plan(requests), requests, is_clear, is_open=False)
        num_followed = 0
        while run.follow(requests, 64.0, TABLE) is not None:
            num_followed += 1
        assert num_followed == 7


def test_a_step_cut_short_leaves_the_plan_its_passes_and_looks_their_time() -> None:
    """Whether a message cuts a step short or not, the same passes follow the plan, and the same
    time is set aside."""
    requests: list[Hashable] = ["a", "b"]
    saved_ms, num_steps = [], []
    for made in (5, 1):
        controller = Controller(Selector(TABLE, DCutConfig(plain_step_ms=1e6)))
        controller._is_clear = controller._is_open = True
        plan = plain_plan(requests)
        passes, steps = 0, 0
        step = controller._plain_run.begin(plan, requests, True, True, most_passes=5)
        controller._looking.save(plan.costs, step.num_passes)
        while True:
            step = controller.cut_short(step, min(made, step.num_passes))
            passes, steps = passes + step.num_passes, steps + 1
            following = controller._plain_run.follow(requests, 64.0, TABLE, 5)
            if following is None:
                break
            controller._looking.save(plan.costs, following.num_passes)
            step = following
        assert passes == 8
        saved_ms.append(controller._looking._saved_ms)
        num_steps.append(steps)
    assert num_steps == [2, 8]
    np.testing.assert_allclose(*saved_ms)


def test_a_step_makes_no_more_passes_than_the_plan_is_good_for() -> None:
    requests: list[Hashable] = ["a", "b"]
    run = PlainRun(ValueModel(DEPTH), step_ms=1e6)
    assert run.begin(plain_plan(requests), requests, False, False, most_passes=5).num_passes == 5
    plan = run.follow(requests, 64.0, TABLE, 5)
    assert plan is not None and plan.num_passes == 3  # the last of eight
    assert run.follow(requests, 64.0, TABLE, 5) is None


@given(st.floats(0, 1e3), st.integers(1, 32))
def test_passes_fit_into_the_time_of_a_step(step_ms: float, bs: int) -> None:
    costs = TABLE.at(bs, 64.0)
    passes = PlainRun(ValueModel(DEPTH), step_ms).passes_in_time(costs)
    assert passes == 1 or passes * costs.plain_ms <= step_ms < (passes + 1) * costs.plain_ms
    plan, requests = plain_plan(list(range(bs))), list(range(bs))
    run = PlainRun(ValueModel(DEPTH), step_ms)
    run.begin(plan, requests, True, True, most_passes=4)
    followed = run.follow(requests, 64.0, TABLE, 4)
    assert followed is not None and followed.num_passes == min(passes, 4)


def test_who_may_come_and_go() -> None:
    requests: list[Hashable] = ["a", "b"]
    for is_clear, is_open, holds in (
        (True, True, (True, True)),
        (True, False, (True, False)),
        (False, True, (False, False)),
    ):
        for batch, expected in zip((["b"], ["a", "b", "new"]), holds, strict=True):
            run = PlainRun(ValueModel(DEPTH))
            run.begin(plain_plan(requests), requests, is_clear, is_open)
            assert (run.follow(batch, 64.0, TABLE) is not None) == expected


def test_a_corrected_table_ends_the_run() -> None:
    requests: list[Hashable] = ["a"]
    run = PlainRun(ValueModel(DEPTH))
    run.begin(plain_plan(requests), requests, is_clear=True, is_open=True)
    assert run.follow(requests, 64.0, CostTable.load(EARLY_COSTS)) is None
