"""What a block is worth, and how well the last ones predict the next."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_sglang.value import FloatArray, Prices, ValueModel, block_value

DEPTH = 6
PRICES = Prices(tokens_per_ms=0.1, row_ms=2.0, head_row_ms=0.25)

seeds = st.integers(0, 10_000)
prices = st.builds(Prices, st.floats(0.01, 1), st.floats(0, 10), st.floats(0, 2))


def blocks(values: list[float], depth: int = DEPTH) -> tuple[np.ndarray, np.ndarray]:
    """Blocks whose confidences are all the same, computed as deep as ``depth``."""
    survival = np.repeat(np.array(values)[:, None], DEPTH, axis=1).cumprod(axis=1)
    survival[:, depth:] = 0.0
    return survival.astype(np.float32), np.full(len(values), depth, dtype=np.int64)


def show(model: ValueModel, shown: dict[Hashable, float], depth: int = DEPTH) -> None:
    model.observe(list(shown), *blocks(list(shown.values()), depth), PRICES)


def predict(model: ValueModel, *requests: Hashable) -> list[float]:
    return model.predict(model.rows_of(requests), PRICES).tolist()


# -- the value of a block ------------------------------------------------------------------------


@given(seeds, prices)
def test_a_block_s_value_is_the_best_choice_of_its_drafts(seed: int, prices: Prices) -> None:
    """Brute force over verify lengths: survivals less the price of their rows and of the head."""
    rng = np.random.default_rng(seed)
    survival = rng.random((3, 4, DEPTH)).cumprod(axis=-1)
    depth = rng.integers(1, DEPTH + 1, (3, 4))
    found = block_value(survival, depth, prices)
    assert found.shape == (3, 4) and found.dtype == np.float64
    for at in np.ndindex(3, 4):
        best = max(
            survival[at][:kept].sum() - prices.tokens_per_ms * prices.row_ms * kept
            for kept in range(DEPTH + 1)
        )
        head = prices.tokens_per_ms * prices.head_row_ms * depth[at]
        assert found[at] == pytest.approx(best - head, abs=1e-12)


@given(seeds, prices)
def test_better_drafts_are_never_worth_less_and_dearer_time_never_more(
    seed: int, prices: Prices
) -> None:
    rng = np.random.default_rng(seed)
    confidence = rng.random((20, DEPTH))
    better = confidence ** rng.random()
    depth = np.full(20, DEPTH)
    value = block_value(confidence.cumprod(axis=1), depth, prices)
    assert (block_value(better.cumprod(axis=1), depth, prices) >= value - 1e-12).all()
    dearer = Prices(2 * prices.tokens_per_ms, prices.row_ms, prices.head_row_ms)
    assert (block_value(confidence.cumprod(axis=1), depth, dearer) <= value + 1e-12).all()


# -- prediction ----------------------------------------------------------------------------------


def test_nothing_is_known_at_first() -> None:
    model = ValueModel(DEPTH)
    assert not model.has_seen_any
    rows = model.rows_of(["a", "b"])
    assert rows.tolist() == [-1, -1] and model.drafted_at(rows).tolist() == [-1, -1]
    assert model.predict(rows, PRICES).tolist() == [0.0, 0.0]
    assert model.rows_of([]).shape == (0,) and model.predict(model.rows_of([]), PRICES).shape == (
        0,
    )


def test_a_stranger_is_expected_to_be_like_the_last_strangers() -> None:
    model = ValueModel(DEPTH)
    show(model, {"a": 0.9, "b": 0.3})
    mean = block_value(*blocks([0.9, 0.3]), PRICES).mean()
    assert model.has_seen_any
    assert predict(model, "new", "newer") == pytest.approx([mean, mean])
    for _ in range(20):
        show(model, {"a": 0.1})  # no stranger any more
    assert predict(model, "new") == pytest.approx([mean])
    # After many others, the first ones are forgotten.
    for first in range(0, 40, 2):
        show(model, {f"c{first}": 0.8, f"c{first + 1}": 0.8})
    assert predict(model, "new") == pytest.approx(block_value(*blocks([0.8]), PRICES).tolist())


@given(seeds, prices)
def test_features_are_those_of_the_last_four_blocks(seed: int, prices: Prices) -> None:
    """Written out for one request, from blocks of random depth."""
    rng = np.random.default_rng(seed)
    model = ValueModel(DEPTH)
    filled: list[tuple[np.ndarray, int]] = []
    held = 0.0
    for _ in range(int(rng.integers(1, 7))):
        depth = int(rng.integers(1, DEPTH + 1))
        confidence = 0.05 + 0.95 * rng.random(DEPTH)
        survival = confidence.cumprod()
        survival[depth:] = 0.0
        model.observe(["other", "a"], np.tile(survival, (2, 1)).astype(np.float32),
                      np.array([depth, depth]), prices)  # fmt: skip
        pace = survival[depth - 1] ** (1 / depth)
        rest = survival[depth - 1] * pace ** np.arange(1, DEPTH - depth + 1)
        filled.insert(0, (np.r_[survival[:depth], rest], depth))
        advanced = 0
        for _ in range(int(rng.integers(0, 3))):
            kept = int(rng.integers(0, depth + 1))
            emitted = int(rng.integers(1, kept + 2))
            model.advance(["a", "unknown"], np.array([kept, 0]), np.array([emitted, 1]))
            advanced += emitted
            held = float(emitted == kept + 1) if kept else held / 2

    recent = [block_value(s, d, prices) for s, d in filled[:4]]
    weights = 0.7 ** np.arange(len(recent))
    last, depth = filled[0]
    steps = np.r_[last[0], last[1:] / last[:-1]]
    pace = last[depth - 1] ** (1 / depth)
    ahead = [steps[advanced + t] if advanced + t < DEPTH else pace for t in range(DEPTH)]
    promised = np.cumprod(ahead)
    fresh, mean = 0.75 ** max(advanced - 1, 0), np.average(recent, weights=weights)
    gain = np.maximum(promised - prices.row_tokens, 0).sum()
    want = [fresh * x for x in (1.0, mean, gain, promised[0], held)]
    want += [1 - fresh, (1 - fresh) * mean]
    rows = model.rows_of(["a"])
    assert model.features(rows, prices)[0] == pytest.approx(want, rel=1e-4, abs=1e-5)
    assert model.pace(rows)[0] == pytest.approx(pace, rel=1e-4)


def test_a_request_that_stays_as_it_is_is_predicted_well() -> None:
    rng = np.random.default_rng(0)
    model = ValueModel(DEPTH)
    levels: dict[Hashable, float] = {f"r{i}": v for i, v in enumerate(rng.uniform(0.2, 0.95, 16))}
    everybody = list(levels)
    for _ in range(60):
        show(model, levels)
        model.advance(everybody, np.full(16, 2), np.full(16, 2))
    came = block_value(*blocks(list(levels.values())), PRICES)
    assert predict(model, *everybody) == pytest.approx(came, abs=0.15)


def test_the_regression_learns_what_tells() -> None:
    """Values that only follow from the draft promised at the present place are learnt as such."""
    rng = np.random.default_rng(0)
    model = ValueModel(DEPTH)
    everybody: list[Hashable] = list(range(32))
    errors = []
    level = rng.uniform(0.3, 0.95, 32)
    for step in range(150):
        survival, depth = blocks(level.tolist())
        if step:
            rows = model.rows_of(everybody)
            came = block_value(survival, depth, PRICES)
            guess = model.predict(rows, PRICES)
            errors.append((np.abs(guess - came).mean(), np.abs(came - came.mean()).mean()))
        model.observe(everybody, survival, depth, PRICES)
        model.advance(everybody, np.full(32, 1), np.full(32, 1))
        fresh = rng.random(32) < 0.1
        level = np.where(fresh, rng.uniform(0.3, 0.95, 32), level)
    error, spread = np.mean(errors[-50:], axis=0)
    assert error < 0.5 * spread


@given(seeds)
def test_predictions_are_finite_whatever_is_shown(seed: int) -> None:
    """Zeros, ones, one draft or a whole block, requests that come and go."""
    rng = np.random.default_rng(seed)
    model = ValueModel(DEPTH, num_requests=8)
    for _ in range(30):
        size = int(rng.integers(1, 7))
        requests: list[Hashable] = rng.choice(12, size, replace=False).tolist()
        depth = rng.integers(1, DEPTH + 1, size)
        survival = np.round(rng.random((size, DEPTH)) * 2).clip(0, 1).cumprod(axis=1)
        survival[np.arange(DEPTH) >= depth[:, None]] = 0
        model.observe(requests, survival.astype(np.float32), depth, PRICES)
        model.advance(requests, depth, np.minimum(depth, 2))
        rows = model.rows_of(list(range(12)))
        assert np.isfinite(model.predict(rows, PRICES)).all()
        assert (rows >= 0).sum() <= 8 and len({*rows[rows >= 0].tolist()}) == (rows >= 0).sum()
        assert (model.rows_of(requests) >= 0).all()
        assert (np.diff(model._survival, axis=2) <= 1e-12).all()


def test_equal_histories_give_equal_predictions() -> None:
    def run() -> list[float]:
        rng, model = np.random.default_rng(3), ValueModel(DEPTH, num_requests=8)
        for _ in range(50):
            show(model, {int(r): float(rng.random()) for r in rng.choice(12, 4, replace=False)})
        return predict(model, *range(12))

    assert run() == run()


@given(seeds, prices, st.integers(0, DEPTH))
def test_what_lies_beyond_a_depth_is_the_mean_of_the_last_blocks(
    seed: int, prices: Prices, depth: int
) -> None:
    """Written out; what was not computed goes on at its pace, for strangers too."""
    rng = np.random.default_rng(seed)
    model = ValueModel(DEPTH)
    gains: list[float] = []
    for _ in range(int(rng.integers(1, 7))):
        computed, value = int(rng.integers(1, DEPTH + 1)), float(rng.uniform(0.3, 1))
        model.observe(["a"], *blocks([value], computed), prices)
        ahead = value ** np.arange(depth + 1, DEPTH + 1)
        gains.insert(0, np.maximum(ahead - prices.row_tokens, 0).sum())
    want = np.average(gains[:4], weights=0.7 ** np.arange(len(gains[:4])))
    found = model.beyond(model.rows_of(["a", "stranger"]), depth, prices)
    assert found == pytest.approx([want, gains[-1]], rel=1e-4, abs=1e-5)


# -- memory --------------------------------------------------------------------------------------


def test_the_one_drafted_for_longest_ago_makes_room() -> None:
    model = ValueModel(DEPTH, num_requests=4)
    for request in "abcd":
        show(model, {request: 0.5})
    show(model, {"a": 0.5})
    show(model, {"e": 0.5, "f": 0.5})
    assert (model.rows_of("aefd") >= 0).all() and (model.rows_of("bc") == -1).all()
    assert sorted(model._row.values()) == [0, 1, 2, 3]


def test_a_newcomer_does_not_take_the_place_of_one_in_its_own_step() -> None:
    """Even where that one had waited longest of all."""
    model = ValueModel(DEPTH, num_requests=3)
    for request in "abc":
        show(model, {request: 0.3})
    show(model, {"a": 0.9, "d": 0.2})
    rows = model.rows_of("acd")
    assert (rows >= 0).all() and model.rows_of("b")[0] == -1
    assert model.pace(model.rows_of("ad")) == pytest.approx([0.9, 0.2], rel=1e-4)


def test_a_newcomer_inherits_nothing() -> None:
    model = ValueModel(DEPTH, num_requests=2)
    for _ in range(5):
        show(model, {"a": 0.95, "b": 0.95})
        model.advance(["a", "b"], np.array([2, 2]), np.array([3, 3]))
    fresh = ValueModel(DEPTH, num_requests=2)
    for subject in (model, fresh):
        show(subject, {"c": 0.4})
    at, alone = model.rows_of("c"), fresh.rows_of("c")
    np.testing.assert_array_equal(model.features(at, PRICES), fresh.features(alone, PRICES))


def test_when_it_was_drafted_for_is_counted_in_steps_that_drafted() -> None:
    model = ValueModel(DEPTH)
    show(model, {"a": 0.5})
    show(model, {"b": 0.5})
    show(model, {"b": 0.5})
    rows = model.rows_of(["a", "b", "c"])
    assert model.drafted_at(rows).tolist() == [1, 3, -1]


# -- advance -------------------------------------------------------------------------------------


def fresh_features(model: ValueModel, requests: str) -> FloatArray:
    """What predicts the next block, before it is discounted for its age."""
    features = model.features(model.rows_of(requests), PRICES)
    return features[:, :5] / features[:, :1]


def test_advancing_reads_the_last_block_from_the_place_reached() -> None:
    model = ValueModel(DEPTH)
    confidence = np.array([[0.9, 0.8, 0.7, 0.2, 0.6, 0.5]])
    survival = confidence.cumprod(axis=1).astype(np.float32)
    model.observe(["a"], survival, np.array([DEPTH]), PRICES)
    for emitted, first in [(0, 0.9), (2, 0.7), (1, 0.2), (2, 0.5)]:
        if emitted:
            model.advance(["a"], np.array([0]), np.array([emitted]))
        assert fresh_features(model, "a")[0, 3] == pytest.approx(first, rel=1e-4)
    # Beyond the block, its own pace.
    model.advance(["a"], np.array([0]), np.array([50]))
    pace = float(survival[0, -1]) ** (1 / DEPTH)
    assert fresh_features(model, "a")[0, 3] == pytest.approx(pace, rel=1e-4)


def test_whether_all_that_was_kept_held_fades_in_plain_steps() -> None:
    model = ValueModel(DEPTH)
    show(model, {"a": 0.5, "b": 0.5})

    def held() -> list[float]:
        return [round(x, 9) for x in fresh_features(model, "ab")[:, 4].tolist()]

    assert held() == [0.0, 0.0]
    model.advance(["a", "b"], np.array([3, 3]), np.array([4, 3]))
    assert held() == [1.0, 0.0]
    model.advance(["a", "b"], np.array([0, 0]), np.array([1, 1]))
    assert held() == [0.5, 0.0]
    model.advance(["b", "stranger"], np.array([1, 1]), np.array([2, 2]))
    assert held() == [0.5, 1.0]
    assert model.rows_of(["stranger"])[0] == -1


def test_a_bad_block_is_soon_forgotten() -> None:
    """Texts whose blocks stay as they are for a token and are anything twenty tokens later."""
    rng, model = np.random.default_rng(0), ValueModel(DEPTH)
    level = 0.95
    for _ in range(300):
        show(model, {"a": level})
        if rng.random() < 0.5:
            model.pass_by(["a"], 1)
        else:
            model.pass_by(["a"], 20)
            level = float(rng.choice([0.05, 0.95]))
    show(model, {"bad": 0.05, "good": 0.95})
    model.pass_by(["bad", "good"], 1)
    bad, good = predict(model, "bad", "good")
    model.pass_by(["bad", "good"], 19)
    later_bad, later_good = predict(model, "bad", "good")
    usual = np.mean(block_value(*blocks([0.05, 0.95]), PRICES))
    assert bad < 0 and good > 2
    assert abs(later_bad - usual) < 0.5 * abs(bad - usual)
    assert abs(later_good - usual) < 0.5 * abs(good - usual)


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_steps_passed_by_are_plain_steps(seed: int, num_steps: int) -> None:
    rng = np.random.default_rng(seed)
    requests = ["a", "b", "c", "unknown"]
    one_by_one, at_once = ValueModel(DEPTH), ValueModel(DEPTH)
    survival = np.sort(rng.random((3, DEPTH)), axis=1)[:, ::-1].astype(np.float32)
    for model in (one_by_one, at_once):
        model.observe(requests[:3], survival, np.array([1, 2, DEPTH]), PRICES)
        model.advance(requests[:3], np.array([1, 2, 0]), np.array([2, 1, 1]))
    for _ in range(num_steps):
        one_by_one.advance(requests, np.zeros(4, dtype=np.int64), np.ones(4, dtype=np.int64))
    at_once.pass_by(requests, num_steps)
    rows = at_once.rows_of(requests[:3])
    np.testing.assert_allclose(
        at_once.features(rows, PRICES), one_by_one.features(rows, PRICES), rtol=1e-12
    )
