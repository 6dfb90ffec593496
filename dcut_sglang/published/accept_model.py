"""A population of drafts with three numbers, to fit published acceptance with.

The confidence of draft t of request i in one step is

    logit c[i, t] = level + request_spread * z[i] + position_spread * z[i, t],

z standard normal, and drafts are accepted with exactly that probability (a calibrated drafter).
``request_spread`` makes some requests easier than others, which a global top-K can use;
``position_spread`` makes the drafter sure of single drafts, right or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AcceptModel:
    """See the module; ``block_size`` is D."""

    level: float
    request_spread: float
    position_spread: float
    block_size: int = 16

    def survival(self, num_requests: int = 2048, seed: int = 0) -> Float32Array:
        """float32 [num_requests, D-1], the same draws z for the same seed and sizes."""
        rng = np.random.default_rng(seed)
        request = rng.standard_normal((num_requests, 1), dtype=np.float32)
        position = rng.standard_normal((num_requests, self.block_size - 1), dtype=np.float32)
        logit = self.level + self.request_spread * request + self.position_spread * position
        confidence = 1 / (1 + np.exp(-logit))
        return np.cumprod(confidence, axis=1, dtype=np.float32)


def tokens_at_depth(survival: Float32Array, verify_len: int) -> float:
    """Mean tokens per request and step when every request has ``verify_len`` rows."""
    return 1 + float(survival[:, : verify_len - 1].sum(axis=1).mean())


def tokens_at_rows(survival: Float32Array, bs: int, rows_per_request: float) -> float:
    """Mean tokens per request and step when batches of ``bs`` keep their best drafts.

    Args:
        rows_per_request: mean verify length, anchors counted; the batch total is rounded up.
    """
    batches = survival[: len(survival) // bs * bs].reshape(-1, bs * survival.shape[1])
    num_kept = int(np.ceil(round(rows_per_request * bs, 9))) - bs
    best = -np.partition(-batches, min(num_kept, batches.shape[1]) - 1, axis=1)[:, :num_kept]
    return 1 + float(best.sum(axis=1).mean()) / bs


def pattern_search(
    loss: Callable[[FloatArray], float],
    start: Sequence[float],
    step: float = 0.5,
    smallest_step: float = 0.01,
) -> tuple[FloatArray, float]:
    """Minimise by steps along each coordinate, halved when none helps.

    Plain and deterministic; good enough for three numbers, and needs no SciPy.

    Returns:
        (the point, its loss).
    """
    point = np.asarray(start, dtype=np.float64)
    value = loss(point)
    while step >= smallest_step:
        moved = False
        for i in range(len(point)):
            for sign in (1, -1):
                trial = point.copy()
                trial[i] += sign * step
                at_trial = loss(trial)
                if at_trial < value:
                    point, value, moved = trial, at_trial, True
                    break
        if not moved:
            step /= 2
    return point, value
