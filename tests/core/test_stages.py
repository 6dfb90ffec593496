"""The draft head in stages: what it computes, and that it goes on only where drafts pay."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_sglang.cost import CostTable
from dcut_sglang.stages import (
    Computed,
    PayingStages,
    Stages,
    WholeBlock,
    compute_in_stages,
    nothing_computed,
)
from dcut_sglang.value import Prices

DEPTH = 15
BOUNDARIES = (2, 5, 9, DEPTH)

seeds = st.integers(0, 10_000)
boundaries = st.lists(st.integers(1, DEPTH - 1), unique=True, max_size=4).map(
    lambda inner: (*sorted(inner), DEPTH)
)


def table(fixed_ms: float, row_ms: float) -> CostTable:
    """The head costs a fixed part and so much per row."""
    rows = (1, 1000)
    head_ms = fixed_ms + row_ms * np.array(rows)
    return CostTable(
        DEPTH + 1, (8,), (0.0, 1.0), (100,), np.ones((1, 2, 1)), np.ones((1, 1)), {}, rows, head_ms
    )


def prices(row_tokens: float, head_row_ms: float, tokens_per_ms: float = 0.1) -> Prices:
    return Prices(tokens_per_ms, row_tokens / tokens_per_ms, head_row_ms)


@dataclass
class Head:
    """Confidences that are known beforehand; remembers what was asked."""

    confidence: np.ndarray
    calls: list[tuple[list[int], int, int]] = field(default_factory=list)

    def __call__(self, places: np.ndarray, lo: int, hi: int) -> np.ndarray:
        self.calls.append((places.tolist(), lo, hi))
        return self.confidence[places, lo:hi]

    def compute(self, stages: Stages) -> Computed:
        return compute_in_stages(stages, len(self.confidence), DEPTH, self)


class AtRandom:
    """Any rule at all: at its boundaries a random part goes on."""

    def __init__(self, boundaries: tuple[int, ...], rng: np.random.Generator) -> None:
        self._boundaries = boundaries
        self._rng = rng

    def next(self, survival: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, int]:
        assert survival.shape[0] == len(places)
        ahead = [depth for depth in self._boundaries if depth > survival.shape[1]]
        return self._rng.random(len(places)) < 0.7, ahead[0] if ahead else DEPTH


# -- what is computed ----------------------------------------------------------------------------


@given(seeds, boundaries, st.integers(0, 8))
def test_survival_is_the_prefix_product_as_deep_as_computed(
    seed: int, boundaries: tuple[int, ...], n: int
) -> None:
    rng = np.random.default_rng(seed)
    head = Head(rng.random((n, DEPTH), dtype=np.float32))
    computed = head.compute(AtRandom(boundaries, rng))
    assert computed.survival.shape == (n, DEPTH) and computed.survival.dtype == np.float32
    assert computed.depth.shape == (n,) and computed.depth.dtype == np.int64
    assert set(computed.depth.tolist()) <= {0, *boundaries}
    inside = np.arange(DEPTH) < computed.depth[:, None]
    want = np.where(inside, head.confidence.astype(np.float64).cumprod(axis=1), 0.0)
    np.testing.assert_allclose(computed.survival, want, rtol=1e-5, atol=1e-30)
    # Every draft is computed once, each stage from where the last one ended.
    asked = np.zeros((n, DEPTH), dtype=int)
    for places, lo, hi in head.calls:
        assert places and lo < hi
        asked[places, lo:hi] += 1
    np.testing.assert_array_equal(asked, inside)
    assert computed.rows == tuple(len(places) * (hi - lo) for places, lo, hi in head.calls)
    assert sum(computed.rows) == computed.depth.sum()


@pytest.mark.parametrize("n", [0, 1, 5])
def test_whole_blocks_come_at_once(n: int) -> None:
    head = Head(np.random.default_rng(0).random((n, DEPTH), dtype=np.float32))
    computed = head.compute(WholeBlock(DEPTH))
    assert computed.depth.tolist() == [DEPTH] * n
    assert computed.rows == ((n * DEPTH,) if n else ())
    np.testing.assert_allclose(computed.survival, head.confidence.cumprod(axis=1), rtol=1e-5)


def test_a_broken_confidence_counts_as_none() -> None:
    """What is learnt from it would otherwise be broken for good."""
    confidence = np.full((4, DEPTH), 0.5, dtype=np.float32)
    confidence[:3, 3] = [np.nan, np.inf, -np.inf]
    confidence[3, 3] = 1.5
    survival = Head(confidence).compute(WholeBlock(DEPTH)).survival
    assert (survival[:3, 3:] == 0).all() and survival[3, 3] == survival[3, 2] == 0.125


def test_nobody_s_drafts_cost_nothing() -> None:
    computed = nothing_computed(DEPTH)
    assert computed.survival.shape == (0, DEPTH) and computed.depth.shape == (0,)
    assert computed.rows == () and computed.head_ms(table(3.0, 1.0)) == 0.0


def test_each_stage_is_priced_on_its_own() -> None:
    costs = table(3.0, 0.5)
    computed = Computed(np.zeros((4, DEPTH), dtype=np.float32), np.array([5, 2, 2, 2]), (8, 3))
    assert computed.head_ms(costs) == pytest.approx(3.0 + 0.5 * 8 + 3.0 + 0.5 * 3)
    assert computed.head_ms(costs.at(4, 100)) == pytest.approx(computed.head_ms(costs))


# -- where it pays -------------------------------------------------------------------------------


def random_head(rng: np.random.Generator, n: int) -> Head:
    """Requests of every kind, from hopeless to certain."""
    level = rng.uniform(0.05, 1.0, (n, 1))
    return Head((level ** rng.uniform(0.5, 1.5, (n, DEPTH))).astype(np.float32))


@given(seeds, boundaries, st.integers(1, 8), st.floats(1.0, 3.0), st.booleans())
def test_never_goes_on_where_rows_cost_more_than_they_can_give(
    seed: int, boundaries: tuple[int, ...], n: int, dear: float, is_head: bool
) -> None:
    """A draft gives a token at most: at that price for its row, the first look is all."""
    rng = np.random.default_rng(seed)
    head_row_ms = 10 * dear if is_head else 0.5
    price = prices(0.1 if is_head else dear, head_row_ms)
    stages = PayingStages(boundaries, table(1.0, head_row_ms), price, rng.random(n))
    computed = random_head(rng, n).compute(stages)
    assert computed.depth.tolist() == [boundaries[0]] * n
    assert computed.rows == (n * boundaries[0],)


@given(seeds, boundaries, st.integers(1, 8))
def test_always_goes_on_where_rows_are_free(seed: int, boundaries: tuple[int, ...], n: int) -> None:
    rng = np.random.default_rng(seed)
    stages = PayingStages(boundaries, table(0.0, 0.0), prices(0.0, 0.0), rng.random(n))
    computed = random_head(rng, n).compute(stages)
    assert computed.depth.tolist() == [DEPTH] * n


@given(seeds, boundaries, st.integers(1, 8), st.floats(0, 0.5), st.floats(0, 2), st.floats(0, 5))
def test_the_boundary_is_the_one_expected_to_pay_most(
    seed: int,
    boundaries: tuple[int, ...],
    n: int,
    row_tokens: float,
    head_row_ms: float,
    fixed_ms: float,
) -> None:
    """Brute force over boundaries; going on at the pace that was shown, or is assumed."""
    rng = np.random.default_rng(seed)
    costs, price = table(fixed_ms, head_row_ms), prices(row_tokens, head_row_ms)
    assumed = rng.random(n)
    stages = PayingStages(boundaries, costs, price, assumed)
    survival = random_head(rng, n).confidence.cumprod(axis=1)
    places = np.flatnonzero(rng.random(n) < 0.7)
    for lo in (0, *boundaries):
        chosen, depth = stages.next(survival[places, :lo], places)
        assert chosen.shape == (len(places),) and chosen.dtype == bool
        options = []
        for to in [b for b in boundaries if b > lo]:
            going, total = [], 0.0
            for at in places.tolist():
                start = float(survival[at, lo - 1]) if lo else 1.0
                pace = start ** (1 / lo) if lo else assumed[at]
                ahead = start * pace ** np.arange(1, to - lo + 1)
                gain = np.maximum(ahead - row_tokens, 0).sum()
                going.append(lo == 0 or gain > price.head_row_tokens * (to - lo))
                total += gain * going[-1]
            rows = sum(going) * (to - lo)
            options.append((total - 0.1 * float(costs.head(rows)), going, to))
        best = max((o[0] for o in options), default=0.0)
        if not options or not len(places) or (lo and best <= 0):
            assert not chosen.any()
            continue
        assert depth in [to for total, _, to in options if total >= best - 1e-6]
        want = next(going for _, going, to in options if to == depth)
        assert chosen.tolist() == want
        assert lo or chosen.all()  # what was drafted for is looked at


def test_good_requests_go_deeper_than_bad_ones() -> None:
    level = np.array([0.98, 0.6, 0.1])
    head = Head(np.repeat(level[:, None], DEPTH, axis=1).astype(np.float32))
    stages = PayingStages(BOUNDARIES, table(0.5, 0.3), prices(0.2, 0.3), np.full(3, 0.5))
    depth = head.compute(stages).depth
    assert depth[0] == DEPTH and depth[0] > depth[1] > 0 and depth[1] >= depth[2] == 2


def test_a_dear_start_of_the_head_takes_longer_stages() -> None:
    """What a GEMM costs whatever its rows speaks against stages."""
    level = np.full((8, DEPTH), 0.97, dtype=np.float32)

    def num_stages(fixed_ms: float) -> int:
        costs, price = table(fixed_ms, 0.05), prices(0.2, 0.05)
        stages = PayingStages(BOUNDARIES, costs, price, np.full(8, 0.5))
        return len(Head(level).compute(stages).rows)

    assert num_stages(0.0) >= num_stages(20.0) >= 1
    assert num_stages(1000.0) == 1


def test_requests_assumed_to_be_good_are_looked_at_deeper() -> None:
    def first(pace: float) -> int:
        stages = PayingStages(BOUNDARIES, table(1.0, 0.1), prices(0.2, 0.1), np.full(4, pace))
        return stages.next(np.zeros((4, 0), dtype=np.float32), np.arange(4))[1]

    assert [first(0.3), first(0.99)] == [2, DEPTH]
