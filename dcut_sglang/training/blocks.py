"""Blocks of a drafter: their tokens, their attention mask and their loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def block_mask(anchors: Tensor, block_size: int, num_context: int) -> Tensor:
    """Returns which keys each block token attends to: bool [B, N * D, num_context + N * D]."""
    batch, num_blocks = anchors.shape
    places = torch.arange(num_context, device=anchors.device)
    to_context = (places < anchors[:, :, None]).repeat_interleave(block_size, dim=1)
    block = torch.arange(num_blocks, device=anchors.device).repeat_interleave(block_size)
    to_block = (block[:, None] == block).expand(batch, -1, -1)
    return torch.cat([to_context, to_block], dim=-1)


def block_token_ids(
    token_ids: Tensor, anchors: Tensor, block_size: int, mask_token_id: int
) -> Tensor:
    """Returns the drafter's input: int64 [B, N, D], the anchor's token and then masks."""
    blocks = token_ids.new_full((*anchors.shape, block_size), mask_token_id)
    blocks[:, :, 0] = token_ids.gather(1, anchors)
    return blocks


def draft_weights(num_drafts: int, gamma: float) -> Tensor:
    """Returns exp(-(k-1)/gamma) for drafts k = 1..num_drafts: float32 [num_drafts].

    A draft counts only if all in front of it are accepted, so early ones matter more.
    """
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / gamma)


def block_loss(
    logits: Tensor,
    labels: Tensor,
    valid: Tensor,
    gamma: float,
    taught: Tensor | None = None,
    taught_share: float = 0.0,
) -> Tensor:
    """Weighted mean cross-entropy of the drafts.

    logits: [..., D-1, vocab]; labels: int64 [..., D-1]; valid: bool [..., D-1], false behind the
    end of the text. `taught`: the target's own logits, of the same shape; its distribution takes
    `taught_share` of a label's place. Returns a scalar in nats.
    """
    weights = draft_weights(labels.shape[-1], gamma).to(logits.device) * valid
    chosen = valid.nonzero(as_tuple=True)
    truth = labels[chosen]
    if taught is not None and taught_share:
        shares = taught_share * taught[chosen].float().softmax(-1)
        own = shares.new_full((len(truth), 1), 1 - taught_share)
        truth = shares.scatter_add_(1, truth[:, None], own)
    loss = F.cross_entropy(logits[chosen].float(), truth, reduction="none")
    return (loss * weights[chosen]).sum() / weights.sum().clamp(min=1e-6)
