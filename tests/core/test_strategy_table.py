"""The published strategy table's shape, on recorded texts: rows = ratio * bs * D, anchors included.

Global top-K over the batch against the same number for every request, at 32 requests: once with
steps drawn at random, as the page does, and once where a cut request goes on from its cut. The
second is what a server sees, and its gains are smaller.
"""

from __future__ import annotations

import numpy as np
import pytest
from early import EARLY_TEXTS

from dcut_sglang.cost import CostTable
from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.policies import Choice, FixedLength, Policy, View, keep_best
from dcut_sglang.replay.run import replay
from dcut_sglang.replay.step_cost import StepCost

BS = 32
RATIOS = (0.25, 0.5, 1.0)


class TopRows:
    """Verify the best ratio * bs * D rows of the batch."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.labels = (f"top {ratio:g}",)

    def choose(self, view: View) -> Choice:
        steps, bs, depth = view.survival.shape
        num_kept = np.full(steps, round(self.ratio * bs * (depth + 1)) - bs)
        kept = keep_best(view.survival, view.ranked, num_kept)
        return Choice(kept, np.zeros(steps, dtype=bool))


@pytest.fixture(scope="module")
def bank() -> AnchorBank:
    return AnchorBank.load(EARLY_TEXTS)


@pytest.fixture(scope="module")
def cost(bank: AnchorBank) -> StepCost:
    rows = np.ones((1, 2, 1))
    table = CostTable(bank.block_size, (BS,), (0.0, 1.0), (1,), rows, np.ones((1, 1)))
    return StepCost(table, BS)


def full_walk(bank: AnchorBank) -> np.ndarray:
    """Anchors that full verification meets, where the whole block lies inside the text."""
    met = []
    for text in range(bank.num_texts):
        anchor = int(bank.start[text])
        while anchor < bank.start[text + 1]:
            if bank.remaining[anchor] >= bank.block_size:
                met.append(anchor)
            anchor += int(bank.accept[anchor]) + 1
    return np.array(met)


def static_tokens(bank: AnchorBank, cost: StepCost, policy: Policy) -> float:
    """Tokens of a step, anchors counted, over batches of steps drawn at random."""
    draw = np.random.default_rng(0)
    anchors = draw.choice(full_walk(bank), (2000, BS))
    view = View(
        np.zeros(len(anchors), dtype=np.int64),
        anchors,
        bank.survival[anchors],
        np.ones(len(anchors)),
        cost,
    )
    accepted = np.minimum(policy.choose(view).kept, bank.accept[anchors])
    return float((accepted + 1).sum(axis=1).mean())


def feedback_tokens(bank: AnchorBank, cost: StepCost, policy: Policy) -> float:
    """Tokens of a step when what is cut must be drafted again."""
    (cell,) = replay(bank, policy, cost, num_tokens=20_000, num_worlds=2)
    return cell.tokens / cell.steps


def test_static_table_has_the_published_shape(bank: AnchorBank, cost: StepCost) -> None:
    top = {ratio: static_tokens(bank, cost, TopRows(ratio)) for ratio in RATIOS}
    fixed = {n: static_tokens(bank, cost, FixedLength((n,))) for n in (4, 8)}
    print(f"static, tokens per step: top {top}, same for every request {fixed}")
    assert top[0.25] >= 1.15 * fixed[4]
    assert top[0.5] >= 1.05 * fixed[8]
    assert top[0.5] >= 0.95 * top[1.0]


def test_with_feedback_the_gain_is_smaller_and_still_there(
    bank: AnchorBank, cost: StepCost
) -> None:
    top = {ratio: feedback_tokens(bank, cost, TopRows(ratio)) for ratio in RATIOS}
    fixed = {n: feedback_tokens(bank, cost, FixedLength((n,))) for n in (4, 8)}
    print(f"with feedback, tokens per step: top {top}, same for every request {fixed}")
    assert 1.05 * fixed[4] <= top[0.25] < 1.36 * fixed[4]
    assert top[0.5] >= 1.02 * fixed[8]
    assert top[0.5] >= 0.95 * top[1.0]
