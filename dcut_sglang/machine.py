"""What this machine is, as far as costs and rows depend on it."""

from __future__ import annotations

from pathlib import Path

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}
_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc", "tbbmalloc_proxy")


def cpu_info() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    entry = path.read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in entry.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def allocator() -> str:
    """What serves this process's ``malloc``: ``libc``, or the name of a preloaded allocator."""
    path = Path("/proc/self/maps")
    mapped = path.read_text() if path.exists() else ""
    return next((name for name in _ALLOCATORS if f"/lib{name}" in mapped), "libc")


def fast_dtype() -> str:
    """The dtype in which this CPU multiplies matrices fastest.

    Without bf16 instructions, torch's bf16 GEMM runs at a tenth of its float32 speed.
    """
    flags = set(cpu_info().get("flags", "").split())
    return "bfloat16" if flags & _BFLOAT16_FLAGS else "float32"
