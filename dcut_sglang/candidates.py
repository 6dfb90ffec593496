"""The numbers of drafts that a step weighed, with what each was expected to yield and cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Candidates:
    """What the selector looked at in one step, ascending.

    Attributes:
        num_kept: int64 [n], K, drafts kept over the whole batch.
        expected_tokens: float64 [n], E(K), anchors counted.
        predicted_ms: float64 [n], C(K), draft included.
    """

    num_kept: npt.NDArray[np.int64]
    expected_tokens: npt.NDArray[np.float64]
    predicted_ms: npt.NDArray[np.float64]

    @property
    def tokens_per_ms(self) -> npt.NDArray[np.float64]:
        """float64 [n], the utility."""
        return self.expected_tokens / self.predicted_ms

    def thinned(self, most: int, *always: int) -> Candidates:
        """At most about ``most`` of them, evenly spread; the best, those next to it and the
        numbers of drafts in ``always`` stay."""
        n = len(self.num_kept)
        if n <= most:
            return self
        spread = np.round(np.linspace(0, n - 1, most)).astype(np.int64)
        best = int(np.argmax(self.tokens_per_ms)) + np.arange(-2, 3)
        wanted = np.flatnonzero(np.isin(self.num_kept, always))
        places = np.unique(np.concatenate([spread, best[(best >= 0) & (best < n)], wanted]))
        return Candidates(
            self.num_kept[places], self.expected_tokens[places], self.predicted_ms[places]
        )
