"""The operators of sgl-kernel's CPU build that SGLang reaches without AMX, in plain torch.

No CPU build of sgl-kernel is on PyPI. Where one is installed it wins: this stand-in then
replaces itself with it. Every operator that is not here raises when it is called, by name,
so a path that needs one fails with a sentence instead of a wrong result.
"""

import ctypes
from typing import Any

import _next_on_path
import torch

from sgl_kernel._drafts import (
    assign_draft_cache_locs_contiguous_cpu,
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

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


def _murmur3_round(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One 32-bit block into the state of MurmurHash3 (x86, 32 bit); both int64 below 2**32.

    Products wrap modulo 2**64, which leaves their low 32 bits right.
    """
    mask = 0xFFFFFFFF
    block = (block * 0xCC9E2D51) & mask
    block = ((block << 15) | (block >> 17)) & mask
    state = state ^ ((block * 0x1B873593) & mask)
    state = ((state << 13) | (state >> 19)) & mask
    return (state * 5 + 0xE6546B64) & mask


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 of (seed, position, column): uint32 [n, m], the noise of seeded sampling.

    Args:
        seed: uint64 or int64 [n], hashed as two blocks, low first.
        positions: int [n].
        col_indices: int [m].
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed, seed >> 32, positions.to(torch.int64)):
        state = _murmur3_round(state, block & 0xFFFFFFFF)
    hashed = _murmur3_round(state[:, None], col_indices.to(torch.int64)[None, :] & 0xFFFFFFFF)
    hashed = hashed ^ 16  # bytes hashed
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _hash_shape(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    return seed.new_empty((seed.shape[0], col_indices.shape[0]), dtype=torch.uint32)


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


def _register_operators() -> None:
    """What SGLang calls as a torch operator, from inside compiled functions."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    torch.library.register_fake("sgl_kernel::murmur_hash32_cpu", _hash_shape, lib=library)
    _LIBRARIES.append(library)


# Registrations end with the object that made them.
_LIBRARIES: list[torch.library.Library] = []

# A CUDA build on a machine without CUDA fails to import, or lacks the CPU operators: then the
# stand-in stays.
if not _next_on_path.load(
    "sgl_kernel", usable=lambda real: hasattr(real, "assign_req_to_token_pool_cpu")
) and not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
    _register_operators()
