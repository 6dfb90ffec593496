"""The noise of a seed on a CPU is that of SGLang's GPU kernel."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from sglang.kernels.ops.sampling import murmur_hash


@pytest.fixture(scope="module")
def stand_in() -> ModuleType:
    """The stand-in for sgl_kernel, whether or not a real one hides it."""
    import sgl_kernel

    if getattr(sgl_kernel, "IS_DCUT_STAND_IN", False):
        return sgl_kernel
    pytest.skip("a CPU build of sgl-kernel is installed")


def by_the_definition(seed: int, position: int, column: int) -> int:
    """MurmurHash3, x86, 32 bits, of the sixteen bytes (seed, position, column), in integers."""
    mask, state = 0xFFFFFFFF, 0
    for block in (seed & mask, seed >> 32 & mask, position & mask, column & mask):
        block = block * 0xCC9E2D51 & mask
        block = (block << 15 | block >> 17) & mask
        state ^= block * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def test_hash_equals_the_definition(stand_in: ModuleType) -> None:
    seeds = torch.tensor([0, 1, 42, -1, 2**63 - 1, -(2**63), 123456789012345], dtype=torch.int64)
    positions = torch.tensor([0, 1, 2, 3, 100, 8191, 2**31 - 1])
    columns = torch.tensor([0, 1, 7, 49151, 151935])
    expected = [
        [by_the_definition(s, p, c) for c in columns.tolist()]
        for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    for given in (seeds, seeds.view(torch.uint64)):
        assert stand_in.murmur_hash32(given, positions, columns).tolist() == expected
    found = murmur_hash.murmur_hash32(seeds.view(torch.uint64), positions, columns)
    assert found.dtype == torch.uint32 and found.tolist() == expected
