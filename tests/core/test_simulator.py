"""The load simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from early import EARLY_COSTS, EARLY_TEXTS

from dcut_sglang.cost import CostTable
from dcut_sglang.published import h20
from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.policies import FixedLength, FixedRatio, Plain, ours
from dcut_sglang.replay.simulator import Load, simulate, texts_of_kind


@pytest.fixture(scope="module")
def bank() -> AnchorBank:
    return AnchorBank.load(EARLY_TEXTS)


@pytest.fixture(scope="module")
def table() -> CostTable:
    return CostTable.load(EARLY_COSTS)


def flat(block_size: int = 16, ms: float = 10.0) -> CostTable:
    """Every verify costs ``ms``, the draft nothing."""
    return CostTable(block_size, (1,), (0.0, 1.0), (1,), np.full((1, 2, 1), ms), np.zeros((1, 1)))


def test_plain_decoding_of_one_request(bank: AnchorBank) -> None:
    row = simulate(bank, Plain(), flat(), Load(1, 1))
    assert row.steps == row.tokens and row.plain_share == 1
    assert row.tokens_per_s == pytest.approx(100)
    assert row.ms_per_token_p50 == pytest.approx(10)
    assert row.rows_per_step == 1


def test_every_policy_emits_the_same_tokens(bank: AnchorBank, table: CostTable) -> None:
    load = Load(8, 24, texts_per_request=2)
    rows = [simulate(bank, p, table, load) for p in (Plain(), FixedLength((4,)), ours(table))]
    assert len({row.tokens for row in rows}) == 1
    assert rows[0].steps > rows[2].steps


def test_tokens_are_those_of_the_texts(bank: AnchorBank) -> None:
    load = Load(4, 10, seed=3)
    texts = np.random.default_rng(3).choice(texts_of_kind(bank, "all"), size=(10, 1))
    row = simulate(bank, FixedRatio((1.0,)), flat(), load)
    assert row.tokens == int(np.diff(bank.start)[texts].sum())


@pytest.mark.parametrize("concurrency", [1, 16, 512])
def test_concurrency_is_a_ceiling(bank: AnchorBank, concurrency: int) -> None:
    row = simulate(bank, Plain(), flat(), Load(concurrency, 2 * concurrency))
    assert 0 < row.mean_bs <= concurrency
    assert row.steady_tokens_per_s > row.tokens_per_s * 0.99


def test_slow_arrivals_are_served_alone(bank: AnchorBank) -> None:
    row = simulate(bank, Plain(), flat(), Load(32, 10, arrivals_per_s=0.01))
    assert row.mean_bs == pytest.approx(1, abs=0.2)
    assert row.wait_ms_p50 == 0
    assert math.isnan(row.steady_tokens_per_s)


def test_a_queue_waits(bank: AnchorBank) -> None:
    row = simulate(bank, Plain(), flat(), Load(2, 20, arrivals_per_s=100))
    assert row.wait_ms_p50 > 1000


def test_easy_texts_run_faster_with_drafts(bank: AnchorBank, table: CostTable) -> None:
    easy, hard = (
        simulate(bank, ours(table), table, Load(4, 16, kind=kind)) for kind in ("easy", "hard")
    )
    assert easy.tokens_per_s > hard.tokens_per_s
    assert not set(texts_of_kind(bank, "easy")) & set(texts_of_kind(bank, "hard"))


def test_long_prompts_cost_more(bank: AnchorBank, table: CostTable) -> None:
    short, long = (simulate(bank, Plain(), table, Load(16, 32, prompt_len=n)) for n in (50, 1000))
    assert long.ms_per_token_p50 > 1.5 * short.ms_per_token_p50


def test_the_flat_curve_favours_drafts_and_the_dense_one_does_not(bank: AnchorBank) -> None:
    load = Load(64, 128)
    gain = {}
    for name, costs in (("dense", h20.qwen3_8b()), ("flat", h20.flat_moe())):
        plain, full = (
            simulate(bank, p, costs, load).steady_tokens_per_s
            for p in (Plain(), FixedRatio((1.0,)))
        )
        gain[name] = full / plain
    assert gain["flat"] > 1.5 and gain["dense"] < 0.6


def test_it_is_decided_by_its_seed(bank: AnchorBank, table: CostTable) -> None:
    load = Load(4, 12, arrivals_per_s=2.0, seed=1)
    first, same = (simulate(bank, ours(table), table, load) for _ in range(2))
    other = simulate(bank, ours(table), table, replace(load, seed=2))
    assert first == same and first.tokens_per_s != other.tokens_per_s


def test_what_cannot_be_is_refused(bank: AnchorBank) -> None:
    with pytest.raises(ValueError, match="block"):
        simulate(bank, Plain(), flat(8), Load(1, 1))
    with pytest.raises(ValueError, match="at least 1"):
        simulate(bank, Plain(), flat(), Load(0, 1))
