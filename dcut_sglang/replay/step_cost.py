"""Costs of many steps at once: a ``CostTable`` at one batch size, over arrays of contexts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dcut_sglang.cost import CostTable

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class StepCost:
    """What the steps of ``bs`` requests cost; agrees with ``CostTable`` cell by cell.

    Interpolation along the keep ratio is linear in the cells, so the costs of every number of
    kept drafts are one matrix product.

    Args:
        table: measured costs.
        bs: requests of the batch.
    """

    def __init__(self, table: CostTable, bs: int) -> None:
        self.bs = bs
        self.max_depth = table.block_size - 1
        self.table = table
        self._contexts = np.asarray(table.contexts, dtype=np.float64)
        self._bs_measured = table.batch_sizes[0] <= bs <= table.batch_sizes[-1]
        self._sizes = sizes = np.asarray(table.batch_sizes, dtype=np.float64)
        at_bs = np.array([float(bs)])
        self._verify_ms = _interpolate(sizes, table.verify_ms, at_bs)[0].T  # [X, R]
        # float64 [R, bs * (D-1) + 1]: weight of each measured ratio in each number of drafts.
        ratio = np.arange(bs * self.max_depth + 1) / (bs * self.max_depth)
        self._weights = np.stack(
            [np.interp(ratio, table.keep_ratios, unit) for unit in np.eye(len(table.keep_ratios))]
        )

    def verify(self, context: FloatArray, num_kept: IntArray | None = None) -> FloatArray:
        """Verify milliseconds.

        Args:
            context: float [W], mean committed tokens per request.
            num_kept: int [C], kept drafts; None: every number, 0 .. bs * (D-1).

        Returns:
            float64 [W, C].
        """
        weights = self._weights if num_kept is None else self._weights[:, num_kept]
        return self._by_ratio(context) @ weights

    def verify_each(self, context: FloatArray, num_kept: IntArray) -> FloatArray:
        """Verify milliseconds float64 [W] of ``num_kept`` [W] drafts, step by step."""
        return np.einsum("wr,rw->w", self._by_ratio(context), self._weights[:, num_kept])

    def _by_ratio(self, context: FloatArray) -> FloatArray:
        """float64 [W, R]; outside the measured grid more rows never cost less, as in
        ``CostTable.verify``."""
        cells = _interpolate(self._contexts, self._verify_ms, context)
        if self._bs_measured:
            outside = (context < self._contexts[0]) | (context > self._contexts[-1])
        else:
            outside = np.ones(len(cells), dtype=bool)
        return np.where(outside[:, None], np.maximum.accumulate(cells, axis=1), cells)

    def draft(self, context: FloatArray, depth: IntArray | int | None = None) -> FloatArray:
        """Milliseconds float64 [W] of drafting for everybody: a forward over whole blocks, and
        the head over the first ``depth`` drafts of each (None: all) at once."""
        by_size = _interpolate(self._contexts, self.table.draft_ms.T, context)  # [W, B]
        forward = _interpolate(self._sizes, by_size.T, np.array([float(self.bs)]))[0]
        depth = self.max_depth if depth is None else np.asarray(depth)
        return forward + self.table.head(self.bs * depth)


def _interpolate(axis: FloatArray, cells: FloatArray, values: FloatArray) -> FloatArray:
    """``cells`` [X, ...] at ``values`` [W] -> [W, ...], extended beyond the axis by the rule of
    ``CostTable``: linearly, at no less than a tenth of the nearest cell."""
    if len(axis) == 1:
        return np.broadcast_to(cells[0], (len(values), *cells.shape[1:]))
    high = np.clip(np.searchsorted(axis, values), 1, len(axis) - 1)
    weight = (values - axis[high - 1]) / (axis[high] - axis[high - 1])
    weight = weight.reshape(-1, *[1] * (cells.ndim - 1))
    nearest = np.where(weight < 0.5, cells[high - 1], cells[high])
    return np.maximum((1 - weight) * cells[high - 1] + weight * cells[high], 0.1 * nearest)
