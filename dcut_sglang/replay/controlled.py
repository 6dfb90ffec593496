"""Replay the selector together with the controller: state over steps, so one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from dcut_sglang.calibration import calibration_error
from dcut_sglang.config import DCutConfig
from dcut_sglang.controller import Controller, Plan
from dcut_sglang.cost import CostTable
from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.policies import expected_accepted, keep_best, rank
from dcut_sglang.replay.run import Cell, queues
from dcut_sglang.selector import Selector
from dcut_sglang.stages import Float32Array, IntArray, compute_in_stages

LABEL = "ours"


def replay_controlled(
    bank: AnchorBank,
    table: CostTable,
    bs: int,
    *,
    label: str = LABEL,
    config: DCutConfig | None = None,
    believed: CostTable | None = None,
    at_end: Callable[[Controller], None] | None = None,
    max_steps: int | None = None,
    num_tokens: int = 5_000,
    num_worlds: int = 4,
    seed: int = 0,
) -> Cell:
    """What the server's worker does, on recorded texts; requests come as in ``run.replay``.

    Every world starts with a controller that knows nothing.

    Args:
        table: what steps cost.
        max_steps: a world also ends after so many steps.
        at_end: called with each world's controller when the world is done.
        believed: what the controller takes for their cost; the same by default.
    """
    config = config or DCutConfig()
    believed = believed or table
    rng = np.random.default_rng(seed)
    order, first = queues(bank, bs, num_tokens, num_worlds, rng)
    context_of = bank.prompt_len[bank.text] + np.arange(len(bank.accept)) - bank.start[bank.text]
    confidence = bank.confidence
    steps = plain_steps = tokens = rows = 0
    ms = 0.0
    for world in range(num_worlds):
        selector = Selector(believed, config)
        controller = Controller(selector)
        anchor, turn = first[world].copy(), np.zeros(bs, dtype=np.int64)
        emitted_in_world = steps_in_world = 0
        while emitted_in_world < num_tokens and steps_in_world != max_steps:
            steps_in_world += 1
            context = float(context_of[anchor].mean())
            keys = [(place, int(turn[place])) for place in range(bs)]
            plan = controller.plan(keys, context)
            drafted = plan.drafted

            computed = compute_in_stages(
                plan.stages,
                len(drafted),
                bank.block_size - 1,
                partial(_calibrated, plan, confidence, anchor[drafted]),
            )
            survival = np.zeros((bs, bank.block_size - 1), dtype=np.float32)
            survival[drafted] = computed.survival
            ranked = rank(survival[None])
            candidates = selector.candidates_up_to(bs, int(computed.depth.sum()))
            decision = selector.choose(
                expected_accepted(ranked)[0, candidates],
                plan.costs,
                kept=candidates,
                draft_ms=plan.draft_ms(computed),
            )
            decision = controller.explored(decision, plan, int(computed.depth.sum()))
            kept = keep_best(survival[None], ranked, np.array([decision.num_kept]))[0]
            ms += _draft_ms(table, plan) + computed.head_ms(table)
            ms += float(table.verify(bs, decision.num_rows, context))
            accepted = np.minimum(kept, bank.accept[anchor])
            controller.observe(
                [keys[i] for i in drafted],
                computed,
                confidence[anchor[drafted]],
                kept[drafted],
                accepted[drafted],
                plan,
            )
            controller.advance(keys, kept, accepted + 1, decision, plan)
            emitted = np.minimum(accepted + 1, bank.remaining[anchor])
            finished = emitted == bank.remaining[anchor]
            turn += finished
            upcoming = bank.start[order[world, np.arange(bs), turn % order.shape[2]]]
            anchor = np.where(finished, upcoming, anchor + emitted)
            steps += 1
            plain_steps += plan.mode != "speculate"
            emitted_in_world += int(emitted.sum())
            rows += bs + int(kept.sum())
        tokens += emitted_in_world
        if at_end is not None:
            at_end(controller)
    return Cell(label, bs, steps, plain_steps, tokens, rows, ms)


def _calibrated(
    plan: Plan, confidence: Float32Array, anchor: IntArray, places: IntArray, lo: int, hi: int
) -> Float32Array:
    return plan.calibrate(confidence[anchor[places], lo:hi], lo)


def _draft_ms(table: CostTable, plan: Plan) -> float:
    num_requests = len(plan.drafted)
    if not num_requests:
        return 0.0
    return float(table.draft_forward(num_requests, plan.context, plan.block_size))


def calibration_errors(
    bank: AnchorBank, table: CostTable, bs: int = 8, num_steps: int = 2_000, seed: int = 0
) -> tuple[float, float]:
    """Error of the survivals, raw and as calibrated after ``num_steps`` steps of service.

    The calibration sees what a server sees: outcomes of the drafts that were verified. Both are
    scored on the anchors of a run at full width. Drafting goes on whatever it is worth, as
    in a server without plain steps.
    """
    learnt: list[Controller] = []
    config = replace(DCutConfig(), plain_steps=False)
    replay_controlled(
        bank,
        table,
        bs,
        config=config,
        max_steps=num_steps,
        num_tokens=num_steps * bs * bank.block_size,
        num_worlds=1,
        seed=seed,
        at_end=learnt.append,
    )
    met = bank.full_width_walk()
    calibrated = learnt[0].calibration.apply(bank.confidence[met]).cumprod(axis=1)
    return (
        calibration_error(bank.survival[met], bank.accept[met]),
        calibration_error(calibrated, bank.accept[met]),
    )
