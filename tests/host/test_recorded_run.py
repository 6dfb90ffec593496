"""A recorded run of a real server, replayed: its counts exactly, all of its time accounted for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import Case, prompts, recorded

from dcut_sglang.bench.server import Server
from dcut_sglang.cost import CostTable
from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.policies import FixedRatio
from dcut_sglang.replay.reproduce import reproduce
from dcut_sglang.replay.run import replay
from dcut_sglang.replay.step_cost import StepCost
from dcut_sglang.trace import Trace, TraceStep

# A plain step may be priced by the plan of one up to so many tokens before it.
PLAN_HOLDS = 7


def recorded_load(server: Server, logs: Path, knobs: dict[str, float]) -> Trace:
    """The steps of one load under forced knobs (none: the selector's own choices)."""
    cases = [Case(prompt, 48) for prompt in prompts()[:24]]
    return recorded(server, logs / "steps.trace", knobs, cases, 8)


def test_replay_reproduces_a_recorded_run(dcut_paged: Server, logs: Path) -> None:
    for knobs in ({"dcut_force_ratio": -1}, {"dcut_force_random": 3}, {"dcut_force_plain": 1}):
        trace = recorded_load(dcut_paged, logs, knobs)
        counters = dcut_paged.dcut()
        found = reproduce(trace, CostTable.from_json(counters["cost_table"]))
        assert found.steps == counters["steps"] and found.plain_steps == counters["plain_steps"]
        assert found.tokens == counters["tokens_emitted"]
        assert found.rows == counters["rows_verified"]
        print(f"{knobs}: predicted {found.predicted_ms:.0f} ms, measured {found.measured_ms:.0f}")
        # Wall time on a machine with other work says nothing of the table: `make demo` prints how
        # far the two are apart. What must hold anywhere: every step is timed, and its phases, whose
        # times are wall times, take no less than the CPU time measured.
        assert found.timed_steps == found.steps and found.predicted_ms > 0
        assert sum(found.phase_ms.values()) > 0.95 * found.measured_ms > 0


def test_the_selector_s_prediction_is_in_the_trace(dcut_paged: Server, logs: Path) -> None:
    trace = recorded_load(dcut_paged, logs, {"dcut_force_ratio": -1})
    cost = CostTable.from_json(dcut_paged.dcut()["cost_table"])
    for step in trace.steps:
        ages = range(PLAN_HOLDS + 1) if step.mode == "plain" else [0]
        expected = [predicted_ms(step, age, trace, cost) for age in ages]
        assert 0.9999 * min(expected) <= step.predicted_ms <= 1.0001 * max(expected)
        # What was weighed is there too, and what was kept is among it.
        weighed = step.candidates
        assert weighed is not None
        kept = weighed.num_kept == step.verify_lens.sum() - step.bs
        np.testing.assert_allclose(weighed.predicted_ms[kept], [step.predicted_ms], rtol=1e-4)


def predicted_ms(step: TraceStep, age: int, trace: Trace, cost: CostTable) -> float:
    """What the table says of a step at the contexts of ``age`` tokens before it."""
    earlier = replace(step, contexts=step.contexts - age)
    return reproduce(replace(trace, steps=(earlier,)), cost).predicted_ms


def test_a_full_width_trace_replays_any_policy(dcut_paged: Server, logs: Path) -> None:
    trace = recorded_load(dcut_paged, logs, {"dcut_force_ratio": 1.0})
    bank = AnchorBank.from_trace(trace)
    assert bank.num_texts == 24
    cost = StepCost(CostTable.from_json(dcut_paged.dcut()["cost_table"]), 8)
    full, half = replay(bank, FixedRatio((1.0, 0.5)), cost, num_tokens=2000, num_worlds=1)
    assert full.tokens / full.steps >= half.tokens / half.steps > 8
    assert half.rows / half.steps < full.rows / full.steps == 128
