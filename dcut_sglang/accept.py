"""Acceptance over packed rows, capped at each request's verify length."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Accepted:
    """What a step emits.

    Attributes:
        num_drafts: int64 [bs], accepted drafts, 0..n[i]-1.
        out_tokens: int64 [bs, D], the emitted tokens of request i in its first
            ``num_emitted[i]`` columns; what follows is not part of the output.
        bonus: int64 [bs], the last emitted token, the next step's anchor.
        num_passes: forwards of the target; more than one in plain steps only.
    """

    num_drafts: torch.Tensor
    out_tokens: torch.Tensor
    bonus: torch.Tensor
    num_passes: int = 1

    @property
    def num_emitted(self) -> torch.Tensor:
        """Tokens that each request emits, one per pass on top of its drafts: int64 [bs]."""
        return self.num_drafts + self.num_passes

    def then(self, chosen: torch.Tensor) -> Accepted:
        """This plain step, and a further pass that chose int64 [bs]. No host sync."""
        out_tokens = self.out_tokens.clone()
        out_tokens[:, self.num_passes] = chosen
        return replace(self, out_tokens=out_tokens, bonus=chosen, num_passes=self.num_passes + 1)


def accept(
    block_tokens: torch.Tensor,
    target_tokens: torch.Tensor,
    index: torch.Tensor,
    verify_lens: torch.Tensor,
) -> Accepted:
    """Keep drafts while they equal the token that the target chose, then emit one of its own.

    Row t's token is chosen from the target's distribution behind drafts 1..t: its largest
    logit, or a draw. Every emitted token is thus the target's choice behind exactly the tokens
    before it, draft or not: a draft that is kept *is* the token chosen at the row before it,
    and the row at the cut, or at the first mismatch, is an ordinary target row whose token is
    emitted whatever it is. So a step emits what plain decoding would emit, token for token when
    choices are greedy or keyed by seed and position, and with the same distribution when they
    are fresh draws.

    The cut changes neither. Drafts are argmax and verify lengths are fixed before any row is
    drawn, so both are functions of what was emitted before the step; given that, the draw at a
    row is independent of the cut, and the cut only decides how many rows are asked for. It is
    the length of a step that depends on the draws, never a draw on the length. (With sampled
    drafts, or lengths chosen after looking at draws, this would fail.)

    Args:
        block_tokens: int64 [bs, D], anchor and drafts.
        target_tokens: int64 [rows], the target's choice after each packed row.
        index: int64 [rows], place of each row in the flattened [bs, D] window: exactly the
            first n[i] places of every request, each once.
        verify_lens: int [bs], n[i] = 1 + kept drafts.

    No host sync.
    """
    bs, block_size = block_tokens.shape
    if len(index) == bs:  # a plain step: the anchors' rows alone
        bonus = target_tokens.to(torch.int64)
        out_tokens = torch.zeros_like(block_tokens)
        out_tokens[:, 0] = bonus
        return Accepted(torch.zeros_like(bonus), out_tokens, bonus)
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
