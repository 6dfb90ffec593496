"""Costs that correct themselves: how fast, how far, and when they say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_sglang.correction import CostCorrection, MeasuredStep
from dcut_sglang.cost import CostTable

BATCH_SIZES, KEEP_RATIOS, CONTEXTS, HEAD_ROWS = (1, 4, 16), (0.0, 0.5, 1.0), (64, 512), (1, 16, 64)
BLOCK_SIZE = 9


def probed() -> CostTable:
    bs, ratio = np.array(BATCH_SIZES)[:, None, None], np.array(KEEP_RATIOS)[:, None]
    context_ms = np.array([0.0, 5.0])
    return CostTable(
        BLOCK_SIZE,
        BATCH_SIZES,
        KEEP_RATIOS,
        CONTEXTS,
        10.0 + bs * (1 + 8 * ratio) + context_ms,
        np.array(BATCH_SIZES)[:, None] + 3.0 + 0.2 * context_ms,
        head_rows=HEAD_ROWS,
        head_ms=2.0 + 0.3 * np.array(HEAD_ROWS),
    )


def step(
    true: CostTable,
    bs: int = 4,
    ratio: float = 0.5,
    context: float = 64,
    head_rows: tuple[int, ...] = (),
    num_drafted: int = 0,
    slower: float = 1.0,
    **changes: Any,
) -> MeasuredStep:
    """A step that takes what ``true`` says, times ``slower``; without rows for the head a plain
    one as far as drafting is concerned."""
    rows = round(bs + ratio * bs * (BLOCK_SIZE - 1))
    drafts = num_drafted > 0
    taken = MeasuredStep(
        bs=bs,
        rows=rows,
        context=context,
        num_drafted=num_drafted,
        draft_block_size=BLOCK_SIZE,
        head_rows=head_rows,
        forward_ms=slower * float(true.draft_forward(num_drafted, context)) if drafts else 0.0,
        head_ms=slower * float(true.head(np.array(head_rows)).sum()) if drafts else 0.0,
        verify_ms=slower * float(true.verify(bs, rows, context)),
        other_ms=0.0,
    )
    return replace(taken, **changes)


def factors(correction: CostCorrection) -> np.ndarray:
    found = correction.to_json()
    return np.concatenate(
        [np.ravel(found[f"{part}_factor"]) for part in ("verify", "draft", "head")]
    )


# -- how fast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [1.5, 1 / 1.5])
def test_a_wrong_cell_is_right_after_200_visits(wrong: float) -> None:
    """Among steps at other cells, whose costs were right and stay so."""
    table = probed()
    verify_ms, draft_ms, head_ms = (
        table.verify_ms.copy(),
        table.draft_ms.copy(),
        table.head_ms.copy(),
    )
    verify_ms[1, 1] *= wrong
    verify_ms[2, 0] *= wrong
    draft_ms[1] *= wrong
    head_ms[1] *= wrong
    true = replace(table, verify_ms=verify_ms, draft_ms=draft_ms, head_ms=head_ms)
    correction = CostCorrection(table)
    rng = np.random.default_rng(0)
    for _ in range(200):
        for bs, ratio in [(4, 0.5), (16, 0.0), (1, 1.0), (16, 1.0)]:
            n = 1 if bs == 1 else 4
            rows = ((16,), (1,), (64, 1))[int(rng.integers(3))] + (16,)
            correction.observe(step(true, bs, ratio, 64, rows, n))
    found = correction.table
    for cells, want in [
        (found.verify_ms[[1, 2, 0, 2], [1, 0, 2, 2]], true.verify_ms[[1, 2, 0, 2], [1, 0, 2, 2]]),
        (found.draft_ms[:2], true.draft_ms[:2]),
        (found.head_ms, true.head_ms),
    ]:
        np.testing.assert_allclose(cells, want, rtol=0.05)
    # What was never visited has followed the machine as a whole, and nothing else.
    common = correction.to_json()["common_factor"]
    assert 1 / 1.1 < common < 1.1
    np.testing.assert_allclose(found.verify_ms[0, 0], common * table.verify_ms[0, 0], rtol=2e-3)
    np.testing.assert_allclose(found.draft_ms[2], common * table.draft_ms[2], rtol=2e-3)
    assert correction.num_steps == 800


@pytest.mark.parametrize("bs, ratio, context", [(7, 0.3, 200), (2, 0.9, 64), (24, 0.5, 2000)])
def test_between_and_beyond_cells_the_prediction_comes_right(
    bs: int, ratio: float, context: float
) -> None:
    true, correction = probed(), CostCorrection(probed())
    for _ in range(300):
        correction.observe(step(true, bs, ratio, context, (10, 30), min(bs, 10), slower=1.4))
    rows = round(bs + ratio * bs * (BLOCK_SIZE - 1))
    found, n = correction.table, min(bs, 10)
    assert found.verify(bs, rows, context) == pytest.approx(
        1.4 * true.verify(bs, rows, context), rel=0.05
    )
    assert found.draft_forward(n, context) == pytest.approx(
        1.4 * true.draft_forward(n, context), rel=0.05
    )
    assert found.head([10, 30]).sum() == pytest.approx(1.4 * true.head([10, 30]).sum(), rel=0.05)


def test_a_slower_machine_makes_no_step_look_cheap() -> None:
    """Of plain steps alone: what drafting costs beside them is known as well as before."""
    true, correction = probed(), CostCorrection(probed())
    for _ in range(100):
        correction.observe(step(true, ratio=0.0))
    for _ in range(30):
        correction.observe(step(true, ratio=0.0, slower=1.4))
    table = correction.table
    plain = table.verify(4, 4, 64) / true.verify(4, 4, 64)
    assert plain == pytest.approx(1.4, rel=0.05)
    for found, was in [
        (table.verify(4, 20, 64), true.verify(4, 20, 64)),
        (table.draft_forward(4, 64), true.draft_forward(4, 64)),
        (table.head(16), true.head(16)),
    ]:
        assert 0.8 * plain < found / was <= plain


def test_noise_averages_out() -> None:
    rng, true, correction = np.random.default_rng(0), probed(), CostCorrection(probed())
    for _ in range(400):
        correction.observe(step(true, slower=1.3 * float(np.exp(0.2 * rng.standard_normal()))))
    assert correction.table.verify(4, 20, 64) == pytest.approx(
        1.3 * true.verify(4, 20, 64), rel=0.1
    )
    assert not correction.alarm


def test_contexts_share_what_is_learnt() -> None:
    true, correction = probed(), CostCorrection(probed())
    for _ in range(200):
        correction.observe(step(true, context=64, slower=1.3))
    ratio = correction.table.verify_ms / true.verify_ms
    np.testing.assert_allclose(ratio[1, 1], [1.3, 1.3], rtol=0.02)


def test_a_right_table_is_left_alone() -> None:
    true, correction = probed(), CostCorrection(probed())
    for _ in range(50):
        assert not correction.observe(step(true, head_rows=(4, 8), num_drafted=4))
    np.testing.assert_allclose(factors(correction), 1.0, atol=1e-3)
    assert correction.error_ratio == pytest.approx(1.0, abs=1e-6)


# -- how far -------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([1e-6, 1e-2, 1.0, 1e3, 1e9]))
def test_factors_are_bounded_whatever_is_measured(seed: int, scale: float) -> None:
    rng, correction = np.random.default_rng(seed), CostCorrection(probed())
    for _ in range(60):
        bs = int(rng.integers(1, 40))
        taken = step(
            probed(), bs, float(rng.random()), float(rng.uniform(0, 4000)), (5, 2), int(bs),
            slower=scale * float(np.exp(rng.standard_normal())),
        )  # fmt: skip
        correction.observe(replace(taken, other_ms=float(rng.random())))
    assert np.isfinite(factors(correction)).all()
    assert (factors(correction) <= 3.001).all() and (factors(correction) >= 0.333).all()
    table = correction.table  # and it is a cost table still
    assert (table.verify_ms > 0).all() and table.batch_sizes == BATCH_SIZES


@pytest.mark.parametrize("slower", [100.0, 0.01])
def test_one_outlier_moves_a_cell_little(slower: float) -> None:
    """Once it has been visited often; a first visit counts for half."""
    true, correction = probed(), CostCorrection(probed())
    for i in range(45):
        correction.observe(
            step(true, head_rows=(16,), num_drafted=4, slower=slower if i == 30 else 1.0)
        )
    np.testing.assert_allclose(correction.table.verify_ms, true.verify_ms, rtol=0.021)
    np.testing.assert_allclose(correction.table.draft_ms, true.draft_ms, rtol=0.021)
    np.testing.assert_allclose(correction.table.head_ms, true.head_ms, rtol=0.021)
    assert not correction.alarm


@pytest.mark.parametrize("taken_ms", [0.0, -1.0])
def test_a_clock_that_stood_still_teaches_nothing(taken_ms: float) -> None:
    true, correction = probed(), CostCorrection(probed())
    for _ in range(16):
        correction.observe(step(true, verify_ms=taken_ms))
    np.testing.assert_array_equal(correction.table.verify_ms, true.verify_ms)


def test_the_probed_table_is_kept_and_a_refreshed_one_is_used_at_intervals() -> None:
    true, correction = probed(), CostCorrection(probed())
    before = correction.table
    correction.observe(step(true, slower=1.5))
    assert correction.table is before
    for _ in range(20):
        correction.observe(step(true, slower=1.5))
    assert correction.table is not before
    np.testing.assert_array_equal(correction.probed.verify_ms, true.verify_ms)
    assert correction.table.fingerprint == correction.probed.fingerprint


# -- the alarm -----------------------------------------------------------------------------------


def test_the_alarm_goes_off_once_on_a_sustained_difference_and_rests_again() -> None:
    """Steps of fifty times the cost are beyond what a table may be corrected to."""
    true, correction = probed(), CostCorrection(probed())
    for _ in range(100):
        assert not correction.observe(step(true))
    went_off = [correction.observe(step(true, slower=50.0)) for _ in range(400)]
    assert sum(went_off) == 1 and went_off.index(True) < 50 and correction.alarm
    assert correction.error_ratio > 1.2
    # On the way back steps are much faster than predicted for a while, which is another difference.
    assert sum(correction.observe(step(true)) for _ in range(650)) <= 1
    assert not correction.alarm and correction.error_ratio == pytest.approx(1.0, abs=0.05)
    assert any(correction.observe(step(true, slower=50.0)) for _ in range(50))


def test_a_table_that_can_be_corrected_in_time_needs_no_alarm() -> None:
    true, correction = probed(), CostCorrection(probed())
    assert not any(correction.observe(step(true, slower=1.3)) for _ in range(500))
    assert correction.error_ratio == pytest.approx(1.0, abs=0.02)


def test_a_difference_that_wanders_over_many_cells_sets_it_off() -> None:
    """Each cell is met too rarely to have come right: it moves by a half of 1.5 at first."""
    rng, true = np.random.default_rng(0), probed()
    wide = tuple(range(1, 60))
    costs = np.linspace(1, 2, 59)[:, None, None] * np.ones((59, 3, 2)) * 20
    table = replace(true, batch_sizes=wide, verify_ms=costs, draft_ms=np.ones((59, 2)))
    correction = CostCorrection(table)
    assert any(
        correction.observe(step(table, int(rng.integers(1, 60)), slower=4)) for _ in range(200)
    )


def test_an_occasional_slow_step_sets_nothing_off() -> None:
    true, correction = probed(), CostCorrection(probed())
    for i in range(500):
        assert not correction.observe(step(true, slower=4.0 if i % 25 == 24 else 1.0))


# -- the overhead --------------------------------------------------------------------------------


def test_overheads_of_plain_and_drafting_steps_are_kept_apart() -> None:
    true, correction = probed(), CostCorrection(probed())
    assert correction.overhead_ms(True) == correction.overhead_ms(False) == 0.0
    for _ in range(200):
        correction.observe(step(true, other_ms=2.0))
        correction.observe(step(true, head_rows=(8,), num_drafted=4, other_ms=7.0))
    assert correction.overhead_ms(drafting=False) == pytest.approx(2.0)
    assert correction.overhead_ms(drafting=True) == pytest.approx(7.0)
    found = correction.to_json()
    assert (found["overhead_ms"], found["overhead_drafting_ms"]) == (2.0, 7.0)
    # It is a part of what is predicted: no cell moved for it, and nothing looks slow.
    np.testing.assert_allclose(factors(correction), 1.0, atol=1e-3)
    assert correction.error_ratio == pytest.approx(1.0, abs=0.05)


def test_an_overhead_follows_and_a_single_slow_step_moves_it_little() -> None:
    true, correction = probed(), CostCorrection(probed())
    for _ in range(10):
        correction.observe(step(true, other_ms=2.0))
    correction.observe(step(true, other_ms=1000.0))
    assert correction.overhead_ms(False) < 2.2
    for _ in range(200):
        correction.observe(step(true, other_ms=8.0))
    assert correction.overhead_ms(False) == pytest.approx(8.0, rel=0.05)
    for _ in range(200):
        correction.observe(step(true, other_ms=1.0))
    assert correction.overhead_ms(False) == pytest.approx(1.0, rel=0.05)


def test_equal_steps_give_equal_tables() -> None:
    def run() -> CostTable:
        rng, correction = np.random.default_rng(2), CostCorrection(probed())
        for _ in range(64):
            slower = float(rng.uniform(0.8, 1.6))
            correction.observe(step(probed(), int(rng.integers(1, 20)), slower=slower))
        return correction.table

    np.testing.assert_array_equal(run().verify_ms, run().verify_ms)
