"""A sample of the vocabulary for the training loss."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dcut_sglang.training.responses import Response


def own_tokens(responses: Sequence[Response]) -> Tensor:
    """Returns the target's own part of responses, one behind the other: int64."""
    return torch.cat([r.token_ids[r.num_prompt_tokens :] for r in responses])


def used_tokens(responses: Sequence[Response]) -> Tensor:
    """Returns the tokens that occur in the target's own part of responses: int64, ascending."""
    return own_tokens(responses).unique()


def worth_drafting(
    responses: Sequence[Response], learnt_before: Collection[int], vocab_size: int
) -> tuple[int, ...]:
    """Returns the tokens that a drafter of these responses should propose, ascending.

    A token seen once is hardly ever drafted and never learnt, but costs a row of the draft head in
    every step. Those that the drafter knew before and that do not occur here stay. Empty if most
    of the vocabulary would be in it: then a list saves nothing.
    """
    counts = torch.bincount(own_tokens(responses), minlength=vocab_size)
    kept = {token for token in learnt_before if counts[token] != 1}
    kept |= set((counts > 1).nonzero()[:, 0].tolist())
    return tuple(sorted(kept)) if 2 * len(kept) < vocab_size else ()


class VocabularySample:
    """All used tokens and, drawn anew for each step, a few of the others.

    The others stand for the whole rest: their logits get log(rest / drawn) added, so that the
    softmax over the sample estimates the softmax over the vocabulary. `place_of`: int64 [vocab],
    where a used token stands in the sample; -1 for all others.
    """

    def __init__(self, used: Tensor, vocab_size: int, num_extra: int) -> None:
        """used: int64 [u], ascending and unique."""
        self._used = used
        self.place_of = torch.full((vocab_size,), -1)
        self.place_of[used] = torch.arange(len(used))
        self._rest = (self.place_of < 0).nonzero()[:, 0]
        self._num_extra = min(num_extra, len(self._rest))
        share = len(self._rest) / max(self._num_extra, 1)
        self._correction = torch.zeros(len(used) + self._num_extra)
        self._correction[len(used) :] = math.log(share) if self._num_extra else 0.0

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns token ids int64 [n] and what to add to their logits, float32 [n]."""
        if not self._num_extra:
            return self._used, self._correction
        extra = torch.randint(len(self._rest), (self._num_extra,), generator=generator)
        return torch.cat([self._used, self._rest[extra]]), self._correction
