"""Online calibration: on recorded texts, under distortion, and against adversaries."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from early import EARLY_TEXTS
from hypothesis import given
from hypothesis import strategies as st

from dcut_sglang.calibration import Calibration, calibration_error
from dcut_sglang.replay.anchors import AnchorBank

DEPTH = 4
seeds = st.integers(0, 10_000)


def random_outcomes(
    rng: np.random.Generator, n: int = 16, depth: int = DEPTH
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(confidence, kept, accepted) of a step; outcomes at random."""
    confidence = rng.random((n, depth), dtype=np.float32)
    kept = rng.integers(0, depth + 1, n)
    return confidence, kept, rng.integers(0, kept + 1)


def learnt(rng: np.random.Generator, num_steps: int = 20) -> Calibration:
    calibration = Calibration(DEPTH)
    for _ in range(num_steps):
        calibration.learn(*random_outcomes(rng))
    return calibration


# -- on recorded texts ---------------------------------------------------------------------------


@cache
def home() -> AnchorBank:
    return AnchorBank.load(EARLY_TEXTS)


def distorted(shift: float, scale: float) -> np.ndarray:
    """The home texts' confidences as another drafter might give them: moved in logits."""
    p = np.clip(home().confidence.astype(np.float64), 1e-6, 1 - 1e-6)
    return (1 / (1 + np.exp(-shift - scale * np.log(p / (1 - p))))).astype(np.float32)


def serve(
    confidence: np.ndarray, num_steps: list[int], seed: int = 0, bs: int = 8
) -> tuple[float, list[float]]:
    """Serve the home texts with these confidences, and learn from what is verified: the drafts
    whose calibrated survival is at least 0.2, and one of each request in any case.

    Returns:
        errors at full width on every anchor: raw, and as calibrated after so many steps.
    """
    bank, rng = home(), np.random.default_rng(seed)
    calibration, errors = Calibration(confidence.shape[1]), []

    def error() -> float:
        return calibration_error(calibration.apply(confidence).cumprod(axis=1), bank.accept)

    raw = error()
    at = bank.start[rng.integers(0, bank.num_texts, bs)]
    for step in range(1, max(num_steps) + 1):
        survival = calibration.apply(confidence[at]).cumprod(axis=1)
        kept = np.maximum(1, (survival >= 0.2).sum(axis=1))
        accepted = np.minimum(kept, bank.accept[at])
        calibration.learn(confidence[at], kept, accepted)
        emitted = np.minimum(accepted + 1, bank.remaining[at])
        upcoming = bank.start[rng.integers(0, bank.num_texts, bs)]
        at = np.where(emitted == bank.remaining[at], upcoming, at + emitted)
        if step in num_steps:
            errors.append(error())
    return raw, errors


@pytest.mark.parametrize("shift, scale", [(1.5, 1.0), (-1.5, 1.0), (0.0, 0.6), (1.0, 1.5)])
def test_halves_the_error_of_a_distorted_drafter(shift: float, scale: float) -> None:
    raw, (calibrated,) = serve(distorted(shift, scale), [2000])
    assert raw > 0.08
    assert calibrated <= 0.5 * raw and calibrated < 0.045


def test_too_steep_confidences_are_no_worse_than_those_of_home() -> None:
    """A scale of 1.5 hardly moves this drafter's error: it was a little under-confident."""
    (raw, (calibrated,)), (at_home, _) = (
        serve(distorted(0, 1.5), [2000]),
        serve(distorted(0, 1), [1]),
    )
    assert calibrated <= min(raw, at_home)


@pytest.mark.parametrize("seed", [0, 1])
def test_never_much_worse_than_raw_at_home(seed: int) -> None:
    """The first eight texts are not all texts: what they teach at once is wrong by a little."""
    raw, calibrated = serve(distorted(0.0, 1.0), [3, 10, 30, 100, 300, 600, 1000, 2000], seed)
    assert max(calibrated[4:]) <= raw + 0.005
    assert max(calibrated) <= raw + 0.08 and calibrated[-1] <= raw


def test_follows_a_drafter_that_changes() -> None:
    """What was learnt is forgotten, within some thousand outcomes of a place."""
    rng = np.random.default_rng(0)
    calibration = Calibration(DEPTH)

    def error(exponent: float) -> float:
        confidence = rng.random((20_000, DEPTH)).astype(np.float32)
        found = calibration.apply(confidence) - confidence**exponent
        return float(np.abs(found[:, 0]).mean())

    for exponent in (0.4, 2.5):
        for _ in range(1200):
            confidence = rng.random((8, DEPTH)).astype(np.float32)
            right = (rng.random(confidence.shape) < confidence**exponent).cumprod(axis=1)
            calibration.learn(confidence, np.full(8, DEPTH), right.sum(axis=1))
        assert error(exponent) < 0.06


# -- what is kept --------------------------------------------------------------------------------


def test_nothing_changes_before_outcomes() -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration(DEPTH)
    confidence = rng.random((5, DEPTH), dtype=np.float32)
    assert calibration.apply(confidence) is confidence
    calibration.learn(confidence, np.zeros(5, dtype=np.int64), np.zeros(5, dtype=np.int64))
    for _ in range(50):  # nothing verified is nothing learnt
        calibration.learn(confidence, np.zeros(5, dtype=np.int64), np.zeros(5, dtype=np.int64))
    np.testing.assert_array_equal(calibration.apply(confidence), confidence)
    assert calibration.num_outcomes == 0
    assert calibration.to_json() == {"outcomes": 0, "offset": [0.0] * DEPTH, "slope": [1.0] * DEPTH}


def test_outcomes_are_counted_up_to_the_first_rejection() -> None:
    calibration = Calibration(DEPTH)
    kept, accepted = np.array([4, 4, 2, 0]), np.array([4, 1, 0, 0])
    for _ in range(100):
        calibration.learn(np.full((4, DEPTH), 0.5, dtype=np.float32), kept, accepted)
    seen = 100 * (4 + 2 + 1 + 0)
    assert seen - 64 < calibration.num_outcomes <= seen


@given(seeds)
def test_the_order_of_confidences_is_kept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    calibration = learnt(rng)
    confidence = np.sort(rng.random((200, DEPTH), dtype=np.float32), axis=0)
    confidence[0], confidence[-1] = 0.0, 1.0
    found = calibration.apply(confidence)
    assert found.dtype == np.float32 and found.shape == confidence.shape
    assert (np.diff(found, axis=0) >= 0).all()
    assert ((found >= 0) & (found <= 1)).all()
    inner = (confidence[1:] > 0.02) & (confidence[:-1] < 0.98)
    apart = np.diff(confidence, axis=0) > 1e-3
    assert (np.diff(found, axis=0)[inner & apart] > 0).all()


@given(seeds, st.integers(0, DEPTH - 1), st.integers(1, DEPTH))
def test_drafts_can_be_calibrated_in_stages(seed: int, lo: int, num: int) -> None:
    rng = np.random.default_rng(seed)
    calibration, confidence = learnt(rng), rng.random((6, DEPTH), dtype=np.float32)
    part = confidence[:, lo : lo + num]
    np.testing.assert_array_equal(
        calibration.apply(part, lo), calibration.apply(confidence)[:, lo : lo + num]
    )


@given(seeds)
def test_only_what_was_seen_counts(seed: int) -> None:
    """Confidences beyond the cut, and beyond the first rejection, change nothing."""
    rng = np.random.default_rng(seed)
    one, other = Calibration(DEPTH), Calibration(DEPTH)
    for _ in range(20):
        confidence, kept, accepted = random_outcomes(rng)
        one.learn(confidence, kept, accepted)
        seen = np.arange(DEPTH) < np.minimum(kept, accepted + 1)[:, None]
        elsewhere = rng.random(confidence.shape, dtype=np.float32)
        other.learn(np.where(seen, confidence, elsewhere), kept, accepted)
    assert one.num_outcomes == other.num_outcomes > 0
    np.testing.assert_array_equal(one._own, other._own)


def test_a_place_without_outcomes_leans_on_the_others() -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration(DEPTH)
    for _ in range(300):
        confidence = rng.random((8, DEPTH), dtype=np.float32)
        right = rng.random((8, DEPTH)) < confidence**3  # over-confident
        accepted = np.minimum(right.cumprod(axis=1).sum(axis=1), 2)
        calibration.learn(confidence, np.full(8, 2), accepted)
    # Nothing beyond the second draft was ever seen.
    found = calibration.apply(np.full((1, DEPTH), 0.6, dtype=np.float32))[0]
    assert found == pytest.approx([0.6**3] * DEPTH, abs=0.1)


@pytest.mark.parametrize("low, high", [(0.45, 0.55), (0.001, 0.999), (0.9, 1.0), (0.0, 1.0)])
@pytest.mark.parametrize("right", ["high", "low", "never", "always"])
def test_parameters_stay_bounded(low: float, high: float, right: str) -> None:
    """Outcomes that follow from confidences, against them, or are all the same."""
    rng = np.random.default_rng(0)
    calibration = Calibration(DEPTH)
    for _ in range(600):
        confidence = np.where(rng.random((8, DEPTH)) < 0.5, low, high).astype(np.float32)
        is_high = confidence > (low + high) / 2
        held = {
            "high": is_high,
            "low": ~is_high,
            "never": is_high & False,
            "always": is_high | True,
        }
        accepted = held[right].cumprod(axis=1).sum(axis=1)
        calibration.learn(confidence, np.full(8, DEPTH), accepted)
    offset, slope = calibration._own.T
    assert np.isfinite(calibration._own).all()
    assert (np.abs(offset) <= 5).all() and (slope >= 0.1).all() and (slope < 20).all()
    found = calibration.apply(np.array([[0.0] * DEPTH, [0.5] * DEPTH, [1.0] * DEPTH]))
    assert np.isfinite(found).all()


def test_a_broken_confidence_does_no_lasting_harm() -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration(DEPTH)
    for step in range(100):
        confidence, kept, accepted = random_outcomes(rng)
        if step == 50:
            confidence[0] = np.nan
            confidence[1] = np.inf
        calibration.learn(confidence, kept, accepted)
    assert np.isfinite(calibration._own).all()
    assert np.isfinite(calibration.apply(np.full((1, DEPTH), 0.5, dtype=np.float32))).all()


def test_equal_outcomes_give_equal_parameters_and_inputs_are_left_alone() -> None:
    def run() -> np.ndarray:
        rng, calibration = np.random.default_rng(5), Calibration(DEPTH)
        for _ in range(30):
            confidence, kept, accepted = random_outcomes(rng)
            before = confidence.copy()
            calibration.learn(confidence, kept, accepted)
            np.testing.assert_array_equal(confidence, before)
            confidence[:] = 0.0  # the caller may use its buffer again
        return calibration._own

    first, again = run(), run()
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - [0.0, 1.0]).max() > 0.05


# -- how the error is measured -------------------------------------------------------------------


def test_the_error_of_the_truth_is_small_and_of_a_constant_known() -> None:
    rng = np.random.default_rng(0)
    survival = rng.random((50_000, DEPTH)).cumprod(axis=1)
    accept = (rng.random((50_000, 1)) < survival).sum(axis=1)
    assert calibration_error(survival, accept) < 0.005
    assert calibration_error(np.full((10, 2), 0.55), np.array([2] * 4 + [0] * 6)) == pytest.approx(
        0.15
    )
    assert calibration_error(np.ones((10, DEPTH)), np.zeros(10, dtype=np.int64)) == 1.0
