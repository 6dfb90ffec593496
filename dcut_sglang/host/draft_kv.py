"""The drafter's keys and values of verified rows, written before anybody drafts.

They are a projection of the target's hidden states. In a run of plain steps nobody reads them, and
projecting the rows of several steps at once costs a fraction of projecting them one by one, so
rows of steps that verify no draft wait, and so do those of a short prefill (a prompt that the
prefix cache knows has one row). They are written before a step that drafts, and before a longer
prefill.

Until then a request may end, and another one may be given a slot of it. A row of the new owner
that waits as well stands behind the old one's, which is then not written (``superseded``); a step
that drafts, or verifies drafts, writes what waits first. The rows of a request that has ended are
written otherwise, since the prefix cache may hand its slots to a later request.
"""

from __future__ import annotations

from typing import Any

import torch

from dcut_sglang.host.window import BlockWindow, PackedRows

_MOST_WAITING = 256
_SHORT_PREFILL = 16
# Where SGLang's pools take what padded rows write: nobody reads it.
PADDING_SLOT = 0


def superseded(slots: torch.Tensor) -> torch.Tensor:
    """Which of the slots, int64 [n], occur again further behind: bool [n].

    Of several rows for one slot in one write, torch leaves open which one stays. No host sync.
    """
    return (slots[:, None] == slots).triu(1).any(dim=1)


class DraftKV:
    """Writes rows of one worker's drafter."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._hidden: list[torch.Tensor] = []
        self._slots: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []
        self._num_waiting = 0

    def commit(self, window: BlockWindow, rows: PackedRows, hidden: torch.Tensor) -> None:
        """Take the rows of a step. No host sync.

        Rows behind the accepted ones are written too: their slots lie past the committed length,
        where nothing reads before the next step writes them again. So no row has to be picked out
        by a length that only the device knows.

        Args:
            hidden: [rows, features], the target layers that the drafter reads.
        """
        slots = window.plan.write_ids(
            self._worker.draft_model_runner.kv_index_translator, cols=rows.index
        )
        # A captured graph writes its output to the same place at every replay.
        self._wait(hidden.clone() if rows.is_plain else hidden, slots, rows.positions)
        if not rows.is_plain:
            self.settle()

    def prefilled(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> bool:
        """Take the rows of a prefill, if they are few. No host sync.

        Of many rows, those that wait are written first and the caller writes the new ones.
        """
        if len(hidden) > _SHORT_PREFILL or len(hidden) != len(slots):
            self.settle()
            return False
        self._wait(hidden.clone(), slots, positions)
        return True

    def _wait(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        self._hidden.append(hidden)
        self._slots.append(slots)
        self._positions.append(positions)
        self._num_waiting += len(slots)
        if self._num_waiting >= _MOST_WAITING:
            self.settle()

    def settle(self) -> None:
        """Write the rows that wait. No host sync."""
        if not self._hidden:
            return
        hidden, slots, positions = (
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in (self._hidden, self._slots, self._positions)
        )
        if len(self._slots) > 1:
            slots = slots.masked_fill(superseded(slots), PADDING_SLOT)
        self.forget()
        self._worker.write_draft_kv(hidden, slots, positions)

    def forget(self) -> None:
        """Drop the rows that wait: those of the probe are nobody's."""
        self._hidden, self._slots, self._positions = [], [], []
        self._num_waiting = 0
