"""The drafter's keys and values of verified rows, written before anybody drafts.

They are a projection of the target's hidden states. In a run of plain steps nobody reads them, and
projecting the rows of several steps at once costs a fraction of projecting them one by one, so
rows of steps that verify no draft wait. They are written before a step that drafts, and before
anything but a decode step.

Until then a request may end, and another one of the batch may be given a slot of it. A row of the
new owner that waits as well stands behind the old one's, and a step that drafts, or verifies
drafts, writes what waits first: the new owner's row is written last. The rows of a request that has
ended are written all the same, since the prefix cache may hand its slots to a later request.
"""

from __future__ import annotations

from typing import Any

import torch

from dcut_sglang.host.window import BlockWindow, PackedRows

_MOST_WAITING = 256


class DraftKV:
    """Writes rows of one worker's drafter."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._hidden: list[torch.Tensor] = []
        self._slots: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []

    def commit(self, window: BlockWindow, rows: PackedRows, hidden: torch.Tensor) -> None:
        """Take the rows of a step. No host sync.

        Rows behind the accepted ones are written too: their slots lie past the committed length,
        where nothing reads before the next step writes them again. So no row has to be picked out
        by a length that only the device knows.

        Args:
            hidden: [rows, features], the target layers that the drafter reads.
        """
        is_plain = rows.num_rows == window.bs
        # A captured graph writes its output to the same place at every replay.
        self._hidden.append(hidden.clone() if is_plain else hidden)
        self._slots.append(
            window.plan.write_ids(
                self._worker.draft_model_runner.kv_index_translator, cols=rows.index
            )
        )
        self._positions.append(rows.positions)
        if not is_plain or rows.num_rows * len(self._hidden) >= _MOST_WAITING:
            self.settle()

    def settle(self) -> None:
        """Write the rows that wait. No host sync."""
        if not self._hidden:
            return
        hidden, slots, positions = (
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in (self._hidden, self._slots, self._positions)
        )
        self.forget()
        self._worker._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden, cache_loc=slots, positions=positions
        )

    def forget(self) -> None:
        """Drop the rows that wait: those of the probe are nobody's."""
        self._hidden, self._slots, self._positions = [], [], []
