"""What a step costs: measured milliseconds by batch size, keep ratio and context length.

The verify and the draft are kept apart, because a plain step pays only the former:

    C(bs, tokens, context) = verify_ms(bs, tokens, context) [+ draft_ms(bs, context)]

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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMAT = "dcut-cost-table"
FORMAT_VERSION = 1

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
        draft_ms: [B, X], draft forward and draft head at full depth.
        fingerprint: the conditions of the measurement; see ``require_fingerprint``.
    """

    block_size: int
    batch_sizes: tuple[int, ...]
    keep_ratios: tuple[float, ...]
    contexts: tuple[int, ...]
    verify_ms: FloatArray
    draft_ms: FloatArray
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.batch_sizes), len(self.keep_ratios), len(self.contexts))
        if self.block_size < 2:
            raise CostTableError(f"block_size must be at least 2, got {self.block_size}")
        for name, least in (("batch_sizes", 1), ("keep_ratios", 0), ("contexts", 0)):
            axis = getattr(self, name)
            ascending = all(a < b for a, b in itertools.pairwise(axis))  # False with a NaN
            if not axis or not ascending or not axis[0] >= least:
                raise CostTableError(
                    f"{name} must be ascending, from {least} on, and not empty, got {axis}"
                )
        if self.keep_ratios[0] != 0 or self.keep_ratios[-1] != 1:
            raise CostTableError(f"keep_ratios must go from 0 to 1, got {self.keep_ratios}")
        for name, want in (("verify_ms", shape), ("draft_ms", (shape[0], shape[2]))):
            cells = getattr(self, name)
            if cells.shape != want:
                raise CostTableError(f"{name} must have shape {want}, got {cells.shape}")
            if not np.isfinite(cells).all() or (cells < 0).any():
                raise CostTableError(f"{name} must hold finite milliseconds >= 0")
        if (self.verify_ms <= 0).any():
            raise CostTableError("verify_ms must be > 0: no step is free")

    def verify(self, bs: int, tokens: npt.ArrayLike, context: float) -> FloatArray:
        """Verify milliseconds of ``tokens`` rows over ``bs`` requests.

        Args:
            tokens: scalar or array; bs .. bs * D, clamped to that.
            context: mean committed tokens per request.

        Returns:
            float64 of the shape of ``tokens``.
        """
        ratio = (np.asarray(tokens, dtype=np.float64) - bs) / (bs * (self.block_size - 1))
        by_ratio_and_context = _at(self.batch_sizes, self.verify_ms, bs)
        by_ratio = _at(self.contexts, by_ratio_and_context.T, context)
        if not self._covers(bs, context):
            # The lines of two ratios may cross out there: noise grows with the distance.
            by_ratio = np.maximum.accumulate(by_ratio)
        return np.interp(ratio, self.keep_ratios, by_ratio)

    def _covers(self, bs: int, context: float) -> bool:
        return (
            self.batch_sizes[0] <= bs <= self.batch_sizes[-1]
            and self.contexts[0] <= context <= self.contexts[-1]
        )

    def draft(self, bs: int, context: float) -> float:
        """Draft milliseconds (forward and head) over ``bs`` requests."""
        return float(_at(self.contexts, _at(self.batch_sizes, self.draft_ms, bs), context))

    def monotone(self) -> CostTable:
        """The table raised to its monotone envelope: more requests, rows or context never cost
        less, whatever the noise of the measurement says."""
        verify_ms = self.verify_ms
        for axis in range(3):
            verify_ms = np.maximum.accumulate(verify_ms, axis=axis)
        draft_ms = self.draft_ms
        for axis in range(2):
            draft_ms = np.maximum.accumulate(draft_ms, axis=axis)
        return replace(self, verify_ms=verify_ms, draft_ms=draft_ms)

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


def _entry(fingerprint: Mapping[str, Any], key: str) -> str:
    return repr(fingerprint[key]) if key in fingerprint else "has no such entry"


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise CostTableError(f"damaged cost table: expected a whole number, got {value!r}")
    return value


def _at(axis: tuple[int, ...], cells: FloatArray, value: float) -> FloatArray:
    """``cells`` interpolated along their first dimension, whose grid is ``axis``.

    Outside the grid the last two points are extended, at least at a tenth of the nearest
    cell, so that a steep fit cannot turn a cost negative.
    """
    if len(axis) == 1:
        return cells[0]
    high = int(np.clip(np.searchsorted(axis, value), 1, len(axis) - 1))
    weight = (value - axis[high - 1]) / (axis[high] - axis[high - 1])
    nearest = cells[high - 1] if weight < 0.5 else cells[high]
    return np.maximum((1 - weight) * cells[high - 1] + weight * cells[high], 0.1 * nearest)
