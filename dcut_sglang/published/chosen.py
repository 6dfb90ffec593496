"""What the selector does to a population of drafts, without feedback from pruning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcut_sglang.config import DCutConfig, Objective
from dcut_sglang.cost import CostTable
from dcut_sglang.published import h20
from dcut_sglang.published.accept_model import AcceptModel
from dcut_sglang.replay.policies import Utility, View
from dcut_sglang.replay.step_cost import StepCost


@dataclass(frozen=True)
class Chosen:
    """What the selector does to a population, on average over steps.

    Attributes:
        keep_ratio: verified rows over bs * D, anchors counted.
        tokens_per_s: emitted tokens per second of step time.
    """

    keep_ratio: float
    tokens_per_s: float


def choose(
    model: AcceptModel,
    table: CostTable,
    bs: int,
    objective: Objective,
    draft_ratios: tuple[float, ...] = h20.DRAFT_RATIOS,
) -> Chosen:
    """Run the selector on batches of ``bs`` drawn from a population, without feedback.

    Args:
        draft_ratios: its buckets, as shares of the drafts; (): every number of drafts.
    """
    config = DCutConfig(keep_ratios=draft_ratios, objective=objective)
    survival = model.survival()
    batches = survival[: len(survival) // bs * bs].reshape(-1, bs, survival.shape[1])
    steps = len(batches)
    view = View(
        np.zeros(steps, dtype=np.int64),
        np.zeros((steps, bs), dtype=np.int64),
        batches,
        np.full(steps, float(table.contexts[0])),
        StepCost(table, bs),
    )
    kept = Utility("", table, config).choose(view).kept
    verified = np.arange(survival.shape[1]) < kept[:, :, None]
    tokens = bs + (batches * verified).sum(axis=(1, 2), dtype=np.float64)
    ms = view.cost.verify_each(view.context, kept.sum(axis=1)) + view.cost.draft(view.context)
    ratio = (bs + kept.sum(axis=1)) / (bs * model.block_size)
    return Chosen(float(ratio.mean()), float(1000 * tokens.sum() / ms.sum()))


def middle(values: Sequence[float]) -> float:
    """The middle of what equally good populations predict."""
    return (max(values) + min(values)) / 2
