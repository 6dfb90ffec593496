"""Masks of packed rows, with the cut before, at and behind an illegal draft. No server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcut_sglang.host.grammar import StepGrammar

VOCAB, BLOCK = 40, 5


class Counting:
    """A matcher that allows one token at each place, number ``place + 1``; ends at ``end``."""

    def __init__(self, place: int, end: int) -> None:
        self.place, self.end = place, end
        self.finished = False

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
        return torch.full((batch_size, (vocab_size + 31) // 32), -1, dtype=torch.int32)

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = 0
        token = self.place + 1
        mask[row, token // 32] = 1 << token % 32

    def accept_token(self, token: int) -> None:
        assert token == self.place + 1, "only what the mask allows is tried"
        self.place += 1

    def rollback(self, count: int) -> None:
        self.place -= count

    def is_terminated(self) -> bool:
        return self.place >= self.end

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        allowed = vocab_mask[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
        logits.masked_fill_(allowed.view(len(logits), -1)[:, : logits.shape[1]] == 0, -torch.inf)


@pytest.mark.parametrize("wrong", range(1, BLOCK + 1), ids=lambda t: f"wrong draft {t}")
@pytest.mark.parametrize("verify_len", range(1, BLOCK + 1), ids=lambda n: f"cut at {n}")
@pytest.mark.parametrize("end", [7, 30], ids=["ends in the block", "goes on"])
def test_rows_up_to_the_illegal_draft_are_masked(wrong: int, verify_len: int, end: int) -> None:
    """Beside a request without a grammar, and behind the barrier that advances the matcher."""
    matcher = Counting(place=3, end=end)
    drafts = [5 + t for t in range(BLOCK)]  # anchor 5, then 6, 7, ...: legal from place 5 on
    if wrong < BLOCK:
        drafts[wrong] = 0
    blocks = torch.tensor([[9] * BLOCK, drafts])
    verify_lens = torch.tensor([2, verify_len], dtype=torch.int32)
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(grammar=None), SimpleNamespace(grammar=matcher)],
        sampling_info=SimpleNamespace(vocab_size=VOCAB, grammar_mask="of the prefill"),
    )
    index = torch.tensor([0, 1, *(BLOCK + t for t in range(verify_len))])

    def barrier() -> None:
        matcher.place = 5

    logits = torch.zeros(len(index), VOCAB)
    StepGrammar(blocks, verify_lens, VOCAB).apply(
        logits, batch, SimpleNamespace(index=index), barrier
    )
    assert matcher.place == 5, "the walk is undone"
    assert torch.isfinite(logits[:2]).all()
    for t in range(verify_len):
        allowed = torch.isfinite(logits[2 + t]).nonzero().view(-1).tolist()
        place = 5 + t
        if t < wrong and place < end:
            assert allowed == [place + 1]
        else:
            assert len(allowed) == VOCAB
