"""Linear interpolation on the grids of a cost table."""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Axis = tuple[int, ...] | tuple[float, ...]


def along(axis: Axis, cells: FloatArray, values: npt.ArrayLike) -> FloatArray:
    """``cells`` [n] on the grid ``axis``, at ``values``; extended as by ``at``."""
    values = np.asarray(values, dtype=np.float64)
    if len(axis) == 1:
        return np.broadcast_to(cells[0], values.shape)
    out = np.interp(values, axis, cells)
    if values.size and (values.max() > axis[-1] or values.min() < axis[0]):
        for end, near in ((0, 1), (-1, -2)):
            slope = (cells[end] - cells[near]) / (axis[end] - axis[near])
            beyond = values < axis[0] if end == 0 else values > axis[-1]
            line = cells[end] + (values - axis[end]) * slope
            out = np.where(beyond, np.maximum(line, 0.1 * cells[end]), out)
    return out


def at(axis: Axis, cells: FloatArray, value: float) -> FloatArray:
    """``cells`` interpolated along their first dimension, whose grid is ``axis``.

    Outside the grid the last two points are extended, at least at a tenth of the nearest
    cell, so that a steep fit cannot turn a cost negative.
    """
    if len(axis) == 1:
        return cells[0]
    high = min(max(bisect.bisect_left(axis, value), 1), len(axis) - 1)
    weight = (value - axis[high - 1]) / (axis[high] - axis[high - 1])
    nearest = cells[high - 1] if weight < 0.5 else cells[high]
    return np.maximum((1 - weight) * cells[high - 1] + weight * cells[high], 0.1 * nearest)


def weights(axis: Axis, value: float) -> FloatArray:
    """Interpolation weights of ``value`` on the grid ``axis``; the nearest cell outside of it."""
    out = np.zeros(len(axis))
    high = bisect.bisect_left(axis, value)
    if high in (0, len(axis)):
        out[min(high, len(axis) - 1)] = 1.0
        return out
    part = (value - axis[high - 1]) / (axis[high] - axis[high - 1])
    out[high - 1], out[high] = 1.0 - part, part
    return out
