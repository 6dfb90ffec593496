"""The controller on recorded texts and a CPU's costs: never far from the better of both modes."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest

from dcut_sglang.config import DCutConfig
from dcut_sglang.controller import Controller
from dcut_sglang.cost import CostTable
from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.cli import CPU_COSTS
from dcut_sglang.replay.controlled import replay_controlled
from dcut_sglang.replay.policies import Plain, ours
from dcut_sglang.replay.run import replay
from dcut_sglang.replay.step_cost import StepCost
from dcut_sglang.selector import Selector

TABLE = CostTable.load(CPU_COSTS)
DEPTH = TABLE.block_size - 1


def texts(kind: str) -> AnchorBank:
    bank = AnchorBank.load()
    mean = [bank.accept[a:b].mean() for a, b in zip(bank.start[:-1], bank.start[1:], strict=True)]
    order = np.argsort(mean)
    third = bank.num_texts // 3
    chosen = {"hard": order[:third], "easy": order[-third:], "mixed": np.arange(bank.num_texts)}
    return bank.subset(chosen[kind])


@pytest.mark.parametrize("bs", [4, 16, 32])
@pytest.mark.parametrize("kind", ["hard", "mixed", "easy"])
def test_close_to_the_better_of_both_modes(kind: str, bs: int) -> None:
    """A world is short, so what finding out costs at its start is in the figure."""
    bank = texts(kind)
    found = replay_controlled(bank, TABLE, bs, num_tokens=8000, num_worlds=2)
    cost = StepCost(TABLE, bs)
    (plain,) = replay(bank, Plain(), cost, num_tokens=8000, num_worlds=2)
    (always,) = replay(bank, ours(TABLE), cost, num_tokens=8000, num_worlds=2)
    best = max(plain.tokens_per_ms, always.tokens_per_ms)
    assert found.tokens_per_ms >= 0.97 * best
    if kind == "mixed" and 4 <= bs <= 16:
        assert found.tokens_per_ms >= 1.02 * best  # changing modes is worth something


def controller() -> Controller:
    return Controller(Selector(TABLE, DCutConfig()))


def block(value: float, n: int = 1) -> np.ndarray:
    return np.full((n, DEPTH), value, dtype=np.float32).cumprod(axis=1)


def keys(bs: int, first: int = 0) -> list[Hashable]:
    return [f"request {i}" for i in range(first, first + bs)]


def test_the_first_step_finds_out() -> None:
    plan = controller().plan(keys(8), 100)
    assert plan.mode == "speculate" and plan.drafted.tolist() == list(range(8))


@pytest.mark.parametrize("bs", [4, 16, 32])
def test_hard_requests_get_plain_steps_at_once_and_looks_are_rare(bs: int) -> None:
    subject = controller()
    looks, spent_ms, look_ms = 0, 0.0, 0.0
    modes = []
    for step in range(2000):
        plan = subject.plan(keys(bs), 100 + step)
        modes.append(plan.mode)
        if len(plan.drafted):
            subject.observe([keys(bs)[i] for i in plan.drafted], block(0.1, len(plan.drafted)))
        plain_ms = float(TABLE.verify(bs, bs, 100 + step))
        spent_ms += plain_ms
        if plan.mode == "relook":
            looks += 1
            look_ms += TABLE.draft(len(plan.drafted), 100 + step)
            assert len(plan.drafted) <= 2
    assert modes[0] == "speculate" and "speculate" not in modes[1:]
    assert looks > 0 and look_ms <= 0.0101 * spent_ms


def test_speculation_resumes_when_requests_become_easy() -> None:
    subject, bs = controller(), 8
    subject.plan(keys(bs), 100)
    subject.observe(keys(bs), block(0.1, bs))
    value, resumed = 0.1, None
    for step in range(1000):
        plan = subject.plan(keys(bs), 100)
        if plan.mode == "speculate":
            resumed = step
            break
        if step == 50:
            value = 0.99
        if len(plan.drafted):
            subject.observe([keys(bs)[i] for i in plan.drafted], block(value, len(plan.drafted)))
    assert resumed is not None and resumed > 50


def test_no_flapping_at_the_border() -> None:
    """Near break-even the mode does not change with every step's noise."""
    subject, bs = controller(), 8
    draw = np.random.default_rng(0)
    changes, mode = 0, None
    for _ in range(500):
        plan = subject.plan(keys(bs), 100)
        now = "speculate" if plan.mode == "speculate" else "plain"
        changes += mode is not None and now != mode
        mode = now
        if len(plan.drafted):
            noisy = np.clip(0.62 + 0.02 * draw.standard_normal((len(plan.drafted), 1)), 0, 1)
            shown = np.repeat(noisy, DEPTH, axis=1).cumprod(axis=1).astype(np.float32)
            subject.observe([keys(bs)[i] for i in plan.drafted], shown)
    assert changes <= 10


def test_strangers_are_looked_at_first_and_memory_is_bounded() -> None:
    subject, bs = controller(), 8
    subject.plan(keys(bs), 100)
    subject.observe(keys(bs), block(0.1, bs))
    batch = [*keys(6), "new 1", "new 2"]
    plans = [subject.plan(batch, 100) for _ in range(200)]
    (look, *_) = [plan for plan in plans if plan.mode == "relook"]
    assert look.drafted.tolist() == [6, 7]
    for first in range(0, 3000, bs):
        subject.observe(keys(bs, first), block(0.5, bs))
    assert len(subject._row) <= 256


def test_equal_requests_in_equal_batches_take_equal_decisions() -> None:
    def run() -> list[tuple[str, list[int]]]:
        subject, draw, plans = controller(), np.random.default_rng(1), []
        for step in range(300):
            batch = keys(4 + step % 5, first=step // 40)
            plan = subject.plan(batch, 100 + step)
            plans.append((plan.mode, plan.drafted.tolist()))
            if len(plan.drafted):
                shown = draw.random((len(plan.drafted), DEPTH), dtype=np.float32).cumprod(axis=1)
                subject.observe([batch[i] for i in plan.drafted], shown)
        return plans

    assert run() == run()
