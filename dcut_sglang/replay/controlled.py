"""Replay the selector together with the controller: state over steps, so one step at a time."""

from __future__ import annotations

import numpy as np

from dcut_sglang.config import DCutConfig
from dcut_sglang.controller import Controller
from dcut_sglang.cost import CostTable
from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.policies import expected_accepted, keep_best, rank
from dcut_sglang.replay.run import Cell, queues
from dcut_sglang.selector import Selector

LABEL = "ours, plain steps"


def replay_controlled(
    bank: AnchorBank,
    table: CostTable,
    bs: int,
    *,
    config: DCutConfig | None = None,
    num_tokens: int = 5_000,
    num_worlds: int = 4,
    seed: int = 0,
) -> Cell:
    """What the server's worker does, on recorded texts; requests come as in ``run.replay``.

    Every world starts with a controller that knows nothing.
    """
    config = config or DCutConfig()
    rng = np.random.default_rng(seed)
    order, first = queues(bank, bs, num_tokens, num_worlds, rng)
    context_of = bank.prompt_len[bank.text] + np.arange(len(bank.accept)) - bank.start[bank.text]
    steps = plain_steps = tokens = rows = 0
    ms = 0.0
    for world in range(num_worlds):
        selector = Selector(table, config)
        controller = Controller(selector, config.plain_margin)
        anchor, turn = first[world].copy(), np.zeros(bs, dtype=np.int64)
        emitted_in_world = 0
        while emitted_in_world < num_tokens:
            context = float(context_of[anchor].mean())
            keys = [(place, int(turn[place])) for place in range(bs)]
            plan = controller.plan(keys, context)
            kept = np.zeros(bs, dtype=np.int64)
            if len(plan.drafted):
                survival = bank.survival[anchor[plan.drafted]]
                controller.observe([keys[i] for i in plan.drafted], survival)
                ranked = rank(survival[None])
                candidates = selector.candidates_for(bs, len(plan.drafted))
                decision = selector.choose(
                    expected_accepted(ranked)[0, candidates],
                    bs,
                    context,
                    kept=candidates,
                    num_drafted=len(plan.drafted),
                )
                num_kept = np.array([decision.num_kept])
                kept[plan.drafted] = keep_best(survival[None], ranked, num_kept)[0]
                ms += decision.predicted_ms
            else:
                ms += float(table.verify(bs, bs, context))
            emitted = np.minimum(np.minimum(kept, bank.accept[anchor]) + 1, bank.remaining[anchor])
            finished = emitted == bank.remaining[anchor]
            turn += finished
            upcoming = bank.start[order[world, np.arange(bs), turn % order.shape[2]]]
            anchor = np.where(finished, upcoming, anchor + emitted)
            steps += 1
            plain_steps += plan.mode != "speculate"
            emitted_in_world += int(emitted.sum())
            rows += bs + int(kept.sum())
        tokens += emitted_in_world
    return Cell(LABEL, bs, steps, plain_steps, tokens, rows, ms)
