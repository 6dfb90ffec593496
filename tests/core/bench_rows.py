"""Rows of a benchmark that was never run: three arms, two loads, two passes, with known numbers."""

from __future__ import annotations

from typing import Any

from dcut_sglang.bench import rows as row_files
from dcut_sglang.cost import CostTable
from dcut_sglang.replay.cli import CPU_COSTS

# Tokens per CPU-second, by arm and concurrency; passes differ by 1 % either way.
SPEEDS = {
    "plain": {1: 10.0, 8: 40.0},
    "dflash": {1: 14.0, 8: 24.0},
    "dcut": {1: 15.0, 8: 44.0},
    "dcut-25": {1: 13.0, 8: 42.0},
    "dcut-100": {1: 14.0, 8: 25.0},
}
_CONDITIONS = row_files.conditions()
_COST_TABLE = CostTable.load(CPU_COSTS).to_json()
_DCUT_COUNTERS = {"requests_drafted": 40, "steps": 50, "block_size": 16}


def make_row(arm: str, concurrency: int | None, number: int, **changes: Any) -> dict[str, Any]:
    """One row, complete."""
    speed = SPEEDS[arm][concurrency or 1] * (1.01 if number else 0.99)
    part = {
        "tokens": 400,
        "wall_s": 400 / speed * 1.1,
        "cpu_s": 400 / speed,
        "tokens_per_s": speed / 1.1,
        "tokens_per_cpu_s": speed,
    }
    is_dcut, speculates = arm.startswith("dcut"), arm != "plain"
    row = {
        "schema": 1,
        "benchmark": "bench",
        **_CONDITIONS,
        "commit": "abc",
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "pair": "tiny",
        "model": {"path": "models/t", "sha256": "1"},
        "drafter": {"path": "models/d", "sha256": "2"} if speculates else None,
        "arm": arm,
        "server": "dcut" if is_dcut else arm,
        "flags": [],
        "knobs": {},
        "url": None,
        "seed": 0,
        "data": "mixed",
        "load": {"kind": "closed", "tokens": 48, "requests": 8, "ignore_eos": False},
        "concurrency": concurrency,
        "request_rate": None,
        "pass": number,
        "overall": part,
        "steady": dict(part),
        "tokens_per_s_per_user": speed / 1.1 / (concurrency or 1),
        "ttft_ms": {"p50": 100.0, "p99": 200.0},
        "tpot_ms": {"p50": 50.0, "p99": 80.0},
        "itl_ms": {"p50": 50.0, "p99": 90.0},
        "accept_length": 2.0 if speculates else None,
        "accept_histogram": [10, 20, 10] if speculates else None,
        "position_verified": [40, 30] if speculates else None,
        "position_accepted": [30, 10] if speculates else None,
        "steps": 50 if is_dcut else None,
        "rows_per_step": 12.0 if is_dcut else None,
        "keep_ratio": 0.4 if is_dcut else None,
        "keep_ratio_counts": {"0.40": 50} if is_dcut else None,
        "plain_share": 0.2 if is_dcut else None,
        "phase_ms": {"verify": 80.0} if is_dcut else None,
        "step_ms": {"predicted": 100.0, "measured": 110.0} if is_dcut else None,
        "step_sample": [[1, 4, 100.0, 110.0], [8, 20, 250.0, 240.0]] if is_dcut else None,
        "by_batch_size": [[1, 10, 100, 40, 2], [8, 40, 3000, 900, 8]] if is_dcut else None,
        "reliability": {
            "count": [10.0] * 10,
            "raw": [i + 0.5 for i in range(10)],
            "calibrated": [i + 0.2 for i in range(10)],
            "accepted": [float(i) for i in range(10)],
        }
        if is_dcut
        else None,
        "cost_table": _COST_TABLE if is_dcut else None,
        "dcut": dict(_DCUT_COUNTERS) if is_dcut else None,
        "output_hashes": ["a", "b"],
        "equal_to_plain": {"equal": 2, "of": 2},
    }
    return {**row, **changes}


def make_rows() -> list[dict[str, Any]]:
    """Every arm at both loads, in both passes."""
    return [
        make_row(arm, concurrency, number)
        for number in (0, 1)
        for concurrency in (1, 8)
        for arm in SPEEDS
    ]
