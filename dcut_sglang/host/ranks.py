"""Tensor-parallel ranks: one decides, the others receive; a vocabulary in shards, read as one.

Every rank runs the same forwards, whose collectives meet only if all ranks run the same rows.
What a step drafts for and how much it verifies depends on measured times and on floating-point
sums, so ranks must not choose for themselves: rank 0 chooses, also for the cost probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sglang.srt.layers.dp_attention import get_dp_tp_group

from dcut_sglang.stages import Stages
from dcut_sglang.value import BoolArray, Float32Array, IntArray

T = TypeVar("T")


class RankError(RuntimeError):
    """Rank 0 could not go on; the other ranks end with it, and with its reason."""


class Ranks:
    """The tensor-parallel group of this process; with one rank, everything is local."""

    def __init__(self, group: Any | None = None) -> None:
        self.group = get_dp_tp_group() if group is None else group
        self.size = int(self.group.world_size)
        self.decides = self.group.rank_in_group == 0

    def decided(self, decide: Callable[[], T]) -> T:
        """What ``decide`` returns on rank 0, on every rank.

        Only rank 0 calls it. The value travels pickled through the group's host channel, so it
        should be small; a tensor in it is copied to the host.
        """
        if self.size == 1:
            return decide()
        return self.group.broadcast_object(decide() if self.decides else None)

    def lengths_decided(
        self, decide: Callable[[], tuple[torch.Tensor, int, T]], bs: int, device: torch.device
    ) -> tuple[torch.Tensor, int, T | None]:
        """Verify lengths int32 [bs] and their sum as rank 0 decides, reasons on rank 0 only.

        The lengths travel on the device; only their sum goes through the host.
        """
        if self.size == 1:
            return decide()
        if self.decides:
            verify_lens, num_rows, reasons = decide()
        else:
            verify_lens, num_rows = torch.empty(bs, dtype=torch.int32, device=device), 0
            reasons = None
        num_rows = self.group.broadcast_object(num_rows)
        self.group.broadcast(verify_lens)
        return verify_lens, num_rows, reasons

    def led(self, call: Callable[..., Any], work: Callable[[Callable[..., Any]], T]) -> T:
        """``work(call)`` on rank 0, while the others repeat its every call of ``call``.

        For work whose course only rank 0 can know (the clock, the confidences), made of calls
        that have collectives inside. Arguments and the result travel pickled; what ``call``
        returns does not.

        Raises:
            RankError: on the other ranks, when ``work`` raised on rank 0 (there, the error
                itself).
        """
        if self.size == 1:
            return work(call)
        if not self.decides:
            while True:
                kind, content = self.group.broadcast_object()
                if kind == "result":
                    return content
                if kind == "error":
                    raise RankError(f"tensor-parallel rank 0 stopped: {content}")
                call(*content)

        def announced(*args: Any) -> Any:
            self.group.broadcast_object(("call", args))
            return call(*args)

        try:
            result = work(announced)
        except BaseException as error:
            self.group.broadcast_object(("error", f"{type(error).__name__}: {error}"))
            raise
        self.group.broadcast_object(("result", result))
        return result

    def best_of_shards(
        self, top: torch.Tensor, token: torch.Tensor, total: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join what each rank found in its own shard of the vocabulary.

        All ranks compute from the same gathered numbers, so all get the same. Equal maxima go to
        the lowest rank, hence to the lowest token id, as ``max`` over a whole row does.

        Args:
            top: float32 [rows], largest logit of the shard.
            token: int64 [rows], its id in the whole vocabulary.
            total: float32 [rows], sum over the shard of exp(logit - top).

        Returns:
            token int64 [rows] and total float32 [rows] of the whole vocabulary. No host sync.
        """
        if self.size == 1:
            return token, total
        rows = top.numel()
        # One collective for all three. Token ids are below 2**24, exact in float32.
        local = torch.stack([top, token.to(top.dtype), total])
        joined = torch.empty((self.size * 3, rows), dtype=top.dtype, device=top.device)
        self.group.all_gather_into_tensor(joined, local)
        tops, tokens, totals = joined.view(self.size, 3, rows).unbind(dim=1)
        best, rank = tops.max(dim=0)
        token = tokens.gather(0, rank[None])[0].to(torch.int64)
        return token, (totals * torch.exp(tops - best)).sum(dim=0)


class LedStages:
    """The head's stages as rank 0 decides them, on every rank."""

    def __init__(self, ranks: Ranks, stages: Stages) -> None:
        self._ranks = ranks
        self._stages = stages

    def next(self, survival: Float32Array, places: IntArray) -> tuple[BoolArray, int]:
        return self._ranks.decided(lambda: self._stages.next(survival, places))
