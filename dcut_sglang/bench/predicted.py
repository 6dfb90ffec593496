"""What replay expects of DCUT on the very prompts of a benchmark, at a server's own costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcut_sglang.bench.waves import Prompt
from dcut_sglang.cost import CostTable
from dcut_sglang.replay.anchors import HELD_OUT_TEXTS, OPEN_TEXTS, AnchorBank
from dcut_sglang.replay.controlled import replay_controlled
from dcut_sglang.replay.policies import Plain
from dcut_sglang.replay.run import replay
from dcut_sglang.replay.step_cost import StepCost

# A benchmark's servers have been warmed up; a world of replay starts knowing nothing.
_SKIP_STEPS = 60
_NUM_TOKENS = 3_000
_NUM_WORLDS = 2


class RecordedTexts:
    """The drafter's recorded answers to the held-out prompts, by prompt."""

    def __init__(self) -> None:
        self._banks = [AnchorBank.load(path) for path in (HELD_OUT_TEXTS, OPEN_TEXTS)]
        # scripts/record_texts.py calls a request "code/json/17", by its prompt's place.
        self._place = {
            int(name.rpartition("/")[2]): (bank, text)
            for bank in self._banks
            for text, name in enumerate(bank.names)
        }

    def of(self, prompts: Sequence[Prompt], every: Sequence[Prompt]) -> AnchorBank | None:
        """The texts of some prompts; None where fewer than half of them were recorded.

        Args:
            every: all held-out prompts, in their own order.
        """
        place = {prompt: i for i, prompt in enumerate(every)}
        found = [self._place[place[p]] for p in prompts if place[p] in self._place]
        if 2 * len(found) < len(prompts):
            return None
        parts = [
            b.subset([t for bank, t in found if bank is b])
            for b in self._banks
            if any(bank is b for bank, _ in found)
        ]
        return joined(parts)


def joined(banks: Sequence[AnchorBank]) -> AnchorBank:
    """Texts of several banks of one block size."""
    counts = np.cumsum([0, *(len(bank.accept) for bank in banks)])
    starts = [bank.start[:-1] + count for bank, count in zip(banks, counts, strict=False)]
    return AnchorBank(
        np.concatenate([bank.survival for bank in banks]),
        np.concatenate([bank.accept for bank in banks]),
        np.concatenate([bank.remaining for bank in banks]),
        np.concatenate([*starts, counts[-1:]]),
        np.concatenate([bank.prompt_len for bank in banks]),
        tuple(name for bank in banks for name in bank.names),
    )


def predicted_over_plain(
    bank: AnchorBank, table: CostTable, concurrency: int, max_tokens: int
) -> float:
    """Tokens per millisecond of DCUT over plain decoding's, both replayed.

    A benchmark's time holds prefills too. Its prompts are in the prefix cache, so that each costs
    both about the same, a forward of one row; that is added to what is replayed.

    Args:
        bank: texts of the benchmark's prompts.
        table: costs of the server that is to be predicted.
        concurrency: requests at once.
        max_tokens: after which texts are cut, all alike.
    """
    bank = bank.first_tokens(max_tokens)
    ours = replay_controlled(
        bank,
        table,
        concurrency,
        skip_steps=_SKIP_STEPS,
        num_tokens=_NUM_TOKENS,
        num_worlds=_NUM_WORLDS,
    )
    cost = StepCost(table, concurrency)
    (plain,) = replay(bank, Plain(), cost, num_tokens=_NUM_TOKENS, num_worlds=_NUM_WORLDS)
    prefill_ms = float(table.verify(1, 1, float(bank.prompt_len.mean())))
    per_token_ms = prefill_ms / float(np.diff(bank.start).mean())
    return (1 / plain.tokens_per_ms + per_token_ms) / (1 / ours.tokens_per_ms + per_token_ms)
