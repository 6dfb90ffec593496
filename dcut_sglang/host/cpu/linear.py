"""Linear layers whose weights are packed once; a CPU's GEMM would pack them in every call.

MKL copies a float32 weight into its own layout whenever there are 2 or more rows. Below some 32
rows that takes longer than the product: on a Zen 3, the layers of a 135M model take twice as long
for 2 rows as for 1, so that verifying a single draft costs a whole step. oneDNN's packed weights
make few rows as cheap as memory bandwidth allows. The same holds for bf16 on a CPU that has it:
packed, 1 to 16 rows take half the time (Zen 5). Every server on a CPU gets this, with and without
speculation. Sums are formed in another order, as they are between batch sizes anyway.

A packed weight is a copy. It is made at a layer's first call, and made anew after SGLang has
updated weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dcut_sglang.host import weights

# Rows for which the layout is chosen; on Zen 3, that for 16 is within noise of the best from 1 to
# 512 rows.
_LAYOUT_ROWS = 16
# Smaller weights stay in the cache, where copying them costs nothing.
_MIN_ELEMENTS = 1 << 18
_ATTRIBUTE = "_dcut_packed"


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias.

    Args:
        x: [..., in].
        weight: [out, in]; carries its packed copy as an attribute.
    """
    return _product(x, weight, bias) if _can_pack(x, weight) else F.linear(x, weight, bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    version, packed = getattr(weight, _ATTRIBUTE, (-1, None))
    if version != weights.version():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _LAYOUT_ROWS)
        setattr(weight, _ATTRIBUTE, (weights.version(), packed))
    rows = x.reshape(-1, x.shape[-1])
    out = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return out.view(*x.shape[:-1], weight.shape[0])


def _can_pack(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and x.dtype == weight.dtype
        and (x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and _has_bf16()))
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.numel() >= _MIN_ELEMENTS
        and x.numel() > 0
    )


@functools.cache
def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def apply_linear(
    apply: Callable[..., torch.Tensor],
    method: Any,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """AROUND hook on ``UnquantizedLinearMethod.apply``."""
    weight = layer.weight
    if isinstance(weight, torch.Tensor) and _can_pack(x, weight):
        return _product(x, weight, bias)
    return apply(method, layer, x, bias)


def compute_lm_head(
    compute: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """AROUND hook on ``LogitsProcessor._compute_lm_head``: a plain head."""
    weight = getattr(lm_head, "weight", None)
    if (
        isinstance(weight, torch.Tensor)
        and not hasattr(lm_head, "apply_lora")
        and processor.rl_on_policy_target is None
        and _can_pack(hidden_states, weight)
    ):
        return _product(hidden_states, weight, None)
    return compute(processor, hidden_states, lm_head, *args, **kwargs)
