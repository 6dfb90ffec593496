"""Penalties and minimum lengths along a block, against a loop over emitted tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_sglang.penalties import (
    Penalties,
    advance,
    counts_at_rows,
    forbid_early_stop,
    penalise,
)

VOCAB = 5
tokens = st.integers(0, VOCAB - 1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Emitted ids before the anchor, blocks, and verify lengths of a batch."""
    block_size = draw(st.integers(1, 6))
    emitted = draw(st.lists(st.lists(tokens, max_size=8), min_size=1, max_size=4))
    blocks = [draw(st.lists(tokens, min_size=block_size, max_size=block_size)) for _ in emitted]
    lens = [draw(st.integers(1, block_size)) for _ in emitted]
    return emitted, blocks, lens


def counted(ids: list[list[int]]) -> torch.Tensor:
    return torch.stack(
        [torch.bincount(torch.tensor(i, dtype=torch.int64), minlength=VOCAB).float() for i in ids]
    )


def rows_of(lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    request = [i for i, n in enumerate(lens) for _ in range(n)]
    depth = [t for n in lens for t in range(n)]
    return torch.tensor(request), torch.tensor(depth)


def by_loop(logits: list[float], seen: list[int], f: float, p: float, r: float) -> list[float]:
    """One row by the definitions, token by token."""
    out = []
    for token, logit in enumerate(logits):
        count = seen.count(token)
        value = logit - f * count - (p if count else 0)
        if count:
            value = value * r if value < 0 else value / r
        out.append(value)
    return out


@settings(deadline=None, max_examples=150)
@given(cases(), st.data())
def test_each_row_sees_its_own_past(
    case: tuple[list[list[int]], list[list[int]], list[int]], data: st.DataObject
) -> None:
    emitted, blocks, lens = case
    n = len(emitted)
    one = st.floats(-2, 2, width=32)
    frequency, presence = (data.draw(st.lists(one, min_size=n, max_size=n)) for _ in "fp")
    repetition = data.draw(st.lists(st.floats(0.5, 2, width=32), min_size=n, max_size=n))
    request, depth = rows_of(lens)
    logits = torch.randn(len(request), VOCAB)
    counts = counts_at_rows(counted(emitted), torch.tensor(blocks), request, depth)
    penalties = Penalties(*map(torch.tensor, (frequency, presence, repetition)))
    found = penalise(logits.clone(), counts, penalties.of(request))
    for row, (i, t) in enumerate(zip(request.tolist(), depth.tolist(), strict=True)):
        seen = emitted[i] + blocks[i][: t + 1]
        expected = by_loop(logits[row].tolist(), seen, frequency[i], presence[i], repetition[i])
        assert found[row].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(deadline=None, max_examples=80)
@given(cases(), st.data())
def test_counts_advance_by_what_was_emitted(
    case: tuple[list[list[int]], list[list[int]], list[int]], data: st.DataObject
) -> None:
    """Step by step over several steps, the counts are those of the emitted ids."""
    emitted, blocks, lens = case
    counts = counted(emitted)
    for _ in range(3):
        num_emitted = [data.draw(st.integers(1, n)) for n in lens]
        counts = advance(counts, torch.tensor(blocks), torch.tensor(num_emitted))
        emitted = [e + b[:k] for e, b, k in zip(emitted, blocks, num_emitted, strict=True)]
        assert counts.equal(counted(emitted))


def test_no_penalty_changes_nothing() -> None:
    logits = torch.randn(3, VOCAB)
    nothing = Penalties(torch.zeros(3), torch.zeros(3), torch.ones(3))
    assert penalise(logits.clone(), torch.ones(3, VOCAB), nothing).equal(logits)


@pytest.mark.parametrize("num_before", range(6))
def test_stops_are_impossible_until_the_minimum(num_before: int) -> None:
    stops = torch.tensor([[False, True, False, True, False]])
    logits = forbid_early_stop(
        torch.zeros(1, VOCAB), stops, torch.tensor([num_before]), torch.tensor([3])
    )
    # With two tokens out the next is the third: it must not stop; with three out it may.
    assert torch.isinf(logits).equal(stops & (num_before < 3))


def test_dtype_and_device_of_logits_are_kept() -> None:
    logits = torch.randn(2, VOCAB).to(torch.bfloat16)
    penalties = Penalties(*(torch.full((2,), v) for v in (0.5, 0.1, 1.2)))
    assert penalise(logits, torch.ones(2, VOCAB), penalties).dtype == torch.bfloat16
