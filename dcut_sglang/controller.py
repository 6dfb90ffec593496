"""Whether a step should draft at all: for every request, for a few to look again, or for none.

A plain step costs what plain decoding costs and emits one token per request. Speculation is
worth it when the selector, given the survivals that the requests of this batch have shown
lately, expects more tokens per millisecond. What a request has shown ages once it is no longer
drafted for, so now and then a plain step drafts for one or two requests only: cheap enough to
stay under a fixed share of the time, and enough to notice when speculation would pay again.

Decisions follow from the cost table and from confidences alone, never from a clock, so equal
requests in equal batches take equal decisions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dcut_sglang.selector import Selector

Mode = Literal["speculate", "plain", "relook"]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

# Blocks remembered per request. What the selector would make of each is averaged; averaging the
# survivals first would miss that it picks the best drafts of every step.
_REMEMBERED_BLOCKS = 4
# Requests remembered; the one drafted for longest ago makes room.
_MEMORY_ROWS = 256
_RELOOK_REQUESTS = 2
_RELOOK_TIME_SHARE = 0.01


@dataclass(frozen=True)
class Plan:
    """What one step drafts.

    Attributes:
        mode: ``speculate`` (all requests), ``plain`` (none) or ``relook`` (a few).
        drafted: int64, places in the batch of the requests to draft for, ascending.
        speculate_tokens_per_ms, plain_tokens_per_ms: what was compared.
    """

    mode: Mode
    drafted: IntArray
    speculate_tokens_per_ms: float
    plain_tokens_per_ms: float


class Controller:
    """Remembers what requests have shown, and plans the next step.

    Args:
        selector: its costs and candidates are what speculation would use.
        margin: relative advantage that a mode must show before it replaces the current one.
    """

    def __init__(self, selector: Selector, margin: float = 0.03) -> None:
        self.selector = selector
        self.margin = margin
        self.mode: Mode = "speculate"
        depth = selector.cost.block_size - 1
        # float32 [rows, blocks, D-1]: survivals that a row's request has shown, the latest ones.
        self._memory = np.zeros((_MEMORY_ROWS, _REMEMBERED_BLOCKS, depth), dtype=np.float32)
        self._row: dict[Hashable, int] = {}
        self._key: list[Hashable | None] = [None] * _MEMORY_ROWS
        self._drafted_at = np.full(_MEMORY_ROWS, -1, dtype=np.int64)
        self._num_observed = 0
        self._steps_since_look = 0

    def plan(self, requests: Sequence[Hashable], context: float) -> Plan:
        """Plan the next step of this batch.

        Args:
            requests: a key per request, the same over its lifetime.
            context: mean committed tokens per request.
        """
        bs = len(requests)
        everyone = np.arange(bs)
        plain = bs / float(self.selector.cost.verify(bs, bs, context))
        if not self._num_observed:
            # Nothing is known of anybody: speculating is how to find out.
            return Plan("speculate", everyone, math.nan, plain)
        # One dictionary look-up per request; what follows is array work.
        rows = np.array([self._row.get(request, -1) for request in requests], dtype=np.int64)
        expected = self._expected_tokens_per_ms(rows, context)
        advantage = 1 + self.margin
        if self.mode == "speculate" and plain > advantage * expected:
            self.mode, self._steps_since_look = "plain", 0
        elif self.mode == "plain" and expected > advantage * plain:
            self.mode = "speculate"
        if self.mode == "speculate":
            return Plan("speculate", everyone, expected, plain)
        self._steps_since_look += 1
        if self._steps_since_look >= self._look_interval(rows, context):
            self._steps_since_look = 0
            return Plan("relook", self._whom_to_look_at(rows), expected, plain)
        return Plan("plain", everyone[:0], expected, plain)

    def observe(self, requests: Sequence[Hashable], survival: Float32Array) -> None:
        """Remember the survivals float32 [n, D-1] of the ``n`` requests that were drafted for."""
        self._num_observed += 1
        rows = np.array([self._row_for(request) for request in requests], dtype=np.int64)
        self._memory[rows] = np.roll(self._memory[rows], 1, axis=1)
        self._memory[rows, 0] = survival

    def _row_for(self, request: Hashable) -> int:
        row = self._row.get(request)
        if row is None:
            row = int(np.argmin(self._drafted_at))
            if (former := self._key[row]) is not None:
                del self._row[former]
            self._row[request], self._key[row] = row, request
            # A row's first block stands for all of them; ``observe`` writes it over the first.
            self._memory[row] = np.nan
        self._drafted_at[row] = self._num_observed
        return row

    def _expected_tokens_per_ms(self, rows: IntArray, context: float) -> float:
        bs = len(rows)
        known = np.argsort(-self._drafted_at, kind="stable")[: len(self._row)]
        # A stranger is taken for one of those drafted for last, each for another one.
        strangers = np.flatnonzero(rows < 0)
        rows = rows.copy()
        rows[strangers] = known[strangers % len(known)]
        blocks = self._memory[rows]  # [bs, blocks, D-1]
        blocks = np.where(np.isnan(blocks), blocks[:, :1], blocks)
        ranked = -np.sort(-blocks.transpose(1, 0, 2).reshape(_REMEMBERED_BLOCKS, -1), axis=1)
        expected = np.zeros((_REMEMBERED_BLOCKS, ranked.shape[1] + 1))
        np.cumsum(ranked, axis=1, out=expected[:, 1:])
        rates = self.selector.best_tokens_per_ms(
            expected[:, self.selector.candidates(bs)], bs, context
        )
        return float(rates.mean())

    def _look_interval(self, rows: IntArray, context: float) -> int:
        """Plain steps between two looks: rare enough for the time share, four times as often
        while most of the batch is unknown."""
        bs, cost = len(rows), self.selector.cost
        look_ms = cost.draft(min(_RELOOK_REQUESTS, bs), context)
        plain_ms = float(cost.verify(bs, bs, context))
        interval = math.ceil(look_ms / (_RELOOK_TIME_SHARE * plain_ms))
        return max(1, interval // 4 if 2 * (rows < 0).sum() > bs else interval)

    def _whom_to_look_at(self, rows: IntArray) -> IntArray:
        """Those never drafted for first, then those drafted for longest ago."""
        drafted_at = np.where(rows < 0, -1, self._drafted_at[rows])
        return np.sort(np.argsort(drafted_at, kind="stable")[:_RELOOK_REQUESTS])
