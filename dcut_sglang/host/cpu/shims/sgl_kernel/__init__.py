"""The operators of sgl-kernel's CPU build that SGLang reaches without AMX, in plain torch.

No CPU build of sgl-kernel is on PyPI. Where one is installed it wins: this stand-in then
replaces itself with it. Every operator that is not here raises when it is called, by name,
so a path that needs one fails with a sentence instead of a wrong result.
"""

import ctypes
from typing import Any

import _next_on_path
import torch

IS_DCUT_STAND_IN = True


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the packed slots ``out_cache_loc`` into rows ``[start, end)`` of ``req_to_token``."""
    offset = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        length = end - start
        req_to_token[row, start:end] = out_cache_loc[offset : offset + length].to(
            req_to_token.dtype
        )
        offset += length


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Pack rows ``[start, end)`` of ``req_to_token`` into ``out_cache_loc``."""
    offset = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        length = end - start
        out_cache_loc[offset : offset + length] = req_to_token[row, start:end].to(
            out_cache_loc.dtype
        )
        offset += length


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy KV rows ``src_loc`` to ``tgt_loc`` in every buffer; ``strides`` are bytes per row."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        # Read all rows first: sources and targets may overlap.
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU stand-in here; install a CPU build of sgl-kernel, "
            "or leave out the option that needs it"
        )

    missing.__name__ = name
    return missing


# A CUDA build on a machine without CUDA fails to import, or lacks the CPU operators: then the
# stand-in stays.
_next_on_path.load("sgl_kernel", usable=lambda real: hasattr(real, "assign_req_to_token_pool_cpu"))
