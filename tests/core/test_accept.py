"""Greedy acceptance: what is accepted, the bonus at the cut, and the emitted stream."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from dcut_sglang.accept import Accepted
from dcut_sglang.accept import accept as accept_rows


def packed_index(verify_lens: list[int], block_size: int) -> torch.Tensor:
    """Places of the packed rows in the flattened [bs, D] window, request by request."""
    rows = [i * block_size + t for i, n in enumerate(verify_lens) for t in range(n)]
    return torch.tensor(rows, dtype=torch.int64)


def accept(block: list[list[int]], target: list[list[int]], verify_lens: list[int]) -> Accepted:
    """``target`` holds a token for each row of the window; only the verified ones are passed."""
    index = packed_index(verify_lens, len(block[0]))
    return accept_rows(
        torch.tensor(block),
        torch.tensor(target).reshape(-1)[index],
        index,
        torch.tensor(verify_lens, dtype=torch.int32),
    )


def emitted(accepted: Accepted, i: int) -> list[int]:
    return accepted.out_tokens[i, : accepted.num_emitted[i]].tolist()


def emitted_by_reference(block: list[int], target: list[int], verify_len: int) -> list[int]:
    out: list[int] = []
    for t in range(verify_len):
        out.append(target[t])
        if t + 1 == verify_len or block[t + 1] != target[t]:
            break
    return out


@pytest.mark.parametrize(
    "target, verify_len, expected",
    [
        ([1, 2, 3, 9], 4, [1, 2, 3, 9]),  # all drafts right: the bonus follows the last draft
        ([1, 2, 3, 9], 3, [1, 2, 3]),  # right beyond the cut too: the bonus is the cut's row
        ([1, 2, 3, 9], 1, [1]),
        ([1, 7, 3, 9], 4, [1, 7]),  # a right draft after a wrong one does not count
        ([1, 7, 3, 9], 2, [1, 7]),
        ([7, 2, 3, 9], 4, [7]),
        ([0, 0, 0, 0], 4, [0]),
    ],
)
def test_known_answers(target: list[int], verify_len: int, expected: list[int]) -> None:
    accepted = accept([[5, 1, 2, 3]], [target], [verify_len])
    assert emitted(accepted, 0) == expected
    assert accepted.bonus.tolist() == expected[-1:]
    assert accepted.out_tokens.shape == (1, 4)


@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
@pytest.mark.parametrize("bs", [1, 3, 13])
@pytest.mark.parametrize("vocab", [1, 2, 4])
def test_agrees_with_the_per_request_reference(bs: int, block_size: int, vocab: int) -> None:
    for _ in range(5):
        block = torch.randint(vocab, (bs, block_size)).tolist()
        target = torch.randint(vocab, (bs, block_size)).tolist()
        lens = torch.randint(1, block_size + 1, (bs,)).tolist()
        accepted = accept(block, target, lens)
        for i in range(bs):
            expected = emitted_by_reference(block[i], target[i], lens[i])
            assert emitted(accepted, i) == expected
            assert accepted.bonus[i] == expected[-1]
            assert accepted.num_emitted[i] == len(expected) == accepted.num_drafts[i] + 1


def test_dtypes_order_of_rows_and_inputs() -> None:
    block = torch.randint(2, (6, 8))
    lens = torch.randint(1, 9, (6,))
    index = packed_index(lens.tolist(), 8)
    target = torch.randint(2, (len(index),))
    before = block.clone()
    reference = accept_rows(block, target, index, lens)
    order = torch.randperm(len(index))
    other = accept_rows(block, target[order].int(), index[order], lens.int())
    assert torch.equal(block, before)
    for name in ("num_drafts", "out_tokens", "bonus"):
        got = getattr(other, name)
        assert got.dtype == torch.int64
        assert torch.equal(got, getattr(reference, name))


def test_drafts_beyond_the_cut_do_not_change_what_is_emitted() -> None:
    block = torch.randint(3, (4, 6))
    target = torch.randint(3, (4, 6)).tolist()
    lens = [1, 3, 4, 6]
    reference = accept(block.tolist(), target, lens)
    for i, n in enumerate(lens):
        block[i, n:] = 99
    other = accept(block.tolist(), target, lens)
    assert [emitted(other, i) for i in range(4)] == [emitted(reference, i) for i in range(4)]


def test_plain_passes_behind_one_another() -> None:
    def plain_pass(tokens: list[int]) -> Accepted:
        block = torch.zeros((2, 5), dtype=torch.int64)
        return accept_rows(
            block, torch.tensor(tokens), torch.tensor([0, 5]), torch.ones(2, dtype=torch.int32)
        )

    first = plain_pass([3, 4])
    both = first.then(torch.tensor([5, 6])).then(torch.tensor([7, 8]))
    assert both.out_tokens[:, :3].tolist() == [[3, 5, 7], [4, 6, 8]]
    assert both.num_emitted.tolist() == [3, 3] and both.num_drafts.tolist() == [0, 0]
    assert both.bonus.tolist() == [7, 8] and both.num_passes == 3
    # What the first pass gave is not changed.
    assert first.out_tokens[:, :2].tolist() == [[3, 0], [4, 0]] and first.num_emitted[0] == 1


# -- a whole generation against plain decoding -------------------------------------------------

VOCAB = 7


def next_token(text: list[int]) -> int:
    """A deterministic toy target that depends on the whole text."""
    state = len(text)
    for token in text:
        state = (state * 31 + token * token + 5) % 10_007
    return state % VOCAB


def plain_decode(prompt: list[int], num_tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(next_token(text))
    return text[len(prompt) :]


def draft_block(text: list[int], block_size: int, quality: float) -> list[int]:
    """The anchor and drafts, each the target's own choice with probability ``quality``."""
    block = [text[-1]]
    for _ in range(block_size - 1):
        right = next_token(text + block[1:])
        block.append(right if random.random() < quality else random.randrange(VOCAB))
    return block


@pytest.mark.parametrize(
    "choose_len",
    [lambda d: random.randint(1, d), lambda d: d, lambda d: 1, lambda d: random.choice((1, d))],
    ids=["random", "full", "plain", "plain-or-full"],
)
@pytest.mark.parametrize("quality", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("block_size", [2, 8])
def test_the_stream_equals_plain_decoding(
    block_size: int, quality: float, choose_len: Callable[[int], int]
) -> None:
    prompts = [[3], [1, 4, 1], [5, 9, 2, 6, 5]]
    num_tokens = 40
    texts = [[*prompt, next_token(prompt)] for prompt in prompts]
    while min(len(t) - len(p) for t, p in zip(texts, prompts, strict=True)) < num_tokens:
        blocks = [draft_block(text, block_size, quality) for text in texts]
        # The target never sees the rows beyond the cut: they hold a token it does not know.
        lens = [choose_len(block_size) for _ in texts]
        target = [
            [next_token(text + block[1 : t + 1]) if t < n else -1 for t in range(block_size)]
            for text, block, n in zip(texts, blocks, lens, strict=True)
        ]
        accepted = accept(blocks, target, lens)
        for i, text in enumerate(texts):
            chunk = emitted(accepted, i)
            assert len(chunk) == lens[i] or quality < 1.0
            text.extend(chunk)
    for prompt, text in zip(prompts, texts, strict=True):
        stream = text[len(prompt) :]
        assert stream == plain_decode(prompt, len(stream))
