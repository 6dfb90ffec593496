"""Policies that choose, for many steps at once, what to draft and what to verify.

Every policy sees a ``View`` of W independent steps and returns a ``Choice``. Some exist in
variants (several ratios, several prices); ``View.variant`` says which one each step runs, so
that all variants are replayed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dcut_sglang.config import DCutConfig
from dcut_sglang.cost import CostTable
from dcut_sglang.replay.step_cost import StepCost
from dcut_sglang.selector import Selector
from dcut_sglang.survival import num_kept_at_ratio

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class View:
    """W steps of bs requests, before anything is paid for.

    Attributes:
        variant: int64 [W], the policy's variant.
        anchor: int64 [W, bs], place in the ``AnchorBank``: what policies that know more than a
            server could look up.
        survival: float32 [W, bs, D-1], prefix products of the drafter's confidences.
        context: float64 [W], mean committed tokens per request.
        cost: costs at this batch size.
    """

    variant: IntArray
    anchor: IntArray
    survival: Float32Array
    context: FloatArray
    cost: StepCost

    @property
    def bs(self) -> int:
        return self.anchor.shape[1]

    @cached_property
    def ranked(self) -> Float32Array:
        """float32 [W, bs * (D-1)], all survivals, best first."""
        return rank(self.survival)


@dataclass(frozen=True, eq=False)
class Choice:
    """What each of W steps does.

    Attributes:
        kept: int64 [W, bs], drafts that each request has verified.
        plain: bool [W], steps that draft nothing; ``kept`` is 0 there.
        depth: int64 [W], drafts made per request; None: the whole block.
    """

    kept: IntArray
    plain: BoolArray
    depth: IntArray | None = None


class Policy(Protocol):
    """A named rule; ``labels`` names its variants."""

    @property
    def labels(self) -> Sequence[str]: ...

    def choose(self, view: View) -> Choice: ...


def rank(survival: Float32Array) -> Float32Array:
    """Survivals [W, bs, depth] of each step, best first: [W, bs * depth]."""
    return -np.sort(-survival.reshape(len(survival), -1), axis=1)


def keep_best(survival: Float32Array, ranked: Float32Array, num_kept: IntArray) -> IntArray:
    """Kept drafts of each request when each step keeps its best ``num_kept``.

    Ties go to the earlier position, then to the earlier request, as in ``survival.rank_drafts``.

    Args:
        survival: [W, bs, depth], non-increasing along the last axis.
        ranked: ``rank(survival)``.
        num_kept: int [W], 0 .. bs * depth.

    Returns:
        int64 [W, bs].
    """
    rows = np.arange(len(survival))
    cut = np.where(num_kept > 0, ranked[rows, np.maximum(num_kept, 1) - 1], np.inf)
    cut = cut.astype(survival.dtype)[:, None, None]
    kept = (survival > cut).sum(axis=2)
    missing = num_kept - kept.sum(axis=1)
    tied = survival == cut
    num_tied = tied.sum(axis=2)
    exact = num_tied.sum(axis=1) == missing
    kept[exact] += num_tied[exact]
    if not exact.all():
        some = np.flatnonzero(~exact)
        # Position-major, so that the running count serves earlier positions first.
        by_position = tied[some].transpose(0, 2, 1)
        order = by_position.reshape(len(some), -1).cumsum(axis=1).reshape(by_position.shape)
        kept[some] += (by_position & (order <= missing[some, None, None])).sum(axis=1)
    return kept


def _speculate(kept: IntArray) -> Choice:
    return Choice(kept, np.zeros(len(kept), dtype=bool))


class Plain:
    """Never drafts."""

    labels = ("plain",)

    def choose(self, view: View) -> Choice:
        return Choice(np.zeros_like(view.anchor), np.ones(len(view.anchor), dtype=bool))


class FixedRatio:
    """Keeps a share of the batch's drafts, the best ones; ratio 1 is the full block."""

    def __init__(self, ratios: Sequence[float] = (0.25, 0.5, 0.75)) -> None:
        self.ratios = tuple(ratios)
        self.labels = tuple("full" if r == 1 else f"ratio {r:g}" for r in ratios)

    def choose(self, view: View) -> Choice:
        block_size = view.survival.shape[2] + 1
        kept = np.array([num_kept_at_ratio(r, view.bs, block_size) for r in self.ratios])
        return _speculate(keep_best(view.survival, view.ranked, kept[view.variant]))


class FixedLength:
    """The same verify length for every request, anchor counted."""

    def __init__(self, verify_lens: Sequence[int] = (2, 4, 8)) -> None:
        self.verify_lens = np.asarray(verify_lens, dtype=np.int64)
        self.labels = tuple(f"length {n}" for n in verify_lens)

    def choose(self, view: View) -> Choice:
        kept = np.minimum(self.verify_lens[view.variant] - 1, view.survival.shape[2])
        return _speculate(np.repeat(kept[:, None], view.bs, axis=1))


class Threshold:
    """Keeps every draft whose survival reaches a threshold."""

    def __init__(self, thresholds: Sequence[float] = (0.3, 0.5, 0.7)) -> None:
        self.thresholds = np.asarray(thresholds, dtype=np.float32)
        self.labels = tuple(f"threshold {x:g}" for x in thresholds)

    def choose(self, view: View) -> Choice:
        return _speculate(
            (view.survival >= self.thresholds[view.variant][:, None, None]).sum(axis=2)
        )


class Utility:
    """``dcut_sglang.selector.Selector`` over many steps: same candidates, utility and ties."""

    def __init__(
        self, label: str, table: CostTable, config: DCutConfig, tiers: Sequence[int] | None = None
    ) -> None:
        self.labels = (label,)
        self.selector = Selector(table, config, tiers)

    def choose(self, view: View) -> Choice:
        candidates = self.selector.candidates(view.bs)
        accepted = expected_accepted(view.ranked)[:, candidates].astype(np.float64)
        ms = view.cost.draft(view.context)[:, None] + view.cost.verify(view.context, candidates)
        gain = accepted if self.selector.config.objective == "paper" else view.bs + accepted
        best = candidates[np.argmax(gain / ms, axis=1)]
        return _speculate(keep_best(view.survival, view.ranked, best))


def dcut_as_published(table: CostTable) -> Utility:
    """Drafts alone in the numerator, four ratios, always drafts."""
    config = replace(DCutConfig(), keep_ratios=(0.25, 0.5, 0.75, 1.0), objective="paper")
    return Utility("D-Cut as published", table, config)


def ours(table: CostTable, config: DCutConfig | None = None) -> Utility:
    """The package's selector alone, by default with its default configuration: always drafts, whole
    blocks for everybody."""
    return Utility("selector alone", table, config or DCutConfig())


def expected_accepted(ranked: Float32Array) -> Float32Array:
    """float32 [W, M + 1]: entry K is the sum of the K best survivals."""
    sums = np.zeros((len(ranked), ranked.shape[1] + 1), dtype=np.float32)
    np.cumsum(ranked, axis=1, out=sums[:, 1:])
    return sums
