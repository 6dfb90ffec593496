"""Forced choices of verify lengths and the numeric knobs that set them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dcut_sglang.force import KNOBS, MAX_FORCED_LENGTHS, Forced, apply_knob
from dcut_sglang.stages import Computed, WholeBlock, compute_in_stages
from dcut_sglang.survival import RankedDrafts, rank_drafts, survival

BLOCK_SIZE = 8


def ranked(bs: int) -> RankedDrafts:
    return rank_drafts(survival(torch.rand(bs, BLOCK_SIZE - 1)))


def verify_lens(forced: Forced, batch: RankedDrafts, step: int = 0) -> torch.Tensor:
    """What the worker does, where the head computes every draft of the requests drafted for."""
    drafted = forced.drafted(batch.bs, step).numpy()
    depth = np.full(len(drafted), BLOCK_SIZE - 1, dtype=np.int64)
    return forced.verify_lens(batch, BLOCK_SIZE, step, drafted, depth)


def compute(forced: Forced, num_requests: int, step: int) -> Computed:
    """The head's stages over blocks whose confidences are all 1."""

    def head(places: np.ndarray, lo: int, hi: int) -> np.ndarray:
        return np.ones((len(places), hi - lo), dtype=np.float32)

    depth = BLOCK_SIZE - 1
    return compute_in_stages(forced.stages(depth, step), num_requests, depth, head)


def apply_all(*settings: tuple[str, float], current: Forced | None = None) -> Forced | None:
    for name, value in settings:
        current = apply_knob(current, name, value, BLOCK_SIZE)
    return current


@pytest.mark.parametrize(
    "settings, expected, words",
    [
        ([("dcut_force_plain", 1)], Forced(plain=True), "plain"),
        ([("dcut_force_ratio", 0.25)], Forced(ratio=0.25), "ratio 0.25"),
        ([("dcut_force_ratio", 0)], Forced(ratio=0.0), "ratio 0"),
        ([("dcut_force_random", 7)], Forced(random_seed=7), "random lengths, seed 7"),
        ([("dcut_force_random", 0)], Forced(random_seed=0), "random lengths, seed 0"),
        ([("dcut_verify_len_0", 3)], Forced(lengths=(3,)), "lengths [3]"),
        (
            [("dcut_verify_len_0", 3), ("dcut_verify_len_1", 8.0)],
            Forced(lengths=(3, 8)),
            "lengths [3, 8]",
        ),
        (
            [("dcut_verify_len_0", 3), ("dcut_verify_len_1", 8), ("dcut_verify_len_0", 2)],
            Forced(lengths=(2,)),
            "lengths [2]",
        ),
        ([("dcut_force_ratio", 0.5), ("dcut_force_plain", 1)], Forced(plain=True), "plain"),
    ],
)
def test_the_last_knob_wins(
    settings: list[tuple[str, float]], expected: Forced, words: str
) -> None:
    forced = apply_all(*settings)
    assert forced == expected
    assert forced is not None and forced.describe() == words


@pytest.mark.parametrize(
    "off",
    [("dcut_force_plain", 0), *((name, -1) for name in KNOBS if name != "dcut_force_plain")][:5],
    ids=lambda off: off[0],
)
def test_off_returns_the_choice_to_the_selector(off: tuple[str, int]) -> None:
    assert apply_all(off, current=Forced(ratio=0.5)) is None
    assert apply_all(off) is None


def test_every_length_up_to_the_limit_can_be_listed() -> None:
    forced = None
    for i in range(MAX_FORCED_LENGTHS):
        forced = apply_knob(forced, f"dcut_verify_len_{i}", i % BLOCK_SIZE + 1, BLOCK_SIZE)
    assert forced is not None and forced.lengths is not None
    assert len(forced.lengths) == MAX_FORCED_LENGTHS


@pytest.mark.parametrize(
    "name, value",
    [
        ("dcut_force_plain", 2),
        ("dcut_force_plain", -1),
        ("dcut_force_plain", math.nan),
        ("dcut_force_ratio", 1.01),
        ("dcut_force_ratio", -0.1),
        ("dcut_force_ratio", math.nan),
        ("dcut_force_ratio", math.inf),
        ("dcut_force_random", -2),
        ("dcut_force_random", 0.5),
        ("dcut_verify_len_0", 0),
        ("dcut_verify_len_0", BLOCK_SIZE + 1),
        ("dcut_verify_len_0", 2.5),
        ("dcut_verify_len_64", 3),
        ("dcut_force_everything", 1),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        apply_knob(None, name, value, BLOCK_SIZE)


@pytest.mark.parametrize(
    "before, index, expected",
    [
        (None, 2, (1, 1, 5)),
        (Forced(ratio=0.5), 1, (1, 5)),
        (Forced(lengths=(3,)), 3, (3, 1, 1, 5)),
        (Forced(lengths=(3, 4, 6)), 1, (3, 5, 6)),
        (Forced(lengths=(3, 4, 6)), 0, (5,)),
    ],
)
def test_a_place_keeps_the_others_and_left_out_places_get_1(
    before: Forced | None, index: int, expected: tuple[int, ...]
) -> None:
    forced = apply_all((f"dcut_verify_len_{index}", 5), current=before)
    assert forced == Forced(lengths=expected)


@pytest.mark.parametrize("name", ["dcut_force_random", "dcut_verify_len_0"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_integers_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        apply_knob(None, name, value, BLOCK_SIZE)


def test_a_seed_too_large_for_the_generator_is_refused_or_works() -> None:
    try:
        forced = apply_knob(None, "dcut_force_random", 10**14, BLOCK_SIZE)
    except ValueError as error:
        assert "dcut_force_random" in str(error)
    else:
        assert forced is not None
        verify_lens(forced, ranked(2))


@pytest.mark.parametrize(
    "forced, expected",
    [
        (Forced(plain=True), [1] * 5),
        (Forced(ratio=0.0), [1] * 5),
        (Forced(ratio=1.0), [BLOCK_SIZE] * 5),
        (Forced(lengths=(3, 8)), [3, 8, 3, 8, 3]),
        (Forced(lengths=(1, 2, 3, 4, 5, 6, 7)), [1, 2, 3, 4, 5]),
    ],
    ids=lambda value: value.describe() if isinstance(value, Forced) else "",
)
def test_forced_lengths(forced: Forced, expected: list[int]) -> None:
    lens = verify_lens(forced, ranked(5), step=3)
    assert lens.dtype == torch.int32
    assert lens.tolist() == expected


def test_a_ratio_keeps_the_best_drafts_of_the_batch() -> None:
    batch = ranked(4)
    lens = verify_lens(Forced(ratio=0.3), batch)
    assert torch.equal(lens, batch.verify_lens(math.ceil(0.3 * 28)))


def test_lengths_end_where_the_head_stopped() -> None:
    """A draft without a token cannot be verified, whoever wants it."""
    drafted, depth = np.array([0, 2, 3]), np.array([2, 7, 1])
    fixed = Forced(lengths=(5,)).verify_lens(ranked(5), BLOCK_SIZE, 0, drafted, depth)
    assert fixed.tolist() == [3, 1, 5, 2, 1]
    lens = torch.stack(
        [
            Forced(random_seed=3).verify_lens(ranked(5), BLOCK_SIZE, step, drafted, depth)
            for step in range(100)
        ]
    )
    assert lens.min(dim=0).values.tolist() == [1] * 5
    assert lens.max(dim=0).values.tolist() == [3, 1, 8, 2, 1]


def test_random_lengths_repeat_by_seed_and_step_and_cover_the_range() -> None:
    batch = ranked(64)
    everybody, whole = np.arange(64), np.full(64, BLOCK_SIZE - 1)

    def draw(seed: int, step: int) -> torch.Tensor:
        return Forced(random_seed=seed).verify_lens(batch, BLOCK_SIZE, step, everybody, whole)

    global_state = torch.get_rng_state()
    lens = [draw(1, step) for step in range(20)]
    assert torch.equal(torch.get_rng_state(), global_state)  # sampling elsewhere is not disturbed
    assert all(torch.equal(a, draw(1, step)) for step, a in enumerate(lens))
    assert not torch.equal(lens[0], lens[1]) and not torch.equal(lens[0], draw(2, 0))
    assert lens[0].dtype == torch.int32
    assert torch.cat(lens).unique().tolist() == list(range(1, BLOCK_SIZE + 1))


def test_random_modes_draft_for_all_some_and_none() -> None:
    forced = Forced(random_seed=5)
    drafted = [forced.drafted(8, step) for step in range(200)]
    assert all(torch.equal(a, forced.drafted(8, step)) for step, a in enumerate(drafted))
    sizes = [len(places) for places in drafted]
    assert 20 < sizes.count(0) < 90 and 60 < sizes.count(8) < 140
    assert any(0 < size < 8 for size in sizes)
    for step, places in enumerate(drafted):
        assert places.tolist() == sorted(set(places.tolist()))
        lens = verify_lens(forced, ranked(8), step)
        others = sorted(set(range(8)) - set(places.tolist()))
        assert lens[others].tolist() == [1] * len(others)


def test_random_block_sizes_repeat_and_cover_what_can_be_drafted() -> None:
    forced, sizes = Forced(random_seed=5), (3, 5, BLOCK_SIZE)
    drawn = [forced.draft_block_size(sizes, step) for step in range(60)]
    assert drawn == [forced.draft_block_size(sizes, step) for step in range(60)]
    assert all(drawn.count(size) >= 8 for size in sizes)
    assert Forced(ratio=0.5).draft_block_size(sizes, 0) == BLOCK_SIZE
    assert Forced(random_seed=5).draft_block_size((BLOCK_SIZE,), 0) == BLOCK_SIZE


def test_passes_are_of_plain_steps_and_repeat() -> None:
    forced = Forced(random_seed=5)
    drawn = [forced.num_passes(4, 0, step) for step in range(60)]
    assert drawn == [forced.num_passes(4, 0, step) for step in range(60)]
    assert set(drawn) == {1, 2, 3, 4}
    assert forced.num_passes(4, 3, 0) == 1 == Forced(ratio=0.5).num_passes(4, 8, 0)
    assert Forced(plain=True).num_passes(4, 0, 0) == 4
    assert Forced(plain=True).num_passes(1, 0, 0) == 1


def test_random_stages_repeat_and_stop_everywhere() -> None:
    forced = Forced(random_seed=5)
    global_state = torch.get_rng_state()
    found = [compute(forced, 8, step) for step in range(100)]
    assert torch.equal(torch.get_rng_state(), global_state)
    for step, computed in enumerate(found):
        again = compute(forced, 8, step)
        assert again.depth.tolist() == computed.depth.tolist() and again.rows == computed.rows
        assert computed.depth.min() >= 1  # what was drafted for is looked at
    assert set(np.concatenate([c.depth for c in found]).tolist()) == set(range(1, BLOCK_SIZE))
    assert {len(c.rows) for c in found} == {1, 2, 3}
    assert any(len(set(c.depth.tolist())) > 1 for c in found)


@pytest.mark.parametrize("forced", [Forced(ratio=0.5), Forced(lengths=(2,)), Forced(plain=True)])
def test_other_choices_compute_whole_blocks(forced: Forced) -> None:
    assert isinstance(forced.stages(BLOCK_SIZE - 1, 0), WholeBlock)
    assert compute(forced, 3, 0).depth.tolist() == [BLOCK_SIZE - 1] * 3


@pytest.mark.parametrize("forced", [Forced(ratio=0.5), Forced(lengths=(2,)), Forced(plain=True)])
def test_other_choices_draft_for_all_or_none(forced: Forced) -> None:
    assert len(forced.drafted(6, 0)) == (0 if forced.plain else 6)


@pytest.mark.parametrize("fields", [{}, {"plain": True, "ratio": 0.5}])
def test_exactly_one_choice(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Forced(**fields)
