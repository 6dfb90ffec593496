"""Which packed rows belong to which request, known on the host."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch


class RowTable:
    """Rows of each request in a packed verify. One host sync, at construction.

    Only steps in which a request asks for more than an argmax build one, and before the verify
    is launched, so that the device is waited for while it has only drafted.

    Attributes:
        lens: verify length of each request.
        starts: first packed row of each request.
    """

    def __init__(self, verify_lens: torch.Tensor) -> None:
        self.lens: list[int] = verify_lens.tolist()
        self.starts = list(accumulate(self.lens, initial=0))[:-1]
        self._device = verify_lens.device

    def of(self, places: Iterable[int]) -> torch.Tensor:
        """Packed rows of these requests, in their order: int64 [rows] on the device."""
        rows = [r for i in places for r in range(self.starts[i], self.starts[i] + self.lens[i])]
        return torch.tensor(rows, dtype=torch.int64).to(self._device, non_blocking=True)

    def at_depth(self, places: Iterable[int], depth: int) -> tuple[list[int], torch.Tensor]:
        """Those of the requests that verify the row at ``depth``, and these rows."""
        deep = [i for i in places if self.lens[i] > depth]
        rows = torch.tensor([self.starts[i] + depth for i in deep], dtype=torch.int64)
        return deep, rows.to(self._device, non_blocking=True)
