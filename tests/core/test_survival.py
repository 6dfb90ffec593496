"""Survival, the ranking of a batch's drafts, and the verify lengths that keep the best of them."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dcut_sglang.survival import keep_best, num_kept_at_ratio, rank_drafts, survival

probabilities = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0.0, 1.0, width=32)


@st.composite
def confidences(draw: st.DrawFn, max_bs: int = 5, max_depth: int = 7) -> torch.Tensor:
    """float32 [bs, depth] with many ties."""
    bs, depth = draw(st.integers(1, max_bs)), draw(st.integers(1, max_depth))
    row = st.lists(probabilities, min_size=depth, max_size=depth)
    return torch.tensor(draw(st.lists(row, min_size=bs, max_size=bs)), dtype=torch.float32)


@st.composite
def confidences_and_k(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    confidence = draw(confidences())
    return confidence, draw(st.integers(0, confidence.numel()))


def kept_survival(s: torch.Tensor, verify_lens: torch.Tensor) -> float:
    """Total survival of the drafts kept by ``verify_lens``, summed in float64."""
    return sum(s[i, : n - 1].double().sum().item() for i, n in enumerate(verify_lens.tolist()))


@pytest.mark.parametrize(
    "bs, depth", [(1, 1), (1, 5), (2, 5), (3, 3), (3, 5), (4, 1), (4, 2), (4, 5)]
)
@pytest.mark.parametrize("levels", [None, 3], ids=["distinct", "ties"])
def test_kept_set_beats_every_prefix_closed_set_of_its_size(
    bs: int, depth: int, levels: int | None
) -> None:
    for _ in range(4):
        confidence = torch.rand(bs, depth)
        if levels is not None:
            confidence = (confidence * levels).ceil() / levels
        s = survival(confidence)
        best = [-1.0] * (s.numel() + 1)
        for kept in itertools.product(range(depth + 1), repeat=bs):
            total = kept_survival(s, torch.tensor(kept) + 1)
            best[sum(kept)] = max(best[sum(kept)], total)
        for k, total in enumerate(best):
            assert kept_survival(s, keep_best(s, k)) == pytest.approx(total, abs=1e-6)


def test_known_answer() -> None:
    s = survival(torch.tensor([[0.9, 0.5, 0.5], [0.8, 0.8, 0.1], [0.2, 1.0, 1.0]]))
    expected = [[0.9, 0.45, 0.225], [0.8, 0.64, 0.064], [0.2, 0.2, 0.2]]
    torch.testing.assert_close(s, torch.tensor(expected))
    assert [keep_best(s, k).tolist() for k in range(10)] == [
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 3, 1],
        [3, 3, 1],
        [4, 3, 1],
        [4, 3, 2],
        [4, 3, 3],
        [4, 3, 4],
        [4, 4, 4],
    ]


@given(confidences())
def test_survival_is_the_prefix_product_and_never_increases(confidence: torch.Tensor) -> None:
    s = survival(confidence)
    assert s.dtype == torch.float32 and s.shape == confidence.shape
    assert (s[:, 1:] <= s[:, :-1]).all()
    for row, products in zip(confidence.tolist(), s.tolist(), strict=True):
        expected = [math.prod(row[: t + 1]) for t in range(len(row))]
        assert products == pytest.approx(expected, rel=1e-5, abs=1e-37)


@given(confidences_and_k())
def test_lengths_are_in_range_and_sum_to_rows(case: tuple[torch.Tensor, int]) -> None:
    confidence, k = case
    bs, depth = confidence.shape
    lens = keep_best(survival(confidence), k)
    assert lens.dtype == torch.int32 and lens.shape == (bs,)
    assert lens.sum() == bs + k
    assert (lens >= 1).all() and (lens <= depth + 1).all()


@given(confidences())
def test_expected_accepted_is_the_survival_of_what_is_kept(confidence: torch.Tensor) -> None:
    """So the K best (request, position) pairs are exactly the prefixes that the lengths keep."""
    s = survival(confidence)
    ranked = rank_drafts(s)
    assert ranked.expected_accepted.dtype == torch.float32
    assert ranked.expected_accepted.shape == (ranked.num_drafts + 1,)
    for k, expected in enumerate(ranked.expected_accepted.tolist()):
        assert expected == pytest.approx(kept_survival(s, ranked.verify_lens(k)), abs=1e-5)


@given(confidences())
def test_order_is_by_survival_then_position_then_request(confidence: torch.Tensor) -> None:
    s = survival(confidence)
    ranked = rank_drafts(s)
    pairs = itertools.product(range(s.shape[0]), range(s.shape[1]))
    in_order = sorted(pairs, key=lambda p: (-s[p].item(), p[1], p[0]))
    assert ranked.request.tolist() == [request for request, _ in in_order]


@given(confidences())
def test_one_more_draft_lengthens_one_request_by_one(confidence: torch.Tensor) -> None:
    ranked = rank_drafts(survival(confidence))
    for k, request in enumerate(ranked.request.tolist()):
        step = ranked.verify_lens(k + 1) - ranked.verify_lens(k)
        assert step.nonzero().tolist() == [[request]] and step[request] == 1


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 7), st.data())
def test_permuting_requests_permutes_the_lengths(
    seed: int, bs: int, depth: int, data: st.DataObject
) -> None:
    s = survival(torch.rand(bs, depth, generator=torch.Generator().manual_seed(seed)))
    assume(s.unique().numel() == s.numel())
    order = data.draw(st.permutations(range(bs)))
    k = data.draw(st.integers(0, s.numel()))
    assert torch.equal(keep_best(s[order], k), keep_best(s, k)[order])


@given(confidences_and_k(), st.randoms(use_true_random=False))
def test_permuting_tied_requests_keeps_the_total_survival(
    case: tuple[torch.Tensor, int], rng: object
) -> None:
    confidence, k = case
    order = list(range(confidence.shape[0]))
    rng.shuffle(order)  # type: ignore[attr-defined]
    s = survival(confidence)
    permuted = s[order]
    assert kept_survival(permuted, keep_best(permuted, k)) == pytest.approx(
        kept_survival(s, keep_best(s, k)), abs=1e-6
    )


@given(confidences_and_k(), st.data())
def test_raising_a_confidence_never_shortens_its_request(
    case: tuple[torch.Tensor, int], data: st.DataObject
) -> None:
    confidence, k = case
    i = data.draw(st.integers(0, confidence.shape[0] - 1))
    t = data.draw(st.integers(0, confidence.shape[1] - 1))
    raised = confidence.clone()
    raised[i, t] = data.draw(st.floats(confidence[i, t].item(), 1.0, width=32))
    before, after = keep_best(survival(confidence), k), keep_best(survival(raised), k)
    assert after[i] >= before[i]


@pytest.mark.parametrize(
    "broken, counts_as",
    [(math.nan, 0.0), (math.inf, 0.0), (-math.inf, 0.0), (-0.5, 0.0), (1.5, 1.0)],
)
def test_a_confidence_outside_0_1_counts_as(broken: float, counts_as: float) -> None:
    confidence = torch.full((2, 4), 0.5)
    confidence[0, 1] = broken
    repaired = confidence.clone()
    repaired[0, 1] = counts_as
    before = confidence.clone()
    assert torch.equal(survival(confidence), survival(repaired))
    torch.testing.assert_close(confidence, before, equal_nan=True)  # the input is left alone


def test_a_batch_of_broken_confidences_still_gets_lengths() -> None:
    s = survival(torch.full((3, 4), math.nan))
    assert keep_best(s, 7).tolist() == [4, 3, 3]
    assert rank_drafts(s).expected_accepted.tolist() == [0.0] * 13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_float_dtype_gives_the_float32_answer(dtype: torch.dtype) -> None:
    confidence = torch.rand(5, 7).to(dtype)
    s = survival(confidence)
    assert s.dtype == torch.float32
    assert torch.equal(s, survival(confidence.to(torch.float32)))
    assert keep_best(s.to(dtype), 11).sum() == 5 + 11


@pytest.mark.parametrize("bs, depth", [(0, 7), (3, 0), (0, 0)])
def test_nothing_drafted_keeps_nothing(bs: int, depth: int) -> None:
    ranked = rank_drafts(survival(torch.empty(bs, depth)))
    assert ranked.num_drafts == 0
    assert ranked.verify_lens(0).tolist() == [1] * bs
    assert ranked.expected_accepted.tolist() == [0.0]


@pytest.mark.parametrize("num_kept", [-1, 7])
def test_num_kept_out_of_range_is_refused(num_kept: int) -> None:
    with pytest.raises(ValueError, match=rf"0\.\.6, got {num_kept}"):
        rank_drafts(torch.rand(2, 3)).verify_lens(num_kept)


@pytest.mark.parametrize(
    "ratio, bs, block_size, expected",
    [
        (0.1, 2, 16, 3),
        (0.3, 1, 11, 3),
        (0.7, 2, 16, 21),
        (0.25, 64, 16, 240),
        (0.5, 64, 16, 480),
        (0.25, 1, 16, 4),
        (1 / 3, 1, 16, 5),
        (0.001, 1, 8, 1),
        (0.0, 9, 16, 0),
        (1.0, 9, 16, 135),
        (0.5, 0, 16, 0),
        (0.5, 3, 1, 0),
    ],
)
def test_num_kept_at_ratio(ratio: float, bs: int, block_size: int, expected: int) -> None:
    assert num_kept_at_ratio(ratio, bs, block_size) == expected


def test_num_kept_at_ratio_is_exact_for_every_percentage() -> None:
    for percent, bs in itertools.product(range(101), range(1, 130)):
        exact = math.ceil(Fraction(percent, 100) * bs * 15)
        assert num_kept_at_ratio(percent / 100, bs, 16) == exact


# -- floors, and the slowest request ---------------------------------------------------------------


@given(confidences(), st.integers(0, 10_000))
def test_floors_come_first_and_the_rest_is_ranked_as_ever(
    confidence: torch.Tensor, seed: int
) -> None:
    s = survival(confidence)
    bs, depth = s.shape
    floors = torch.randint(0, depth + 1, (bs,), generator=torch.Generator().manual_seed(seed))
    ranked = rank_drafts(s, floors)
    num_first = int(floors.sum())
    assert ranked.num_first == num_first
    assert torch.equal(ranked.verify_lens(num_first), (1 + floors).to(torch.int32))
    # Behind the floors, the best set of every size among those that hold them.
    rest = [float(s[i, t]) for i in range(bs) for t in range(int(floors[i]), depth)]
    best = sorted(rest, reverse=True)
    floor_sum = sum(float(s[i, : int(floors[i])].double().sum()) for i in range(bs))
    for k in range(num_first, s.numel() + 1):
        lens = ranked.verify_lens(k)
        assert bool((lens - 1 >= floors).all())
        want = floor_sum + sum(best[: k - num_first])
        assert kept_survival(s, lens) == pytest.approx(want, abs=1e-5)
        assert float(ranked.expected_accepted[k]) == pytest.approx(want, abs=1e-4)


@given(confidences(), st.booleans())
def test_the_slowest_request_is_the_one_with_the_fewest_expected_tokens(
    confidence: torch.Tensor, with_floor: bool
) -> None:
    s = survival(confidence)
    floors = torch.ones(len(s), dtype=torch.int64) if with_floor else None
    ranked = rank_drafts(s, floors)
    found = ranked.slowest_tokens()
    assert found.shape == ranked.expected_accepted.shape
    for k in range(s.numel() + 1):
        lens = ranked.verify_lens(k).tolist()
        tokens = [1 + float(s[i, : n - 1].double().sum()) for i, n in enumerate(lens)]
        assert float(found[k]) == pytest.approx(min(tokens), abs=1e-5)
