"""Replay a policy over texts whose outcome is known at every anchor.

A cut request goes on from where it was cut, and a request that finishes makes room for the next
one, so pruning changes which anchors are met: a policy is judged on the steps it causes itself.
Many independent batches ("worlds") advance together; all policies see the same requests in the
same places of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.policies import Policy, View
from dcut_sglang.replay.step_cost import StepCost

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """One policy at one batch size.

    Attributes:
        label: the policy's.
        bs: requests of the batch.
        steps, plain_steps: how many steps, and how many of them drafted nothing.
        tokens: emitted tokens.
        rows: tokens that the target saw.
        ms: milliseconds by the cost table.
        look_ms: of these, drafting of steps that only looked whether drafting pays again.
    """

    label: str
    bs: int
    steps: int
    plain_steps: int
    tokens: int
    rows: int
    ms: float
    look_ms: float = 0.0

    @property
    def tokens_per_ms(self) -> float:
        return self.tokens / self.ms


def replay(
    bank: AnchorBank,
    policy: Policy,
    cost: StepCost,
    *,
    num_tokens: int = 20_000,
    num_worlds: int = 4,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[Cell]:
    """Run every variant of a policy at ``cost.bs`` concurrent requests.

    The batch is always full (steady state). Each world stops at the first step that brings it
    to ``num_tokens`` tokens, so that all policies do the same work.

    Args:
        num_tokens: tokens of each world.
        num_worlds: independent batches per variant.
        seed: decides which texts follow each other in which place, and nothing else.
        progress: called after each step with the number of unfinished worlds.

    Returns:
        one cell per variant, over its worlds.
    """
    if bank.block_size != cost.max_depth + 1:
        raise ValueError(
            f"the texts have blocks of {bank.block_size}, the cost table of {cost.max_depth + 1}"
        )
    bs = cost.bs
    variants = len(policy.labels)
    rng = np.random.default_rng(seed)
    order, first = queues(bank, bs, num_tokens, num_worlds, rng)
    variant = np.repeat(np.arange(variants), num_worlds)
    world = np.tile(np.arange(num_worlds), variants)
    anchor = np.tile(first, (variants, 1))
    place = np.zeros_like(anchor)  # of the current text in the request's queue
    offset_of = np.arange(len(bank.accept)) - bank.start[bank.text]
    context_of = bank.prompt_len[bank.text] + offset_of
    columns = np.arange(bs)
    steps, plain_steps, tokens, rows = np.zeros((4, len(world)), dtype=np.int64)
    ms = np.zeros(len(world))
    active = np.arange(len(world))
    while len(active):
        now = anchor[active]
        context = context_of[now].mean(axis=1)
        choice = policy.choose(View(variant[active], now, bank.survival[now], context, cost))
        accepted = np.minimum(choice.kept, bank.accept[now])
        emitted = np.minimum(accepted + 1, bank.remaining[now])
        num_kept = choice.kept.sum(axis=1)
        steps[active] += 1
        plain_steps[active] += choice.plain
        tokens[active] += emitted.sum(axis=1)
        rows[active] += bs + num_kept
        draft_ms = np.where(choice.plain, 0.0, cost.draft(context, choice.depth))
        ms[active] += draft_ms + cost.verify_each(context, num_kept)
        finished = emitted == bank.remaining[now]
        place[active] += finished
        turn = place[active] % order.shape[2]
        upcoming = bank.start[order[world[active][:, None], columns, turn]]
        anchor[active] = np.where(finished, upcoming, now + emitted)
        active = active[tokens[active] < num_tokens]
        if progress is not None:
            progress(len(active))
    return [
        Cell(
            label,
            bs,
            int(steps[variant == v].sum()),
            int(plain_steps[variant == v].sum()),
            int(tokens[variant == v].sum()),
            int(rows[variant == v].sum()),
            float(ms[variant == v].sum()),
        )
        for v, label in enumerate(policy.labels)
    ]


def queues(
    bank: AnchorBank, bs: int, num_tokens: int, num_worlds: int, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Texts that each place of each batch serves, in order, and where it starts.

    Whole shuffled rounds over the texts, so that the mix is that of the bank; the first text of
    a place starts at a random anchor, so that the requests of a batch are out of step.

    Returns:
        (int64 [worlds, bs, length], int64 [worlds, bs] first anchors).
    """
    mean_len = len(bank.accept) / bank.num_texts
    length = 2 + int(np.ceil(2 * num_tokens / bs / mean_len))
    needed = num_worlds * bs * length
    rounds = -(-needed // bank.num_texts)
    texts = np.concatenate([rng.permutation(bank.num_texts) for _ in range(rounds)])[:needed]
    # A round is spread over the places, not along one place's queue.
    queues = texts.reshape(num_worlds, length, bs).transpose(0, 2, 1)
    initial = queues[:, :, 0]
    lengths = np.diff(bank.start)[initial]
    first = bank.start[initial] + (rng.random(initial.shape) * lengths).astype(np.int64)
    return queues, first
