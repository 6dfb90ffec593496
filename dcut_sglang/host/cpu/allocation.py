"""KV allocation on a CPU, where SGLang would launch a Triton kernel."""

from __future__ import annotations

import torch


def get_last_loc(
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    """Slot of each request's last known token, -1 for an empty prefix: int [bs]."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
