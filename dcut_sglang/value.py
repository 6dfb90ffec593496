"""What drafting for a request is worth, predicted from what it has shown lately.

The value of a block is what it adds to a step, in tokens, at the step's prices: the survivals of
the drafts worth verifying, less what verifying them and computing them costs. A request's next
block resembles its last ones; and the last one, read from the place that the request has reached
since, already says something about it. All of that ages: a few tokens after its last block a
request is more like any other. How much each of these tells depends on drafter and texts, so a
ridge regression learns it from the blocks that are drafted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

# Blocks remembered per request, and the weight of each against the one after it.
_BLOCKS = 4
_DECAY = 0.7
# First blocks remembered, for the value of a request that has shown nothing yet.
_FIRST_BLOCKS = 16
# What is left, after each further token, of what the last block says of the next one.
_FRESH_PER_TOKEN = 0.75
_NUM_FEATURES = 7
# Weights that the regression starts from, as if found on so many blocks: what a block is worth
# that is not known any more is taken to be something, so that it is found out.
_PRIOR_WEIGHTS = np.array([0.0, 0.5, 0.5, 0.3, 0.2, 0.2, 0.5])
_PRIOR_BLOCKS = 3.0
# Share of its evidence that the regression forgets with each block: traffic changes.
_FORGETTING = 0.02


@dataclass(frozen=True)
class Prices:
    """What a step's milliseconds are worth in tokens.

    Attributes:
        tokens_per_ms: what plain decoding of the batch earns.
        row_ms: a further row in the verify.
        head_row_ms: a further row in the draft head.
    """

    tokens_per_ms: float
    row_ms: float
    head_row_ms: float

    @property
    def row_tokens(self) -> float:
        """Survival at which verifying a draft pays for itself."""
        return self.tokens_per_ms * self.row_ms

    @property
    def head_row_tokens(self) -> float:
        return self.tokens_per_ms * self.head_row_ms


def block_value(
    survival: FloatArray | Float32Array, depth: npt.ArrayLike, prices: Prices
) -> FloatArray:
    """Net tokens of blocks [..., D-1] of which the head computes ``depth`` [...] drafts each.

    The forward, which is paid once for a block, is not in it.
    """
    gain = np.maximum(survival - prices.row_tokens, 0.0).sum(axis=-1)
    return np.asarray(gain - prices.head_row_tokens * np.asarray(depth), dtype=np.float64)


class ValueModel:
    """Remembers recent blocks of recent requests; predicts the value of their next ones.

    Args:
        depth: D-1.
        num_requests: requests remembered; the one drafted for longest ago makes room.
    """

    def __init__(self, depth: int, num_requests: int = 256) -> None:
        self.depth = depth
        self._row: dict[Hashable, int] = {}
        self._key: list[Hashable | None] = [None] * num_requests
        self._drafted_at = np.full(num_requests, -1, dtype=np.int64)
        self._num_observed = 0
        self._survival = np.zeros((num_requests, _BLOCKS, depth))
        self._depths = np.zeros((num_requests, _BLOCKS), dtype=np.int64)
        self._num_blocks = np.zeros(num_requests, dtype=np.int64)
        # Tokens emitted since the anchor of the last block; whether all that was kept of it held.
        self._advanced = np.zeros(num_requests, dtype=np.int64)
        self._held = np.zeros(num_requests)
        self._first_survival = np.zeros((_FIRST_BLOCKS, depth))
        self._first_depths = np.zeros(_FIRST_BLOCKS, dtype=np.int64)
        self._num_firsts = 0
        self._gram = _PRIOR_BLOCKS * np.eye(_NUM_FEATURES)
        self._moment = self._gram @ _PRIOR_WEIGHTS
        self._weights = _PRIOR_WEIGHTS.copy()

    @property
    def has_seen_any(self) -> bool:
        return self._num_firsts > 0

    def rows_of(self, requests: Sequence[Hashable]) -> IntArray:
        """Memory rows int64 [bs]; -1 for a request that was never drafted for."""
        return np.array([self._row.get(request, -1) for request in requests], dtype=np.int64)

    def drafted_at(self, rows: IntArray) -> IntArray:
        """When each was last drafted for, on this model's own count; -1: never."""
        return np.where(rows < 0, -1, self._drafted_at[rows])

    def last_depth(self, rows: IntArray) -> IntArray:
        """Drafts computed of each request's last block; of a stranger's all: int64 [n]."""
        return np.where(rows < 0, self.depth, self._depths[rows, 0])

    def features(self, rows: IntArray, prices: Prices) -> FloatArray:
        """What predicts the next block of remembered requests: [n, 7].

        Five that are fresh right behind the last block, and two that take over as they age.
        """
        values = block_value(self._survival[rows], self._depths[rows], prices)
        weights = self._weights_of_blocks(rows)
        ahead = self._ahead(rows)
        out = np.ones((len(rows), _NUM_FEATURES))
        out[:, 1] = (values * weights).sum(axis=1) / weights.sum(axis=1)
        out[:, 2] = np.maximum(ahead - prices.row_tokens, 0.0).sum(axis=1)
        out[:, 3] = ahead[:, 0]
        out[:, 4] = self._held[rows]
        fresh = _FRESH_PER_TOKEN ** np.maximum(self._advanced[rows] - 1, 0)
        out[:, 5] = 1.0 - fresh
        out[:, 6] = (1.0 - fresh) * out[:, 1]
        out[:, :5] *= fresh[:, None]
        return out

    def _ahead(self, rows: IntArray) -> FloatArray:
        """Survival [n, D-1] that the last block promised for the drafts after the present place."""
        last = self._survival[rows, 0]
        steps = np.ones_like(last)
        steps[:, 1:] = last[:, 1:] / np.maximum(last[:, :-1], 1e-9)
        steps[:, 0] = last[:, 0]
        places = self._advanced[rows][:, None] + np.arange(self.depth)
        inside = places < self.depth
        taken = np.take_along_axis(steps, np.minimum(places, self.depth - 1), axis=1)
        typical = self.pace(rows)[:, None]
        return np.where(inside, np.minimum(taken, 1.0), typical).cumprod(axis=1)

    def beyond(self, rows: IntArray, depth: int, prices: Prices) -> FloatArray:
        """Expected gain of the drafts after the first ``depth``, in tokens: float64 [n].

        A stranger's is that of the last strangers' first blocks.
        """
        if depth >= self.depth:
            return np.zeros(len(rows))
        known = rows >= 0
        count = min(self._num_firsts, _FIRST_BLOCKS)
        gain = np.zeros(len(rows))
        if known.any():
            last = np.maximum(self._survival[rows[known], :, depth:] - prices.row_tokens, 0.0)
            weights = self._weights_of_blocks(rows[known])
            gain[known] = (last.sum(axis=2) * weights).sum(axis=1) / weights.sum(axis=1)
        if not known.all() and count:
            last = np.maximum(self._first_survival[:count, depth:] - prices.row_tokens, 0.0)
            gain[~known] = last.sum(axis=1).mean()
        return gain

    def expected(self, rows: IntArray, prices: Prices) -> tuple[FloatArray, FloatArray]:
        """Tokens of a step that drafts for these requests, and drafts that it keeps of each.

        Drafts not worth verifying are left out; a stranger has none.

        Returns:
            float64 [n] each; tokens are at least 1.
        """
        tokens, kept = np.ones(len(rows)), np.zeros(len(rows))
        known = rows >= 0
        if known.any():
            blocks = self._survival[rows[known]]
            pays = blocks >= prices.row_tokens
            weights = self._weights_of_blocks(rows[known])
            weights = weights / weights.sum(axis=1, keepdims=True)
            tokens[known] += ((blocks * pays).sum(axis=2) * weights).sum(axis=1)
            kept[known] = (pays.sum(axis=2) * weights).sum(axis=1)
        return tokens, kept

    def _weights_of_blocks(self, rows: IntArray) -> FloatArray:
        there = np.arange(_BLOCKS) < self._num_blocks[rows][:, None]
        return np.asarray(_DECAY ** np.arange(_BLOCKS) * there, dtype=np.float64)

    def pace(self, rows: IntArray) -> FloatArray:
        """Geometric mean of the confidences of the last block, as far as it was computed."""
        depths = np.maximum(self._depths[rows, 0], 1)
        last = self._survival[rows, 0, depths - 1]
        return np.maximum(last, 1e-9) ** (1.0 / depths)

    def predict(self, rows: IntArray, prices: Prices) -> FloatArray:
        """Expected value of the next block of each request, in tokens: float64 [bs].

        A stranger's is the mean of the first blocks of the last strangers.
        """
        out = np.empty(len(rows))
        known = rows >= 0
        if known.any():
            out[known] = self.features(rows[known], prices) @ self._weights
        if not known.all():
            count = min(self._num_firsts, _FIRST_BLOCKS)
            depths = self._first_depths[:count]
            computed = np.arange(self.depth) < depths[:, None]
            firsts = block_value(self._first_survival[:count] * computed, depths, prices)
            out[~known] = firsts.mean() if count else 0.0
        return out

    def observe(
        self,
        requests: Sequence[Hashable],
        survival: Float32Array,
        depth: IntArray,
        prices: Prices,
    ) -> FloatArray:
        """Learn from the blocks of the requests that were drafted for.

        Args:
            survival: float32 [n, D-1]; what lies beyond the computed depth is filled in here,
                at the block's own pace.
            depth: int [n], computed drafts, at least 1 each.
            prices: the step's, the same as in ``predict``.

        Returns:
            float64 [n], what the blocks were worth, in tokens.
        """
        rows = self.rows_of(requests)
        known = rows >= 0
        values = block_value(survival, depth, prices)
        if known.any():
            shown, came = self.features(rows[known], prices), values[known]
            kept = (1 - _FORGETTING) ** len(came)
            prior = (1 - kept) * _PRIOR_BLOCKS
            self._gram = kept * self._gram + prior * np.eye(_NUM_FEATURES) + shown.T @ shown
            self._moment = kept * self._moment + prior * _PRIOR_WEIGHTS + shown.T @ came
            self._weights = np.linalg.solve(self._gram, self._moment)
        filled = _continued(np.asarray(survival, dtype=np.float64), depth)
        self._num_observed += 1
        # None of this step is the oldest any more: a newcomer must not take the place of one.
        self._drafted_at[rows[known]] = self._num_observed
        for at in np.flatnonzero(~known).tolist():
            rows[at] = self._take_row(requests[at])
            place = self._num_firsts % _FIRST_BLOCKS
            self._first_survival[place], self._first_depths[place] = filled[at], depth[at]
            self._num_firsts += 1
        self._survival[rows, 1:] = self._survival[rows, :-1]
        self._depths[rows, 1:] = self._depths[rows, :-1]
        self._survival[rows, 0], self._depths[rows, 0] = filled, depth
        self._num_blocks[rows] += 1
        self._advanced[rows] = 0
        return values

    def advance(self, requests: Sequence[Hashable], kept: IntArray, emitted: IntArray) -> None:
        """Note what a step did to every request of the batch.

        Args:
            kept: int [bs], drafts that were verified.
            emitted: int [bs], accepted drafts + 1.
        """
        rows = self.rows_of(requests)
        known = rows >= 0
        rows, kept, emitted = rows[known], kept[known], emitted[known]
        self._advanced[rows] += emitted
        self._held[rows] = np.where(kept > 0, kept + 1 == emitted, 0.5 * self._held[rows])

    def pass_by(self, requests: Sequence[Hashable], num_steps: int) -> None:
        """Note plain steps of a batch, as that many calls of ``advance`` would."""
        rows = self.rows_of(requests)
        rows = rows[rows >= 0]
        self._advanced[rows] += num_steps
        self._held[rows] *= 0.5**num_steps

    def _take_row(self, request: Hashable) -> int:
        row = int(np.argmin(self._drafted_at))
        if (former := self._key[row]) is not None:
            del self._row[former]
        self._row[request], self._key[row] = row, request
        self._num_blocks[row] = 0
        self._held[row] = 0.0
        self._drafted_at[row] = self._num_observed
        return row


def _continued(survival: FloatArray, depth: IntArray) -> FloatArray:
    """Survival [n, D-1] with what lies beyond ``depth`` [n] going on at the pace in front of it."""
    at = np.maximum(depth, 1)[:, None]
    last = np.take_along_axis(survival, at - 1, axis=1)
    pace = np.maximum(last, 1e-9) ** (1.0 / at)
    beyond = np.arange(1, survival.shape[1] + 1) - at
    return np.where(beyond > 0, last * pace ** np.maximum(beyond, 0), survival)
