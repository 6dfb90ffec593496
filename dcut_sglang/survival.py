"""From the drafter's confidences to the K drafts of a batch that are most likely accepted.

Notation (D-Cut, section "Formulation"): c[i, t] is the confidence of draft t = 1..D-1 of
request i, and s[i, t] = c[i, 1] * ... * c[i, t] estimates the probability that drafts 1..t are
all accepted, which is the expected gain from verifying draft t. s never increases along a
request, so the K best (i, t) pairs of the batch form a prefix of every request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def survival(confidence: torch.Tensor) -> torch.Tensor:
    """Prefix products of the confidences.

    Args:
        confidence: float [bs, D-1], the drafter's probability of each of its own drafts.
            A non-finite entry counts as 0 and others are clamped to [0, 1]: a broken
            confidence may cost speed, never correctness.

    Returns:
        float32 [bs, D-1], non-increasing along each row. No host sync.
    """
    confidence = confidence.to(torch.float32)
    confidence = torch.where(confidence.isfinite(), confidence, 0.0).clamp(0.0, 1.0)
    return confidence.cumprod(dim=-1)


@dataclass(frozen=True)
class RankedDrafts:
    """All drafts of a batch, best first.

    Attributes:
        request: int64 [bs * (D-1)], request of the r-th best draft.
        expected_accepted: float32 [bs * (D-1) + 1], entry K is the sum of the K best
            survivals: the expected number of accepted drafts when K are kept.
        bs: number of requests.
        num_first: drafts that stand in front because of a floor.
    """

    request: torch.Tensor
    expected_accepted: torch.Tensor
    bs: int
    num_first: int = 0

    @property
    def num_drafts(self) -> int:
        return self.request.numel()

    def slowest_tokens(self) -> torch.Tensor:
        """Tokens that the request with the fewest is expected to emit, when K drafts are kept.

        Returns:
            float32 [bs * (D-1) + 1], at least 1 each: every request emits a token. No host sync.
        """
        gains = self.expected_accepted.diff()
        own = torch.arange(self.bs, device=self.request.device)[:, None] == self.request
        tokens = torch.ones_like(self.expected_accepted)
        if self.bs:
            tokens[1:] += (own * gains).cumsum(dim=1).amin(dim=0)
        return tokens

    def verify_lens(self, num_kept: int) -> torch.Tensor:
        """Verify lengths when the ``num_kept`` best drafts are kept.

        Returns:
            int32 [bs], 1 + kept drafts of each request, summing to bs + num_kept. No host sync.

        Raises:
            ValueError: ``num_kept`` outside 0..bs * (D-1).
        """
        if not 0 <= num_kept <= self.num_drafts:
            raise ValueError(f"num_kept must be in 0..{self.num_drafts}, got {num_kept}")
        lens = torch.ones(self.bs, dtype=torch.int32, device=self.request.device)
        return lens.index_add_(
            0, self.request[:num_kept], torch.ones_like(lens[:1]).expand(num_kept)
        )


def rank_drafts(survival: torch.Tensor, floors: torch.Tensor | None = None) -> RankedDrafts:
    """Rank the drafts of a batch by survival.

    Ties go to the earlier position, then to the earlier request, so the order is deterministic
    and a request's drafts are always taken from the front.

    Args:
        survival: float [bs, D-1], non-increasing along each row.
        floors: int [bs] on the host, so many drafts of each request stand in front of all
            others; none by default.

    Returns:
        the ranking, on the device of ``survival``. No host sync.
    """
    bs, depth = survival.shape
    # Position-major, so that a stable sort breaks ties by position before request.
    flat = survival.to(torch.float32).t().reshape(-1)
    if floors is None:
        num_first = 0
        values, order = torch.sort(flat, descending=True, stable=True)
    else:
        num_first = int(floors.sum())
        is_first = torch.arange(depth)[:, None] < floors.to(torch.int64)
        # Survivals are at most 1.
        keys = flat + 2.0 * is_first.reshape(-1).to(flat.device, torch.float32)
        order = torch.sort(keys, descending=True, stable=True).indices
        values = flat[order]
    expected = torch.zeros(flat.numel() + 1, dtype=torch.float32, device=flat.device)
    torch.cumsum(values, 0, out=expected[1:])
    return RankedDrafts(order % bs, expected, bs, num_first)


def keep_best(survival: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Verify lengths int32 [bs] that keep the ``num_kept`` best drafts of the batch."""
    return rank_drafts(survival).verify_lens(num_kept)


def num_kept_at_ratio(ratio: float, bs: int, block_size: int) -> int:
    """K = ceil(ratio * bs * (D-1)), the drafts that a ratio in 0..1 keeps over the whole batch.

    The product is rounded first, so that 0.1 * 30 keeps 3 drafts and not 4.
    """
    num_drafts = bs * (block_size - 1)
    return min(num_drafts, math.ceil(round(ratio * num_drafts, 9)))
