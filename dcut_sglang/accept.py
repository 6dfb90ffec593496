"""Greedy acceptance over packed rows, capped at each request's verify length."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Accepted:
    """What a step emits.

    Attributes:
        num_drafts: int64 [bs], accepted drafts, 0..n[i]-1.
        out_tokens: int64 [bs, D], the emitted tokens of request i in its first
            ``num_drafts[i] + 1`` columns; what follows is not part of the output.
        bonus: int64 [bs], the last emitted token, the next step's anchor.
    """

    num_drafts: torch.Tensor
    out_tokens: torch.Tensor
    bonus: torch.Tensor

    @property
    def num_emitted(self) -> torch.Tensor:
        """Tokens that each request emits, the bonus included: int64 [bs]."""
        return self.num_drafts + 1


def accept_greedy(
    block_tokens: torch.Tensor,
    target_tokens: torch.Tensor,
    index: torch.Tensor,
    verify_lens: torch.Tensor,
) -> Accepted:
    """Keep drafts while they equal the target's choice, then emit one token of the target.

    The row at the cut is an ordinary target row, so the bonus token taken there is what plain
    decoding would have produced: the cut costs drafts, never correctness.

    Args:
        block_tokens: int64 [bs, D], anchor and drafts.
        target_tokens: int64 [rows], the target's choice after each packed row.
        index: int64 [rows], place of each row in the flattened [bs, D] window: exactly the
            first n[i] places of every request, each once.
        verify_lens: int [bs], n[i] = 1 + kept drafts.

    No host sync.
    """
    bs, block_size = block_tokens.shape
    dense = torch.zeros(bs * block_size, dtype=torch.int64, device=block_tokens.device)
    dense[index] = target_tokens.to(torch.int64)
    dense = dense.view(bs, block_size)
    # Row t predicts draft t + 1; a draft counts only if it was itself verified.
    verified = (
        torch.arange(1, block_size, device=block_tokens.device)
        < verify_lens.to(torch.int64)[:, None]
    )
    correct = (block_tokens[:, 1:] == dense[:, :-1]) & verified
    num_drafts = correct.to(torch.int64).cumprod(dim=1).sum(dim=1)
    bonus = dense.gather(1, num_drafts[:, None]).squeeze(1)
    out_tokens = torch.cat([block_tokens[:, 1:], torch.zeros_like(block_tokens[:, :1])], dim=1)
    out_tokens.scatter_(1, num_drafts[:, None], bonus[:, None])
    return Accepted(num_drafts, out_tokens, bonus)
