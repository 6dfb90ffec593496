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
    st.integers(0, 2**32 - 1),
)
def test_as_if_every_step_had_been_weighed(batches: list[list[int]], seed: int) -> None:
    """Whoever comes and goes, values are what ``advance`` at every step makes of them."""
    everybody: list[Hashable] = list(range(6))
    followed, weighed = values_of(everybody), values_of(everybody)
    held = np.random.default_rng(seed).random(6)
    followed._held[:6], weighed._held[:6] = held, held
    run = PlainRun(followed)
    run.begin(plain_plan(everybody), everybody, is_clear=True, is_open=True)
    for batch in batches:
        plan = run.follow(batch, 64.0, TABLE)
        assert plan is not None and plan.is_followed and plan.costs.bs == len(batch)
        run.passed()
        none = np.zeros(len(batch), dtype=np.int64)
        weighed.advance(batch, none, none + 1)
    assert run.end() == len(batches)
    assert run.end() == 0
    rows = followed.rows_of(everybody)
    np.testing.assert_array_equal(followed._advanced[rows], weighed._advanced[rows])
    np.testing.assert_allclose(followed._held[rows], weighed._held[rows])


def test_how_long_a_plan_holds() -> None:
    requests: list[Hashable] = ["a", "b"]
    for is_clear, length in ((True, 8), (False, 4)):
        run = PlainRun(ValueModel(DEPTH))
        assert run.follow(requests, 64.0, TABLE) is None
        run.begin(plain_plan(requests), requests, is_clear, is_open=False)
        num_followed = 0
        while run.follow(requests, 64.0, TABLE) is not None:
            num_followed += 1
        assert num_followed == length - 1


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
