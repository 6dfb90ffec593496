"""Choose how many drafts of the batch to verify: expected tokens over measured cost.

With the drafts ranked by survival, keeping K of them is expected to emit

    E(K) = bs + sum of the K best survivals          tokens, in
    C(K) = draft_ms + verify_ms(bs, bs + K, context) ms,

and the selector takes the K of its candidates with the greatest E / C (D-Cut, "Objective").
The published numerator leaves out the bs anchors, which every step emits; that over-values
deep verification, and stays available as ``objective="paper"``.

Two limits may be set on top. ``max_token_ms`` leaves out every K at which the request with the
fewest expected tokens would wait longer than that for one of them, C(K) / E_min(K); where every
K would make it wait longer, the shortest wait is taken. ``min_drafts`` keeps the first so many
drafts of each request that was drafted for, however unlikely they are.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dcut_sglang.candidates import Candidates
from dcut_sglang.config import DCutConfig
from dcut_sglang.cost import BatchCosts, CostTable
from dcut_sglang.survival import RankedDrafts, num_kept_at_ratio, rank_drafts


@dataclass(frozen=True)
class Decision:
    """One step's choice.

    Attributes:
        num_kept: K, drafts kept over the whole batch.
        num_rows: bs + K, tokens that the target sees.
        expected_tokens: E(K), anchors counted.
        predicted_ms: C(K), draft included.
        candidates: everything that was weighed, for the trace; None where nothing was.
    """

    num_kept: int
    num_rows: int
    expected_tokens: float
    predicted_ms: float
    candidates: Candidates | None = field(default=None, compare=False, repr=False)


class Selector:
    """Candidates and utility for one cost table; stateless between steps.

    Args:
        cost: measured costs.
        config: buckets and objective.
        tiers: token totals that the host can run, ascending (captured CUDA graphs); None: any.
            A candidate runs at the smallest tier that holds it and is filled up to it, since
            those rows are paid for.
    """

    def __init__(
        self, cost: CostTable, config: DCutConfig, tiers: Sequence[int] | None = None
    ) -> None:
        self.cost = cost
        self.config = config
        self.tiers = None if tiers is None else sorted(tiers)
        self._candidates: dict[int, npt.NDArray[np.int64]] = {}

    @property
    def is_free(self) -> bool:
        """Whether any number of drafts can be kept: no buckets, no tiers."""
        return not self.config.keep_ratios and self.tiers is None

    def candidates(self, bs: int) -> npt.NDArray[np.int64]:
        """The numbers of drafts K that may be kept, ascending, distinct, read-only: int64 [n]."""
        if bs not in self._candidates:
            num_drafts = bs * (self.cost.block_size - 1)
            if self.config.keep_ratios:
                wanted = {
                    num_kept_at_ratio(ratio, bs, self.cost.block_size)
                    for ratio in self.config.keep_ratios
                }
            else:
                wanted = set(range(num_drafts + 1))
            filled = {self._fill(bs, kept, num_drafts) for kept in wanted}
            self._candidates[bs] = np.array(sorted(filled), dtype=np.int64)
            self._candidates[bs].flags.writeable = False
        return self._candidates[bs]

    def candidates_up_to(
        self, bs: int, num_drafts: int, num_first: int = 0
    ) -> npt.NDArray[np.int64]:
        """The candidates when only ``num_drafts`` of the batch's drafts were computed, of which
        ``num_first`` have to be kept; buckets beyond become one that keeps just those."""
        whole = self.candidates(bs)
        inside = whole[(whole >= num_first) & (whole <= num_drafts)]
        if not self.config.keep_ratios or num_drafts in inside:
            return inside
        return np.append(inside, num_drafts)

    def _fill(self, bs: int, num_kept: int, num_drafts: int) -> int:
        if self.tiers is None:
            return num_kept
        place = bisect.bisect_left(self.tiers, bs + num_kept)
        if place == len(self.tiers):
            return num_kept  # beyond the largest tier: the host runs it eagerly, unpadded
        return min(num_drafts, self.tiers[place] - bs)

    def decide(
        self,
        survival: torch.Tensor,
        depths: npt.NDArray[np.int64],
        costs: BatchCosts,
        draft_ms: float,
    ) -> tuple[RankedDrafts, Decision]:
        """Rank the drafts of a step and choose how many to keep.

        Args:
            survival: float32 [bs, D-1] on the host, 0 where none was computed.
            depths: int64 [bs], drafts computed of each request.
            costs: of this batch.
            draft_ms: what drafting cost in this step.
        """
        floors = None
        if self.config.min_drafts:
            floors = torch.from_numpy(np.minimum(depths, self.config.min_drafts))
        ranked = rank_drafts(survival, floors)
        kept = self.candidates_up_to(costs.bs, int(depths.sum()), ranked.num_first)
        slowest = None
        if self.config.max_token_ms is not None:
            slowest = ranked.slowest_tokens().numpy()[kept]
        gains = ranked.expected_accepted.numpy()[kept]
        return ranked, self.choose(gains, costs, kept, draft_ms, slowest)

    def plain(self, costs: BatchCosts, overhead_ms: float) -> Decision:
        """The decision of a step in which nothing was drafted."""
        bs, step_ms = costs.bs, overhead_ms + costs.plain_ms
        only = Candidates(np.array([0]), np.array([float(bs)]), np.array([step_ms]))
        return Decision(0, bs, float(bs), step_ms, only)

    def choose(
        self,
        expected_accepted: npt.ArrayLike,
        costs: BatchCosts,
        kept: npt.NDArray[np.int64] | None = None,
        draft_ms: float | None = None,
        slowest_tokens: npt.ArrayLike | None = None,
    ) -> Decision:
        """Choose K.

        Args:
            expected_accepted: float [n], sum of the K best survivals at each candidate.
            costs: of this batch.
            kept: int64 [n], the candidates, ascending; ``candidates(bs)`` by default.
            draft_ms: what drafting cost in this step; that of whole blocks for everybody by
                default.
            slowest_tokens: float [n], what the request with the fewest is expected to emit at
                each candidate; needed where ``max_token_ms`` is set.

        Returns:
            the decision; of equal utilities the one with fewer rows.

        Raises:
            ValueError: ``expected_accepted`` has another shape, or ``slowest_tokens`` is missing.
        """
        bs = costs.bs
        if kept is None:
            kept = self.candidates(bs)
        accepted = np.asarray(expected_accepted, dtype=np.float64)
        if accepted.shape != kept.shape:
            raise ValueError(f"expected {kept.size} gains, got shape {accepted.shape}")
        if draft_ms is None:
            rows = bs * (self.cost.block_size - 1)
            draft_ms = float(costs.draft_forward(bs) + costs.head(rows))
        predicted_ms = draft_ms + costs.verify(bs + kept)
        gain = accepted if self.config.objective == "paper" else bs + accepted
        utility = gain / predicted_ms
        best = int(np.argmax(utility))
        if (cap_ms := self.config.max_token_ms) is not None:
            if slowest_tokens is None:
                raise ValueError("max_token_ms is set: slowest_tokens is needed to keep to it")
            token_ms = predicted_ms / np.asarray(slowest_tokens, dtype=np.float64)
            keeps_to_it = token_ms <= cap_ms
            best = int(
                np.argmax(np.where(keeps_to_it, utility, -1.0))
                if keeps_to_it.any()
                else np.argmin(token_ms)
            )
        return Decision(
            num_kept=int(kept[best]),
            num_rows=bs + int(kept[best]),
            expected_tokens=float(bs + accepted[best]),
            predicted_ms=float(predicted_ms[best]),
            candidates=Candidates(kept, bs + accepted, predicted_ms),
        )
