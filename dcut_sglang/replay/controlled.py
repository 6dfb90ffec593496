"""Replay the selector together with the controller: state over steps, so one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from dcut_sglang.calibration import calibration_error
from dcut_sglang.config import DCutConfig
from dcut_sglang.controller import Controller
from dcut_sglang.correction import CostCorrection, MeasuredStep, refined
from dcut_sglang.cost import CostTable
from dcut_sglang.plan import Plan
from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.run import Cell, queues
from dcut_sglang.selector import Selector
from dcut_sglang.stages import Computed, Float32Array, IntArray, compute_in_stages

LABEL = "ours"


@dataclass(frozen=True)
class _Step:
    """What one replayed step did; milliseconds by the true costs."""

    plan: Plan
    tokens: int
    rows: int
    draft_ms: float
    verify_ms: float

    @property
    def ms(self) -> float:
        return self.draft_ms + self.verify_ms


class World:
    """One batch, always full, served as the server's worker serves it.

    Args:
        table: what steps cost.
        believed: what the controller takes for their cost at the start.
        corrects: whether what steps cost corrects what is believed.
        order: int64 [bs, length], texts that each place of the batch serves, in order.
        first: int64 [bs], anchors at which the places start.
    """

    def __init__(
        self,
        bank: AnchorBank,
        table: CostTable,
        config: DCutConfig,
        order: IntArray,
        first: IntArray,
        believed: CostTable | None = None,
        corrects: bool = False,
    ) -> None:
        self._bank, self._table, self._order, self._anchor = bank, table, order, first.copy()
        self._bs = len(first)
        self._places = np.arange(self._bs)
        self._turn = np.zeros(self._bs, dtype=np.int64)
        self._confidence = bank.confidence
        self._selector = Selector(believed or table, config)
        self.controller = Controller(self._selector)
        self._correction = None
        if corrects:
            self._correction = CostCorrection(refined(self._selector.cost, self._bs))

    def step(self) -> _Step:
        """Plan, draft, decide and accept; then learn, as ``host/worker.py`` does."""
        bank, anchor, bs = self._bank, self._anchor, self._bs
        offset = anchor - bank.start[bank.text[anchor]]
        context = float((bank.prompt_len[bank.text[anchor]] + offset).mean())
        keys = [(place, int(self._turn[place])) for place in range(bs)]
        plan = self.controller.plan(keys, context)
        drafted = plan.drafted

        head = partial(_calibrated, plan, self._confidence, anchor[drafted])
        computed = compute_in_stages(plan.stages, len(drafted), bank.block_size - 1, head)
        num_drafts = int(computed.depth.sum())
        survival = np.zeros((bs, bank.block_size - 1), dtype=np.float32)
        survival[drafted] = computed.survival
        ranked, decision = self._selector.decide(
            torch.from_numpy(survival), plan.depths(computed), plan.costs, plan.draft_ms(computed)
        )
        decision = self.controller.explored(decision, plan, num_drafts)
        kept = ranked.verify_lens(decision.num_kept).numpy().astype(np.int64) - 1

        accepted = np.minimum(kept, bank.accept[anchor])
        self.controller.observe(
            [keys[i] for i in drafted],
            computed,
            self._confidence[anchor[drafted]],
            kept[drafted],
            accepted[drafted],
            plan,
        )
        self.controller.advance(keys, kept, accepted + 1, decision, plan)
        return self._priced(plan, computed, bs + int(kept.sum()), self._advance(accepted + 1))

    def _advance(self, emitted: IntArray) -> int:
        """Move every place on; returns the tokens that its texts had left to emit."""
        bank = self._bank
        emitted = np.minimum(emitted, bank.remaining[self._anchor])
        finished = emitted == bank.remaining[self._anchor]
        self._turn += finished
        upcoming = bank.start[self._order[self._places, self._turn % self._order.shape[1]]]
        self._anchor = np.where(finished, upcoming, self._anchor + emitted)
        return int(emitted.sum())

    def _priced(self, plan: Plan, computed: Computed, rows: int, tokens: int) -> _Step:
        """What the step really costs, which may correct what is believed."""
        table, num_drafted = self._table, len(plan.drafted)
        forward_ms = (
            float(table.draft_forward(num_drafted, plan.context, plan.block_size))
            if num_drafted
            else 0.0
        )
        head_ms = computed.head_ms(table)
        verify_ms = float(table.verify(self._bs, rows, plan.context))
        if self._correction is not None and not plan.is_followed:
            self._correction.observe(
                MeasuredStep(
                    bs=self._bs,
                    rows=rows,
                    context=plan.context,
                    num_drafted=num_drafted,
                    draft_block_size=plan.block_size,
                    head_rows=computed.rows,
                    forward_ms=forward_ms,
                    head_ms=head_ms,
                    verify_ms=verify_ms,
                    other_ms=0.0,
                )
            )
            self._selector.cost = self._correction.table
        return _Step(plan, tokens, rows, forward_ms + head_ms, verify_ms)


def replay_controlled(
    bank: AnchorBank,
    table: CostTable,
    bs: int,
    *,
    label: str = LABEL,
    config: DCutConfig | None = None,
    believed: CostTable | None = None,
    corrects: bool = False,
    at_end: Callable[[Controller], None] | None = None,
    max_steps: int | None = None,
    skip_steps: int = 0,
    num_tokens: int = 5_000,
    num_worlds: int = 4,
    seed: int = 0,
) -> Cell:
    """What the server's worker does, on recorded texts; requests come as in ``run.replay``.

    Every world starts with a controller that knows nothing.

    Args:
        table: what steps cost.
        believed: what the controller takes for their cost; the same by default.
        corrects: whether costs are corrected by what steps cost.
        at_end: called with each world's controller when the world is done.
        max_steps: a world also ends after so many steps.
        skip_steps: first steps of each world that are not counted.
        num_tokens: counted tokens of each world, at least.
    """
    config = config or DCutConfig()
    rng = np.random.default_rng(seed)
    order, first = queues(bank, bs, num_tokens, num_worlds, rng)
    steps: list[_Step] = []
    for of_world, start in zip(order, first, strict=True):
        world = World(bank, table, config, of_world, start, believed, corrects)
        for _ in range(skip_steps):
            world.step()
        emitted = taken = 0
        while emitted < num_tokens and taken != max_steps:
            steps.append(world.step())
            emitted += steps[-1].tokens
            taken += 1
        if at_end is not None:
            at_end(world.controller)
    return Cell(
        label,
        bs,
        len(steps),
        sum(step.plan.mode != "speculate" for step in steps),
        sum(step.tokens for step in steps),
        sum(step.rows for step in steps),
        sum(step.ms for step in steps),
        look_ms=sum(step.draft_ms for step in steps if step.plan.mode == "look"),
    )


def _calibrated(
    plan: Plan, confidence: Float32Array, anchor: IntArray, places: IntArray, lo: int, hi: int
) -> Float32Array:
    return plan.calibrate(confidence[anchor[places], lo:hi], lo)


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
