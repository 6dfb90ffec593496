"""Calibrated survival: how often drafts of a given position and raw survival really survive."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dcut_sglang.replay.anchors import AnchorBank

Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]


def isotonic(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The non-decreasing sequence closest to ``values`` in weighted squares
    (pool adjacent violators)."""
    means: list[float] = []
    sizes: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, size, count = value, weight, 1
        while means and means[-1] >= mean:
            other = sizes.pop()
            mean = (means.pop() * other + mean * size) / (other + size)
            size += other
            count += counts.pop()
        means.append(mean)
        sizes.append(size)
        counts.append(count)
    return np.repeat(means, counts)


class Calibration:
    """A monotone map from raw to calibrated survival, one per draft position.

    Args:
        survival: float [N, D-1], raw.
        accept: int [N], accepted drafts.
        num_bins: groups of equal size, per position, before the isotonic fit.
    """

    def __init__(
        self, survival: npt.NDArray[np.floating], accept: npt.ArrayLike, num_bins: int = 24
    ) -> None:
        outcome = np.asarray(accept)[:, None] > np.arange(survival.shape[1])
        self._knots: list[tuple[FloatArray, FloatArray]] = []
        for t in range(survival.shape[1]):
            order = np.argsort(survival[:, t], kind="stable")
            groups = [g for g in np.array_split(order, num_bins) if len(g)]
            x = np.array([survival[g, t].mean() for g in groups], dtype=np.float64)
            y = np.array([outcome[g, t].mean() for g in groups], dtype=np.float64)
            sizes = np.array([float(len(g)) for g in groups])
            # Ends pinned: a draft of survival 0 is never accepted, one of 1 at the best rate.
            self._knots.append((np.r_[0.0, x, 1.0], np.r_[0.0, isotonic(y, sizes), 1.0]))

    def __call__(self, survival: npt.NDArray[np.floating]) -> Float32Array:
        """Calibrated survival float32 [N, D-1], non-increasing along each row."""
        mapped = np.stack(
            [np.interp(survival[:, t], x, y) for t, (x, y) in enumerate(self._knots)], axis=1
        )
        return np.minimum.accumulate(mapped, axis=1).astype(np.float32)


def cross_fitted(bank: AnchorBank, num_folds: int = 5, seed: int = 0) -> Float32Array:
    """Calibrated survival of every anchor, each text by a map fitted on other texts.

    Returns:
        float32 [N, D-1]. With fewer than two texts there is nothing to fit on: the raw survival.
    """
    num_folds = min(num_folds, bank.num_texts)
    if num_folds < 2:
        return bank.survival
    fold = np.random.default_rng(seed).permutation(bank.num_texts) % num_folds
    fold_of_anchor = fold[bank.text]
    calibrated = np.empty_like(bank.survival)
    for k in range(num_folds):
        inside = fold_of_anchor == k
        fit = Calibration(bank.survival[~inside], bank.accept[~inside])
        calibrated[inside] = fit(bank.survival[inside])
    return calibrated
