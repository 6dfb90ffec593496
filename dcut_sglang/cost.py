"""What a step costs: measured milliseconds by batch size, keep ratio and context length.

The verify and the draft are kept apart, because a plain step pays only the former:

    C = verify_ms(bs, tokens, context) [+ draft_ms(n, context) + sum of head_ms(rows) over stages]

for a step that drafts for n of its bs requests. The draft's forward and the target's head over
its rows are kept apart too: the forward comes in whole blocks, the head is only needed for the
drafts whose tokens are wanted, and on a CPU it is most of what drafting costs.

Cells lie on a grid of batch sizes, keep ratios (share of the bs * (D-1) drafts that is kept;
0 is a step of bs anchors alone) and mean context lengths; between them the cost is linear in
each. Context is an axis because attention is not negligible: on a CPU, a step of 32 requests
costs 55 % more at 200 tokens of context than at 75.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dcut_sglang import grid

FORMAT = "dcut-cost-table"
FORMAT_VERSION = 2

FloatArray = npt.NDArray[np.float64]


class CostTableError(ValueError):
    """A cost table that cannot be read, or was measured under other conditions."""


@dataclass(frozen=True, eq=False)
class CostTable:
    """Step costs on a grid.

    Attributes:
        block_size: D of the measured steps.
        batch_sizes: ascending, [B].
        keep_ratios: ascending, from 0 to 1, [R].
        contexts: mean committed tokens per request, ascending, [X].
        verify_ms: [B, R, X], target forward, acceptance and KV commit.
        draft_ms: [B, X], draft forward over whole blocks, without the head.
        fingerprint: the conditions of the measurement; see ``require_fingerprint``.
        head_rows: drafts whose tokens and confidences are computed at a time, ascending, [H].
        head_ms: [H], what that costs; 0 where ``draft_ms`` holds it.
        short_blocks: block sizes below D that the drafter was trained for too, ascending, [S].
        short_draft_ms: [S, B, X], draft forward over blocks of these sizes.
    """

    block_size: int
    batch_sizes: tuple[int, ...]
    keep_ratios: tuple[float, ...]
    contexts: tuple[int, ...]
    verify_ms: FloatArray
    draft_ms: FloatArray
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    head_rows: tuple[int, ...] = (1,)
    head_ms: FloatArray = field(default_factory=lambda: np.zeros(1))
    short_blocks: tuple[int, ...] = ()
    short_draft_ms: FloatArray = field(default_factory=lambda: np.zeros((0, 0, 0)))

    def __post_init__(self) -> None:
        shape = (len(self.batch_sizes), len(self.keep_ratios), len(self.contexts))
        if self.block_size < 2:
            raise CostTableError(f"block_size must be at least 2, got {self.block_size}")
        least_values = {"batch_sizes": 1, "keep_ratios": 0, "contexts": 0, "head_rows": 1}
        for name, least in least_values.items():
            axis = getattr(self, name)
            ascending = all(a < b for a, b in itertools.pairwise(axis))  # False with a NaN
            if not axis or not ascending or not axis[0] >= least:
                raise CostTableError(
                    f"{name} must be ascending, from {least} on, and not empty, got {axis}"
                )
        if self.keep_ratios[0] != 0 or self.keep_ratios[-1] != 1:
            raise CostTableError(f"keep_ratios must go from 0 to 1, got {self.keep_ratios}")
        shapes = {
            "verify_ms": shape,
            "draft_ms": (shape[0], shape[2]),
            "head_ms": (len(self.head_rows),),
        }
        if self.short_blocks:
            shapes["short_draft_ms"] = (len(self.short_blocks), shape[0], shape[2])
        sizes = (1, *self.short_blocks, self.block_size)
        if not all(a < b for a, b in itertools.pairwise(sizes)):
            raise CostTableError(
                f"short_blocks must ascend between 2 and {self.block_size - 1}, "
                f"got {self.short_blocks}"
            )
        for name, want in shapes.items():
            cells = getattr(self, name)
            if cells.shape != want:
                raise CostTableError(f"{name} must have shape {want}, got {cells.shape}")
            if not np.isfinite(cells).all() or (cells < 0).any():
                raise CostTableError(f"{name} must hold finite milliseconds >= 0")
        if (self.verify_ms <= 0).any():
            raise CostTableError("verify_ms must be > 0: no step is free")

    def at(self, bs: int, context: float) -> BatchCosts:
        """The costs of one batch, between cells and beyond them.

        Args:
            bs: requests of the batch.
            context: mean committed tokens per request.
        """
        by_ratio_and_context = grid.at(self.batch_sizes, self.verify_ms, bs)
        by_ratio = grid.at(self.contexts, by_ratio_and_context.T, context)
        if not self._covers(bs, context):
            # The lines of two ratios may cross out there: noise grows with the distance.
            by_ratio = np.maximum.accumulate(by_ratio)
        forward_ms = {self.block_size: grid.at(self.contexts, self.draft_ms.T, context)}
        for size, short_ms in zip(self.short_blocks, self.short_draft_ms, strict=True):
            forward_ms[size] = grid.at(self.contexts, short_ms.T, context)
        return BatchCosts(self, bs, by_ratio, forward_ms)

    def verify(self, bs: int, tokens: npt.ArrayLike, context: float) -> FloatArray:
        """Verify milliseconds of ``tokens`` rows; see ``BatchCosts.verify``."""
        return self.at(bs, context).verify(tokens)

    def draft_forward(
        self, num_requests: npt.ArrayLike, context: float, block_size: int | None = None
    ) -> FloatArray:
        """Milliseconds of the draft forward; see ``BatchCosts.draft_forward``."""
        return self.at(1, context).draft_forward(num_requests, block_size)

    def _covers(self, bs: int, context: float) -> bool:
        return (
            self.batch_sizes[0] <= bs <= self.batch_sizes[-1]
            and self.contexts[0] <= context <= self.contexts[-1]
        )

    def head(self, rows: npt.ArrayLike) -> FloatArray:
        """Milliseconds of tokens and confidences of ``rows`` drafts at once; 0 rows are free."""
        rows = np.asarray(rows, dtype=np.float64)
        return np.where(rows > 0, grid.along(self.head_rows, self.head_ms, rows), 0.0)

    def draft(self, num_requests: int, context: float) -> float:
        """Milliseconds of drafting whole blocks: forward, and head over every draft at once."""
        rows = num_requests * (self.block_size - 1)
        return float(self.draft_forward(num_requests, context) + self.head(rows))

    def monotone(self) -> CostTable:
        """The table raised to its monotone envelope: more requests, rows or context never cost
        less, whatever the noise of the measurement says."""
        verify_ms = self.verify_ms
        for axis in range(3):
            verify_ms = np.maximum.accumulate(verify_ms, axis=axis)
        draft_ms = self.draft_ms
        for axis in range(2):
            draft_ms = np.maximum.accumulate(draft_ms, axis=axis)
        head_ms = np.maximum.accumulate(self.head_ms)
        short_draft_ms = self.short_draft_ms
        for axis in range(1, 3):
            short_draft_ms = np.maximum.accumulate(short_draft_ms, axis=axis)
        return replace(
            self,
            verify_ms=verify_ms,
            draft_ms=draft_ms,
            head_ms=head_ms,
            short_draft_ms=short_draft_ms,
        )

    def resampled(self, batch_sizes: tuple[int, ...], keep_ratios: tuple[float, ...]) -> CostTable:
        """The same costs on another grid, between this one's cells and beyond them."""
        depth = self.block_size - 1
        ratios = np.array(keep_ratios)
        verify_ms = np.array(
            [
                [self.verify(bs, bs + ratios * bs * depth, x) for x in self.contexts]
                for bs in batch_sizes
            ]
        ).transpose(0, 2, 1)
        draft_ms = [
            np.array([self.draft_forward(batch_sizes, x, size) for x in self.contexts]).T
            for size in (*self.short_blocks, self.block_size)
        ]
        return replace(
            self,
            batch_sizes=batch_sizes,
            keep_ratios=keep_ratios,
            verify_ms=verify_ms,
            draft_ms=draft_ms[-1],
            short_draft_ms=np.array(draft_ms[:-1]) if self.short_blocks else self.short_draft_ms,
        )

    def require_fingerprint(self, expected: Mapping[str, Any]) -> None:
        """Refuse a table that was measured under other conditions.

        Raises:
            CostTableError: every condition that differs, with both values.
        """
        table, here = (json.loads(json.dumps(dict(f))) for f in (self.fingerprint, expected))
        differing = [
            f"{key}: table {_entry(table, key)}, here {_entry(here, key)}"
            for key in sorted({*table, *here})
            if key not in table or key not in here or table[key] != here[key]
        ]
        if differing:
            raise CostTableError(
                "the cost table was measured under other conditions: " + "; ".join(differing)
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``from_json`` reads it; milliseconds to four decimals."""
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "fingerprint": dict(self.fingerprint),
            "block_size": self.block_size,
            "batch_sizes": list(self.batch_sizes),
            "keep_ratios": list(self.keep_ratios),
            "contexts": list(self.contexts),
            "verify_ms": np.round(self.verify_ms, 4).tolist(),
            "draft_ms": np.round(self.draft_ms, 4).tolist(),
            "head_rows": list(self.head_rows),
            "head_ms": np.round(self.head_ms, 4).tolist(),
            "short_blocks": list(self.short_blocks),
            "short_draft_ms": np.round(self.short_draft_ms, 4).tolist(),
        }

    @classmethod
    def from_json(cls, data: Any) -> CostTable:
        """Read plain data.

        Raises:
            CostTableError: not a cost table, of another version, or inconsistent.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CostTableError("not a DCUT cost table")
        if data.get("version") != FORMAT_VERSION:
            raise CostTableError(
                f"cost table version {data.get('version')!r}, this dcut_sglang reads "
                f"{FORMAT_VERSION}; measure it again"
            )
        try:
            return cls(
                _whole(data["block_size"]),
                tuple(_whole(n) for n in data["batch_sizes"]),
                tuple(float(r) for r in data["keep_ratios"]),
                tuple(_whole(n) for n in data["contexts"]),
                np.asarray(data["verify_ms"], dtype=np.float64),
                np.asarray(data["draft_ms"], dtype=np.float64),
                dict(data["fingerprint"]),
                tuple(_whole(n) for n in data["head_rows"]),
                np.asarray(data["head_ms"], dtype=np.float64),
                tuple(_whole(n) for n in data["short_blocks"]),
                np.asarray(data["short_draft_ms"] or np.zeros((0, 0, 0)), dtype=np.float64),
            )
        except CostTableError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise CostTableError(f"damaged cost table: {error!r}") from error

    def save(self, path: Path) -> None:
        """Write the table as JSON; the file appears complete or not at all.

        Raises:
            OSError: it cannot be written (no space, no permission).
            TypeError: the fingerprint holds something that JSON cannot.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Read a table that ``save`` wrote.

        Raises:
            CostTableError: with the path and the reason.
        """
        try:
            return cls.from_json(json.loads(path.read_text()))
        except OSError as error:
            raise CostTableError(f"cannot read the cost table {path}: {error}") from error
        except ValueError as error:  # truncated JSON, or CostTableError
            raise CostTableError(f"{path}: {error}") from error


@dataclass(frozen=True, eq=False)
class BatchCosts:
    """A table's costs at one batch size and mean context; see ``CostTable.at``."""

    table: CostTable
    bs: int
    by_ratio_ms: FloatArray
    forward_ms: Mapping[int, FloatArray]

    @cached_property
    def plain_ms(self) -> float:
        """Verify milliseconds of a plain step: one row per request."""
        return float(self.verify(self.bs))

    def verify(self, tokens: npt.ArrayLike) -> FloatArray:
        """Verify milliseconds of ``tokens`` rows, bs .. bs * D (clamped to that), scalar or
        array; float64 of the same shape."""
        drafts = np.asarray(tokens, dtype=np.float64) - self.bs
        ratio = drafts / (self.bs * (self.table.block_size - 1))
        return np.interp(ratio, self.table.keep_ratios, self.by_ratio_ms)

    def draft_forward(
        self, num_requests: npt.ArrayLike, block_size: int | None = None
    ) -> FloatArray:
        """Milliseconds of the draft forward over ``num_requests`` >= 1, scalar or array, in
        blocks of one of the table's sizes; D by default."""
        forward_ms = self.forward_ms[block_size or self.table.block_size]
        return grid.along(self.table.batch_sizes, forward_ms, num_requests)

    def head(self, rows: npt.ArrayLike) -> FloatArray:
        """As ``CostTable.head``."""
        return self.table.head(rows)


def _entry(fingerprint: Mapping[str, Any], key: str) -> str:
    return repr(fingerprint[key]) if key in fingerprint else "has no such entry"


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise CostTableError(f"damaged cost table: expected a whole number, got {value!r}")
    return value
