"""What tensor-parallel ranks exchange, on two threads in place of two processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from dcut_sglang.host.head import DraftHead, greedy_with_confidence  # noqa: E402
from dcut_sglang.host.metrics import StepTimer  # noqa: E402
from dcut_sglang.host.ranks import RankError, Ranks  # noqa: E402


class ThreadGroup:
    """The part of SGLang's GroupCoordinator that ``Ranks`` uses; all ranks share ``board``."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank_in_group, self.world_size = rank, len(board)
        self._board, self._barrier = board, barrier

    def _exchange(self, value: Any) -> list[Any]:
        self._board[self.rank_in_group] = value
        self._barrier.wait(timeout=30)
        seen = list(self._board)
        self._barrier.wait(timeout=30)
        return seen

    def broadcast_object(self, value: Any = None) -> Any:
        return self._exchange(value)[0]

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._exchange(tensor.clone())[0])

    def all_gather_into_tensor(self, output: torch.Tensor, local: torch.Tensor) -> None:
        output.copy_(torch.cat(self._exchange(local)))


def on_two_ranks(work: Callable[[Ranks], Any]) -> list[Any]:
    """Results, or the exceptions, of ``work`` on both ranks."""
    board, barrier = [None, None], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(work, Ranks(ThreadGroup(rank, board, barrier))) for rank in (0, 1)]
        return [job.exception() or job.result() for job in jobs]


def test_confidence_over_shards_equals_the_whole_vocabulary() -> None:
    hidden, head = torch.randn(33, 16), torch.randn(101, 16) * 3
    head[70] = head[12]  # a tie between shards goes to the lower id

    def shard(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        first = 0 if ranks.decides else 51
        rows = head[first : 51 if ranks.decides else None]
        return greedy_with_confidence(hidden, rows, StepTimer(), ranks=ranks, first_token=first)

    probabilities = torch.softmax(hidden @ head.t(), dim=-1)
    confidence, token = probabilities.max(dim=-1)
    for found_token, found_confidence in on_two_ranks(shard):
        assert torch.equal(found_token, token)
        torch.testing.assert_close(found_confidence, confidence)


def test_a_short_head_over_shards_equals_the_whole_one() -> None:
    """A shard that has none of the tokens drafts its first one."""
    hidden, weight = torch.randn(33, 16), torch.randn(101, 16) * 3
    for given, ids in (([0, 7, 50, 51, 100], [0, 7, 50, 51, 100]), ([1, 2, 30], [1, 2, 30, 51])):

        def shard(ranks: Ranks, given: list[int] = given) -> tuple[torch.Tensor, torch.Tensor]:
            first, end = (0, 51) if ranks.decides else (51, 101)
            indices = SimpleNamespace(org_vocab_start_index=first, num_org_elements=end - first)
            head = SimpleNamespace(weight=weight[first:end], shard_indices=indices)
            return DraftHead(head, ranks, torch.tensor(given))(hidden, StepTimer())

        share, place = torch.softmax(hidden @ weight[ids].t(), dim=-1).max(dim=-1)
        for token, confidence in on_two_ranks(shard):
            assert torch.equal(token, torch.tensor(ids)[place])
            torch.testing.assert_close(confidence, share)


def test_only_rank_0_chooses() -> None:
    def choose(ranks: Ranks) -> tuple[Any, Any]:
        value = 7 if ranks.decides else 8
        lengths = torch.full((3,), value, dtype=torch.int32)
        return (
            ranks.decided(lambda: value),
            ranks.lengths_decided(lambda: (lengths, value * 3, "why"), 3, torch.device("cpu")),
        )

    (first, (lens, num_rows, why)), (second, (lens_1, num_rows_1, why_1)) = on_two_ranks(choose)
    assert first == second == 7
    assert lens.tolist() == lens_1.tolist() == [7, 7, 7] and num_rows == num_rows_1 == 21
    assert why == "why" and why_1 is None


@pytest.mark.parametrize("fails", [False, True])
def test_the_others_repeat_what_rank_0_calls(fails: bool) -> None:
    calls: dict[bool, list[tuple[str, int]]] = {True: [], False: []}

    def lead(ranks: Ranks) -> str:
        def call(name: str, count: int) -> int:
            calls[ranks.decides].append((name, count))
            return count

        def work(call: Callable[..., Any]) -> str:
            assert ranks.decides, "only rank 0 knows the course"
            call("open", 2)
            if fails:
                raise ValueError("no table")
            return f"{call('verify', 9)} rows"

        return ranks.led(call, work)

    first, second = on_two_ranks(lead)
    assert calls[True] == calls[False] == [("open", 2), *([] if fails else [("verify", 9)])]
    if fails:
        assert isinstance(first, ValueError)
        assert isinstance(second, RankError) and "ValueError: no table" in str(second)
    else:
        assert first == second == "9 rows"
