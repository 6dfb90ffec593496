"""Per-request adjustments of the target's logits, applied to packed rows."""

from __future__ import annotations

from typing import Any

import torch


def adjust_logits(logits: torch.Tensor, sampling_info: Any, request: torch.Tensor) -> torch.Tensor:
    """Add each request's logit bias to all of its rows.

    Args:
        logits: [rows, vocab].
        sampling_info: SGLang's SamplingBatchInfo of the batch, or None.
        request: int64 [rows], request of each row.

    What depends on the tokens emitted so far (penalties, minimum lengths, grammar) is refused
    at the door (``host/requests.py``). No host sync.
    """
    bias = getattr(sampling_info, "logit_bias", None)
    return logits if bias is None else logits + bias[request].to(logits.dtype)
