"""Pruning does not change what is sampled: counts against known probabilities."""

from __future__ import annotations

import itertools

import pytest
import torch
from toy_target import LOGITS, VOCAB, decode, filtered, tail_probability, text_probabilities

FILTERS = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 2.0},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.3},
    "all": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
}
RATIOS = (0.0, 0.25, 0.5, 1.0)
CELLS = list(itertools.product(FILTERS, (1, 4), RATIOS))
# One chance in ten thousand that a right implementation fails, over all cells.
LEVEL = 1e-4 / len(CELLS)
DRAWS = 24_000


def toy_rows(name: str) -> torch.Tensor:
    return torch.stack([filtered(row, **FILTERS[name]) for row in LOGITS])


@pytest.mark.parametrize(("name", "bs", "ratio"), CELLS)
def test_texts_have_the_targets_probabilities(name: str, bs: int, ratio: float) -> None:
    torch.manual_seed(CELLS.index((name, bs, ratio)))
    rows = toy_rows(name)
    texts = decode(
        DRAWS // bs,
        bs,
        ratio,
        length=3,
        draw=lambda index, request, last: torch.multinomial(rows[last], 1).view(-1),
    )
    assert texts.shape[0] == DRAWS
    assert tail_probability(texts, text_probabilities(rows, 0, 3)) > LEVEL


def test_the_test_sees_what_greedy_verification_does() -> None:
    """A target's choice that is not drawn, and one drawn at a slightly wrong temperature."""
    rows = toy_rows("temperature")
    wrong = torch.stack([filtered(row, temperature=0.85) for row in LOGITS])
    for draw in (
        lambda index, request, last: rows[last].argmax(dim=-1),
        lambda index, request, last: torch.multinomial(wrong[last], 1).view(-1),
    ):
        texts = decode(DRAWS // 4, 4, 0.5, length=3, draw=draw)
        assert tail_probability(texts, text_probabilities(rows, 0, 3)) < LEVEL


def test_the_test_sees_lengths_that_follow_the_draws() -> None:
    """Redrawing a row whenever its draft was refused favours drafts."""
    rows = toy_rows("temperature")

    def favour_drafts(
        index: torch.Tensor, request: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        from toy_target import DRAFTS

        first, second = torch.multinomial(rows[last], 2, replacement=True).unbind(dim=1)
        return torch.where(first == DRAFTS[last], first, second)

    texts = decode(DRAWS // 4, 4, 0.5, length=3, draw=favour_drafts)
    assert tail_probability(texts, text_probabilities(rows, 0, 3)) < LEVEL


def test_toy_probabilities_add_up() -> None:
    for name in FILTERS:
        probabilities = text_probabilities(toy_rows(name), 0, 3)
        assert probabilities.numel() == VOCAB**3
        assert float(probabilities.sum()) == pytest.approx(1.0)
