"""Penalties for repeated tokens and minimum lengths, at every row of a verified block.

Row t of a request predicts the token behind drafts 1..t, so it sees what the request had
emitted before the step, its anchor, and those t drafts; a row counts only if its drafts are
accepted, and then they are what was emitted. The formulas are SGLang's
(srt/sampling/penaltylib), which plain decoding applies: what is subtracted first, then the
repetition penalty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Penalties:
    """Penalties of n requests (or rows), float32 [n] each; 0, 0 and 1 change nothing."""

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor

    def of(self, index: torch.Tensor) -> Penalties:
        """Those at ``index``, int64 [rows]: one per row instead of one per request."""
        return Penalties(self.frequency[index], self.presence[index], self.repetition[index])


def counts_at_rows(
    counts: torch.Tensor, blocks: torch.Tensor, request: torch.Tensor, depth: torch.Tensor
) -> torch.Tensor:
    """How often each token was emitted before each row's prediction.

    Args:
        counts: float32 [n, vocab], emitted before the step, without the anchor.
        blocks: int64 [n, D], anchor and drafts.
        request: int64 [rows], each row's place among the n.
        depth: int64 [rows], its place in the block, 0 for the anchor's row.

    Returns:
        float32 [rows, vocab]. No host sync.
    """
    at_rows = counts[request]
    seen = torch.arange(blocks.shape[1], device=depth.device) <= depth[:, None]
    return at_rows.scatter_add_(1, blocks[request], seen.to(at_rows.dtype))


def penalise(logits: torch.Tensor, counts: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Apply the penalties to ``logits`` [rows, vocab] in place, and return it.

    Args:
        counts: float32 [rows, vocab], see ``counts_at_rows``.
        penalties: one per row.
    """
    emitted = counts > 0
    logits -= penalties.frequency[:, None] * counts + penalties.presence[:, None] * emitted
    repetition = torch.where(emitted, penalties.repetition[:, None], 1.0)
    return logits.copy_(torch.where(logits < 0, logits * repetition, logits / repetition))


def advance(counts: torch.Tensor, blocks: torch.Tensor, num_emitted: torch.Tensor) -> torch.Tensor:
    """Count what a step put behind the request for good: the anchor and the accepted drafts.

    The bonus token is the next step's anchor and is counted then.

    Args:
        counts: float32 [n, vocab], changed in place and returned.
        blocks: int64 [n, D].
        num_emitted: int64 [n], accepted drafts + 1.

    No host sync.
    """
    kept = torch.arange(blocks.shape[1], device=blocks.device) < num_emitted[:, None]
    return counts.scatter_add_(1, blocks, kept.to(counts.dtype))


def forbid_early_stop(
    logits: torch.Tensor, stops: torch.Tensor, num_before: torch.Tensor, min_new: torch.Tensor
) -> torch.Tensor:
    """Make stop tokens impossible in rows whose prediction comes before the minimum length.

    Args:
        logits: [rows, vocab], changed in place and returned.
        stops: bool [rows, vocab], the tokens that would end the row's request.
        num_before: int64 [rows], tokens emitted before the row's prediction.
        min_new: int64 [rows].
    """
    return logits.masked_fill_(stops & (num_before < min_new)[:, None], float("-inf"))
