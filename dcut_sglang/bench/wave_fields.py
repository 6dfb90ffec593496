"""Row fields of a wave: tokens per time, latencies, outputs."""

from __future__ import annotations

import hashlib
from typing import Any

from dcut_sglang.bench.steady import StreamedWave, percentiles
from dcut_sglang.bench.waves import WaveResult

Row = dict[str, Any]


def rates(wave: WaveResult) -> Row:
    """Tokens, time and tokens per time."""
    has_cpu = wave.cpu_s == wave.cpu_s
    return {
        "tokens": wave.num_tokens,
        "wall_s": round(wave.wall_s, 4),
        "cpu_s": round(wave.cpu_s, 3) if has_cpu else None,
        "tokens_per_s": round(wave.num_tokens / wave.wall_s, 3),
        "tokens_per_cpu_s": _per(wave.num_tokens, wave.cpu_s) if has_cpu else None,
    }


def _per(num_tokens: int, cpu_s: float) -> float:
    return round(num_tokens / cpu_s, 3) if cpu_s else float("inf")


def from_wave(wave: StreamedWave, concurrency: int) -> Row:
    """Row fields of a closed-loop wave."""
    return {
        "overall": rates(wave.overall),
        "steady": rates(wave),
        "tokens_per_s_per_user": round(wave.tokens_per_s / concurrency, 3),
        "ttft_ms": percentiles([t.ttft_ms for t in wave.timelines]),
        "tpot_ms": percentiles([t.tpot_ms for t in wave.timelines]),
        "itl_ms": percentiles([gap for t in wave.timelines for gap in t.itl_ms]),
        "output_hashes": hashes(wave),
    }


def equality(row: Row, other: Row) -> dict[str, int]:
    """How many of a row's outputs are another row's, of the same requests."""
    pairs = list(zip(row["output_hashes"], other["output_hashes"], strict=True))
    return {"equal": sum(a == b for a, b in pairs), "of": len(pairs)}


def hashes(wave: WaveResult) -> list[str]:
    """Of each output, 12 digits."""
    return [hashlib.sha256(text.encode()).hexdigest()[:12] for text in wave.texts]
