"""What one step drafts, and at which prices that was planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dcut_sglang.cost import BatchCosts
from dcut_sglang.stages import Computed, Stages
from dcut_sglang.value import Float32Array, IntArray, Prices

Mode = Literal["speculate", "plain", "look", "forced"]


@dataclass(frozen=True)
class Plan:
    """What one step drafts.

    Attributes:
        mode: ``speculate`` (for those that pay), ``plain`` (for none) or ``look`` (only to find
            out), or ``forced``.
        drafted: int64, places in the batch of the requests to draft for, ascending.
        stages: how deep.
        block_size: of the draft forward, one of those that the costs know.
        costs, prices: what the plan was made at.
        context: mean committed tokens per request.
        overhead_ms: what a step spends outside of draft, head and verify.
        num_passes: forwards of the target that a plain step makes, one token per request each.
        is_followed: whether it was made for a plain step before this one. Such a step is planned
            for, learnt from and priced together with that one.
        calibrate: (confidences float32 [n, m], drafts in front of them) -> calibrated ones.
    """

    mode: Mode
    drafted: IntArray
    stages: Stages
    block_size: int
    costs: BatchCosts
    prices: Prices
    context: float
    overhead_ms: float
    calibrate: Callable[[Float32Array, int], Float32Array]
    num_passes: int = 1
    is_followed: bool = False

    def depths(self, computed: Computed) -> IntArray:
        """Drafts computed of every request of the batch: int64 [bs]."""
        depths = np.zeros(self.costs.bs, dtype=np.int64)
        depths[self.drafted] = computed.depth
        return depths

    def draft_ms(self, computed: Computed) -> float:
        """Predicted milliseconds of all but the verify: forward, the head's stages, overhead."""
        if not len(self.drafted):
            return self.overhead_ms
        forward_ms = float(self.costs.draft_forward(len(self.drafted), self.block_size))
        return self.overhead_ms + forward_ms + computed.head_ms(self.costs)
