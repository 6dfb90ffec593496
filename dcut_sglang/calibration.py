"""Calibrate the drafter's confidences online, from what verified drafts turned out to be.

A draft's confidence c estimates the probability that the target accepts it, given that it has
accepted everything in front of it. A drafter that meets other texts than it was trained on is
over- or under-confident, and the selector then keeps too many drafts or too few. Per position t
the calibrated confidence is

    logit p = a_t + b_t * logit c,        b_t > 0, so that the order of drafts is kept,

with (a, b) = (0, 1), the identity, at the start. Outcomes move the parameters by Newton steps of
a regularised logistic regression; old ones are forgotten slowly. Each position leans on what all
positions have in common, and that leans on the identity, so that positions with few outcomes
stay sensible.

Outcomes are censored: nothing is seen beyond the cut, and nothing in plain steps. What is seen
was chosen by confidences alone, never by outcomes, so it does not bias the regression; and only
past outcomes are used, so the target's output cannot depend on the drafts of its own step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_IDENTITY = np.array([0.0, 1.0])
# Weight of the identity against outcomes on what positions share, and of that on each position.
_SHARED_PRIOR = np.diag([30.0, 30.0])
_POSITION_PRIOR = np.diag([30.0, 30.0])
# Outcomes over which evidence is forgotten, per parameter pair.
_MEMORY_OUTCOMES = 4_000
# Regressions move after so many outcomes: often enough, and a tenth of the work.
_OUTCOMES_AT_A_TIME = 64
_MIN_SLOPE, _MAX_SLOPE = 0.1, 3.0
_MAX_OFFSET = 5.0
# Confidences are taken as at most this sure, so that a single logit cannot rule.
_MAX_LOGIT = 9.0


def _logit(probability: npt.NDArray[Any]) -> FloatArray:
    finite = np.where(np.isfinite(probability), probability, 0.0)
    p = np.clip(finite.astype(np.float64), 1e-9, 1 - 1e-9)
    return np.clip(np.log(p) - np.log1p(-p), -_MAX_LOGIT, _MAX_LOGIT)


def _sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(1.0 / (1.0 + np.exp(-x)), dtype=np.float64)


class Calibration:
    """Parameters per position; a few kilobytes, on the host, where decisions are taken.

    Args:
        depth: D-1.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.num_outcomes = 0
        self._waiting: list[tuple[Float32Array, IntArray, IntArray]] = []
        self._num_waiting = 0
        self._shared = _IDENTITY.copy()
        self._shared_weight = _SHARED_PRIOR.copy()
        self._own = np.tile(_IDENTITY, (depth, 1))
        self._own_weight = np.tile(_POSITION_PRIOR, (depth, 1, 1))

    def apply(self, confidence: Float32Array, first: int = 0) -> Float32Array:
        """Calibrated confidences.

        Args:
            confidence: float32 [n, m] of drafts first + 1 .. first + m.

        Returns:
            float32 [n, m].
        """
        own = self._own[first : first + confidence.shape[1]]
        if not self.num_outcomes:
            return confidence
        return _sigmoid(own[:, 0] + own[:, 1] * _logit(confidence)).astype(np.float32)

    def learn(self, confidence: Float32Array, kept: IntArray, accepted: IntArray) -> None:
        """Learn from one step; takes effect once a few steps' outcomes have come together.

        Args:
            confidence: float32 [n, D-1], raw.
            kept: int [n], drafts that were verified.
            accepted: int [n], of which the target accepted the first so many.
        """
        self._waiting.append((confidence.copy(), kept, accepted))
        self._num_waiting += int(np.minimum(kept, accepted + 1).sum())
        if self._num_waiting < _OUTCOMES_AT_A_TIME:
            return
        parts = zip(*self._waiting, strict=True)
        self._waiting, self._num_waiting = [], 0
        self._learn(*(np.concatenate(part) for part in parts))

    def _learn(self, confidence: Float32Array, kept: IntArray, accepted: IntArray) -> None:
        place = np.arange(1, self.depth + 1)
        seen = place <= np.minimum(kept, accepted + 1)[:, None]
        right = place <= accepted[:, None]
        x = np.ones((*confidence.shape, 2))
        x[..., 1] = _logit(confidence)
        seen_at = seen[..., None]
        shared_p = _sigmoid(x @ self._shared)
        shared_shown = np.where(seen, right - shared_p, 0.0)[..., None] * x
        weight = np.where(seen, shared_p * (1 - shared_p), 0.0)
        count = int(seen.sum())
        shared_before = self._shared
        self._shared, self._shared_weight = _newton(
            self._shared[None],
            self._shared_weight[None],
            shared_shown.sum(axis=(0, 1))[None],
            np.einsum("nt,nti,ntj->ij", weight, x, x)[None],
            np.array([count]),
            _IDENTITY,
            _IDENTITY,
            _SHARED_PRIOR,
        )
        self._shared, self._shared_weight = self._shared[0], self._shared_weight[0]
        own_p = _sigmoid((x * self._own).sum(axis=-1))
        own_shown = np.where(seen_at, (right - own_p)[..., None] * x, 0.0).sum(axis=0)
        weight = np.where(seen, own_p * (1 - own_p), 0.0)
        self._own, self._own_weight = _newton(
            self._own,
            self._own_weight,
            own_shown,
            np.einsum("nt,nti,ntj->tij", weight, x, x),
            seen.sum(axis=0),
            shared_before,
            self._shared,
            _POSITION_PRIOR,
        )
        self.num_outcomes += count

    def to_json(self) -> dict[str, Any]:
        """For ``/server_info``: offset and slope per position."""
        return {
            "outcomes": self.num_outcomes,
            "offset": np.round(self._own[:, 0], 3).tolist(),
            "slope": np.round(self._own[:, 1], 3).tolist(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Calibration:
        """A map with the parameters that ``to_json`` gave, to apply; what it had learnt them from
        is not kept."""
        found = cls(len(data["offset"]))
        found.num_outcomes = data["outcomes"]
        found._own = np.stack([data["offset"], data["slope"]], axis=1)
        return found


def _newton(
    parameters: FloatArray,
    weight: FloatArray,
    gradient: FloatArray,
    curvature: FloatArray,
    count: IntArray,
    towards_before: FloatArray,
    towards: FloatArray,
    prior: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """One step of each regression: parameters [m, 2] and their evidence [m, 2, 2].

    Evidence is forgotten by the number of new outcomes; what is forgotten of it returns to the
    prior, which pulls ``towards``. Where that has moved, the whole prior moves with it.
    """
    forgotten = 1 - (1 - 1 / _MEMORY_OUTCOMES) ** count
    weight = weight + forgotten[:, None, None] * (prior - weight) + curvature
    pull = forgotten[:, None] * ((towards - parameters) @ prior)
    pull = pull + (towards - towards_before) @ prior
    step = np.linalg.solve(weight, (gradient + pull)[..., None])[..., 0]
    moved = parameters + np.clip(step, -0.5, 0.5)
    moved[:, 0] = np.clip(moved[:, 0], -_MAX_OFFSET, _MAX_OFFSET)
    moved[:, 1] = np.clip(moved[:, 1], _MIN_SLOPE, _MAX_SLOPE)
    return moved, weight


def calibration_error(
    survival: npt.NDArray[Any], accept: IntArray, drafts: tuple[int, ...] = (1, 2, 4, 8)
) -> float:
    """Mean distance between predicted and seen survival.

    Args:
        survival: [N, D-1], predictions of full-width outcomes.
        accept: int [N], accepted drafts.
        drafts: which survivals count; for each, ten bins of predictions, weighted by size.
    """
    errors = []
    for k in drafts:
        if k > survival.shape[1]:
            continue
        predicted, came = survival[:, k - 1].astype(np.float64), accept >= k
        place = np.minimum((predicted * 10).astype(int), 9)
        sums = np.bincount(place, predicted, 10) - np.bincount(place, came, 10)
        errors.append(np.abs(sums).sum() / len(accept))
    return float(np.mean(errors))
