"""Paired ratios with a bootstrap interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of paired ratios and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def geomean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Ratio:
    """Ratio of two arms measured in the same waves.

    Resamples waves, not single measurements, so that what a wave's prompts and the machine's
    load have in common cancels.

    Raises:
        ValueError: no pairs, unequal lengths, or a measurement that is not positive.
    """
    top, bottom = np.asarray(numerator, float), np.asarray(denominator, float)
    if top.shape != bottom.shape or top.size == 0 or (top <= 0).any() or (bottom <= 0).any():
        raise ValueError(f"need equally many positive measurements, got {top} and {bottom}")
    logs = np.log(top / bottom)
    picks = np.random.default_rng(seed).integers(0, logs.size, (NUM_RESAMPLES, logs.size))
    low, high = np.exp(np.percentile(logs[picks].mean(axis=1), [2.5, 97.5]))
    return Ratio(float(np.exp(logs.mean())), float(low), float(high))
