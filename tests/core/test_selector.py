"""The selector's candidates and its choice, against exhaustive search and published numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcut_sglang.config import OBJECTIVES, DCutConfig
from dcut_sglang.cost import CostTable
from dcut_sglang.selector import Selector
from dcut_sglang.survival import num_kept_at_ratio


def flat_table(verify_ms: list[float], draft_ms: float = 1.0, block_size: int = 16) -> CostTable:
    """Costs that depend on the keep ratio alone; the ratios are spread evenly over 0..1."""
    ratios = tuple(np.linspace(0, 1, len(verify_ms)).tolist())
    cells = np.array(verify_ms)[None, :, None]
    return CostTable(block_size, (64,), ratios, (100,), cells, np.array([[draft_ms]]))


# -- the published test vector (reference/prior-art.md, section 2) -------------------------------

BUCKETS = (0.25, 0.5, 0.75, 1.0)
STEP_MS = [80.88, 107.61, 136.64, 166.34]
EXPECTED_DRAFTS = [115.2, 172.8, 185.6, 193.9]


@pytest.mark.parametrize(
    "objective, num_kept, utility", [("paper", 480, 1.606), ("throughput", 240, 2.216)]
)
@pytest.mark.parametrize("draft_ms", [0.0, 25.0])
def test_the_published_vector_separates_the_objectives(
    objective: Any, num_kept: int, utility: float, draft_ms: float
) -> None:
    cost = flat_table([50.0, *(ms - draft_ms for ms in STEP_MS)], draft_ms)
    selector = Selector(cost, DCutConfig(keep_ratios=BUCKETS, objective=objective))
    assert selector.candidates(64).tolist() == [240, 480, 720, 960]
    decision = selector.choose(EXPECTED_DRAFTS, cost.at(64, 100))
    best = num_kept // 240 - 1
    assert decision.num_kept == num_kept
    assert decision.num_rows == 64 + num_kept
    assert decision.expected_tokens == pytest.approx(64 + EXPECTED_DRAFTS[best])
    assert decision.predicted_ms == pytest.approx(STEP_MS[best])
    gain = decision.expected_tokens - (64 if objective == "paper" else 0)
    assert gain / decision.predicted_ms == pytest.approx(utility, abs=5e-4)


# -- exhaustive search ---------------------------------------------------------------------------


@st.composite
def selectors(draw: st.DrawFn) -> Selector:
    """A selector over a random table, with or without buckets and tiers."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    ratios = tuple(sorted({0.0, 1.0, *rng.random(3).tolist()}))
    cost = CostTable(
        draw(st.sampled_from([2, 4, 8])),
        (1, 4, 12),
        ratios,
        (64, 512),
        rng.uniform(1, 50, (3, len(ratios), 2)),
        rng.uniform(0, 20, (3, 2)),
        head_rows=(1, 10, 40),
        head_ms=rng.uniform(0, 20, 3),
    )
    config = DCutConfig(
        keep_ratios=tuple(draw(st.lists(st.sampled_from([0, 0.1, 0.5, 0.75, 1]), unique=True))),
        objective=draw(st.sampled_from(OBJECTIVES)),  # type: ignore[arg-type]
    )
    tiers = draw(st.none() | st.lists(st.integers(1, 110), max_size=8))
    return Selector(cost, config, tiers)


@given(selectors(), st.integers(1, 14), st.floats(1, 2000), st.integers(0, 10_000))
def test_the_choice_is_the_best_candidate(
    selector: Selector, bs: int, context: float, seed: int
) -> None:
    cost, config = selector.cost, selector.config
    candidates = selector.candidates(bs).tolist()
    survivals = np.random.default_rng(seed).random(bs * (cost.block_size - 1))
    sums = np.concatenate([[0.0], np.cumsum(np.sort(survivals)[::-1])])
    decision = selector.choose(sums[candidates], cost.at(bs, context))

    best = None
    for kept in candidates:  # ascending: only a greater utility replaces fewer rows
        ms = cost.draft(bs, context) + float(cost.verify(bs, bs + kept, context))
        tokens = sums[kept] + (bs if config.objective == "throughput" else 0)
        if best is None or tokens / ms > best[0]:
            best = (tokens / ms, kept, bs + sums[kept], ms)
    assert best is not None
    _, kept, tokens, ms = best
    assert (decision.num_kept, decision.num_rows) == (kept, bs + kept)
    assert decision.expected_tokens == pytest.approx(tokens)
    assert decision.predicted_ms == pytest.approx(ms)


@given(selectors(), st.integers(1, 14))
def test_candidates_are_ascending_distinct_and_fill_their_tier(selector: Selector, bs: int) -> None:
    num_drafts = bs * (selector.cost.block_size - 1)
    candidates = selector.candidates(bs)
    assert candidates.dtype == np.int64
    kept = candidates.tolist()
    assert kept == sorted(set(kept)) and kept
    assert min(kept) >= 0 and max(kept) <= num_drafts
    assert selector.candidates(bs).tolist() == kept

    wanted = [
        num_kept_at_ratio(ratio, bs, selector.cost.block_size)
        for ratio in selector.config.keep_ratios
    ] or list(range(num_drafts + 1))
    expected = set()
    for k in wanted:
        holding = [tier for tier in selector.tiers or () if tier >= bs + k]
        expected.add(min(num_drafts, min(holding) - bs) if holding else k)
    assert kept == sorted(expected)


# -- candidates by example -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "keep_ratios, tiers, expected",
    [
        ((0.25, 0.5, 0.75, 1.0), None, [7, 14, 21, 28]),
        ((1.0, 0.25), None, [7, 28]),
        ((0.25, 0.26), [32], [28]),  # two buckets in one tier are one candidate
        ((0.25, 0.5), [12, 16, 32], [8, 28]),
        ((0.25, 0.5), [32, 12, 16], [8, 28]),
        ((0.25, 1.0), [8], [7, 28]),  # beyond the largest tier: as many as asked
        ((0.0, 1.0), [4, 64], [0, 28]),  # a tier beyond bs * D holds only bs * D rows
        ((0.25,), [], [7]),
        ((), [4, 8, 16], [0, 4, 12, *range(13, 29)]),
        ((), [4, 8, 16, 32], [0, 4, 12, 28]),
        ((), None, list(range(29))),
    ],
)
def test_candidates(
    keep_ratios: tuple[float, ...], tiers: list[int] | None, expected: list[int]
) -> None:
    selector = Selector(
        flat_table([1.0, 2.0], block_size=8), DCutConfig(keep_ratios=keep_ratios), tiers
    )
    assert selector.candidates(4).tolist() == expected


# -- ties and limits -----------------------------------------------------------------------------


def test_where_nothing_was_drafted_the_choice_is_plain() -> None:
    table = flat_table([10.0, 20.0])
    selector, costs = Selector(table, DCutConfig()), table.at(4, 100)
    _, decision = selector.decide(torch.zeros(4, 15), np.zeros(4, dtype=np.int64), costs, 3.0)
    assert decision == selector.plain(costs, 3.0)
    assert decision.candidates is not None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_ties_go_to_fewer_rows(objective: Any) -> None:
    """Equal cost and nothing expected from any draft: every candidate has the same utility."""
    cost = flat_table([3.0, 3.0])
    selector = Selector(cost, DCutConfig(keep_ratios=BUCKETS, objective=objective))
    assert selector.choose([0.0] * 4, cost.at(64, 100)).num_kept == 240
    selector = Selector(cost, DCutConfig(objective=objective))
    assert selector.choose([0.0] * 961, cost.at(64, 100)).num_kept == 0


@pytest.mark.parametrize(
    "verify_ms, expected_accepted, num_kept",
    [
        ([10.0, 10.0], [1.0, 2.0, 3.0], 960),  # rows are free: verify everything
        ([10.0, 1000.0], [30.0, 40.0, 50.0], 0),  # rows are dear: anchors alone
        ([10.0, 1000.0], [0.0, 0.0, 0.0], 0),
    ],
)
def test_free_and_dear_rows(
    verify_ms: list[float], expected_accepted: list[float], num_kept: int
) -> None:
    cost = flat_table(verify_ms)
    selector = Selector(cost, DCutConfig(keep_ratios=(0.0, 0.5, 1.0)))
    assert selector.choose(expected_accepted, cost.at(64, 100)).num_kept == num_kept


def test_a_longer_context_can_change_the_choice() -> None:
    verify_ms = np.array([[[10.0, 10.0], [11.0, 100.0]]])
    cost = CostTable(16, (8,), (0.0, 1.0), (64, 512), verify_ms, np.ones((1, 2)))
    selector = Selector(cost, DCutConfig(keep_ratios=(0.0, 1.0)))
    assert selector.choose([0.0, 30.0], cost.at(8, 64)).num_kept == 120
    assert selector.choose([0.0, 30.0], cost.at(8, 512)).num_kept == 0


def test_expected_accepted_of_another_length_is_refused() -> None:
    cost = flat_table([1.0, 2.0])
    selector = Selector(cost, DCutConfig(keep_ratios=BUCKETS))
    with pytest.raises(ValueError, match=r"expected 4 gains, got shape \(1,\)"):
        selector.choose([3.0], cost.at(64, 100))
    with pytest.raises(ValueError, match="expected 2 gains"):
        selector.choose([1.0, 2.0, 3.0], cost.at(64, 100), kept=np.array([0, 7]))


# -- what was drafted ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keep_ratios, num_drafts, expected",
    [
        ((), 0, [0]),
        ((), 5, [0, 1, 2, 3, 4, 5]),
        ((), 28, list(range(29))),
        ((0.0, 0.25, 1.0), 28, [0, 7, 28]),
        ((0.0, 0.25, 1.0), 12, [0, 7, 12]),
        ((0.0, 0.25, 1.0), 7, [0, 7]),
        ((0.25, 1.0), 3, [3]),
        ((0.25, 1.0), 0, [0]),
    ],
)
def test_no_more_is_kept_than_was_computed(
    keep_ratios: tuple[float, ...], num_drafts: int, expected: list[int]
) -> None:
    selector = Selector(flat_table([1.0, 2.0], block_size=8), DCutConfig(keep_ratios=keep_ratios))
    assert selector.candidates_up_to(4, num_drafts).tolist() == expected


def test_a_dear_draft_keeps_more() -> None:
    """What was drafted is paid for: the dearer, the more of it is worth verifying."""
    cost = flat_table([10.0, 20.0])
    selector = Selector(cost, DCutConfig())
    costs = cost.at(4, 100)
    gains = np.concatenate([[0.0], np.cumsum(0.9 ** np.arange(1, 61))])
    kept = [selector.choose(gains, costs, draft_ms=ms).num_kept for ms in (0.0, 10.0, 100.0)]
    assert kept[0] < kept[1] < kept[2]
    decision = selector.choose(gains, costs, draft_ms=10.0)
    verify_ms = float(costs.verify(decision.num_rows))
    assert decision.predicted_ms == pytest.approx(10.0 + verify_ms)


def test_given_candidates_are_the_only_ones() -> None:
    cost = flat_table([10.0, 10.0])
    selector = Selector(cost, DCutConfig())
    kept = np.array([0, 3, 17])
    assert selector.choose([0.0, 2.0, 3.0], cost.at(4, 100), kept=kept).num_kept == 17


@pytest.mark.parametrize(
    "keep_ratios, tiers, is_free", [((), None, True), ((0.5,), None, False), ((), [8], False)]
)
def test_a_free_selector_can_keep_any_number(
    keep_ratios: tuple[float, ...], tiers: list[int] | None, is_free: bool
) -> None:
    selector = Selector(flat_table([1.0, 2.0]), DCutConfig(keep_ratios=keep_ratios), tiers)
    assert selector.is_free == is_free


# -- limits ----------------------------------------------------------------------------------------


@given(selectors(), st.integers(1, 6), st.integers(0, 10_000), st.floats(1, 60), st.integers(0, 3))
def test_limits_against_exhaustive_search(
    selector: Selector, bs: int, seed: int, cap_ms: float, min_drafts: int
) -> None:
    """The best candidate whose slowest request keeps to the cap; the shortest wait if none does."""
    depth = selector.cost.block_size - 1
    config = replace(selector.config, max_token_ms=cap_ms, min_drafts=min_drafts)
    selector = Selector(selector.cost, config, selector.tiers)
    rng = np.random.default_rng(seed)
    depths = rng.integers(0, depth + 1, bs)
    computed = np.arange(depth) < depths[:, None]
    survival = np.cumprod(rng.random((bs, depth)), axis=1) * computed
    costs, draft_ms = selector.cost.at(bs, 100.0), 3.0
    ranked, decision = selector.decide(
        torch.from_numpy(survival.astype(np.float32)), depths, costs, draft_ms
    )
    floors = np.minimum(depths, min_drafts)
    assert ranked.num_first == floors.sum()
    kept = selector.candidates_up_to(bs, int(depths.sum()), ranked.num_first)
    assert len(kept) and kept.min() >= floors.sum()
    found = []
    for k in kept.tolist():
        lens = ranked.verify_lens(k).numpy() - 1
        assert (lens >= floors).all()
        tokens = np.array([1 + survival[i, :n].sum() for i, n in enumerate(lens)])
        ms = draft_ms + float(costs.verify(bs + k))
        gain = tokens.sum() - (bs if config.objective == "paper" else 0)
        found.append((k, gain / ms, ms / tokens.min()))
    keeping = [entry for entry in found if entry[2] <= cap_ms * (1 - 1e-5)]
    chosen = next(entry for entry in found if entry[0] == decision.num_kept)
    if keeping:
        assert chosen[2] <= cap_ms * (1 + 1e-5)
        assert chosen[1] >= max(entry[1] for entry in keeping) * (1 - 1e-5)
    elif all(entry[2] > cap_ms * (1 + 1e-5) for entry in found):
        assert chosen[2] <= min(entry[2] for entry in found) * (1 + 1e-5)


def test_a_cap_needs_to_know_the_slowest_request() -> None:
    cost = flat_table([1.0, 2.0])
    selector = Selector(cost, DCutConfig(max_token_ms=5.0))
    with pytest.raises(ValueError, match="slowest_tokens"):
        selector.choose(np.zeros(16), cost.at(1, 100))
