"""Rows and traces for the tests of the report: small, made up, of every kind that is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dcut_sglang.candidates import Candidates
from dcut_sglang.trace import TraceWriter

BLOCK_SIZE = 8
# Something that would end the data's script element, and start a script of its own.
HOSTILE = "</script><script>window.attacked = true</script><!-- & \u2028 ' \""


def bench_row(arm: str, concurrency: int, rate: float, **more: Any) -> dict[str, Any]:
    """A row of ``make bench``."""
    return {
        "benchmark": "bench",
        "schema": 1,
        "time": "2026-11-30T00:00:00+00:00",
        "commit": "abc",
        "versions": {"sglang": "0.5.23", "torch": "2.13.0"},
        "machine": {"cpu": "test CPU", "cores": 2},
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "pair": "tiny",
        "arm": arm,
        "flags": ["--max-running-requests", "32", "--speculative-algorithm", "DCUT"],
        "data": "easy",
        "load": {"kind": "closed", "tokens": 40},
        "concurrency": concurrency,
        "request_rate": None,
        "pass": 0,
        "overall": {"tokens_per_s": rate * 0.9, "tokens_per_cpu_s": rate},
        "steady": {"tokens_per_s": rate, "tokens_per_cpu_s": rate * 1.1},
        "tokens_per_s_per_user": rate / concurrency,
        "ttft_ms": {"p50": 12.0, "p99": 30.0},
        "tpot_ms": {"p50": 5.0, "p99": 9.0},
        "accept_length": 2.5 if arm == "dcut" else None,
        "keep_ratio": 0.4 if arm == "dcut" else None,
        "plain_share": 0.25 if arm == "dcut" else None,
        "step_ms": {"predicted": 10.0, "measured": 11.0} if arm == "dcut" else None,
        "step_sample": [[concurrency, 9, 10.0, 11.0], [1, 3, 4.0, 4.5]] if arm == "dcut" else None,
        "by_batch_size": [[concurrency, 4, 28, 12, 1]] if arm == "dcut" else None,
        "equal_to_plain": {"equal": 8, "of": 8} if arm != "plain" else None,
        "dcut": None,
        **more,
    }


def write_rows(path: Path) -> Path:
    """Rows of two kinds of prompts and three arms; dcut is 1.5 times plain at each of 4 loads."""
    rows = [
        bench_row(arm, concurrency, rate * concurrency, data=data, **{"pass": one_pass})
        for one_pass in (0, 1)
        for data in ("easy", HOSTILE)
        for concurrency in (1, 4)
        for arm, rate in (("plain", 20.0), ("dflash", 25.0), ("dcut", 30.0))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_trace(path: Path, with_reasons: bool = True) -> Path:
    """Five steps: two decided, one plain, one forced, one that took three times its prediction."""
    rng = np.random.default_rng(0)
    with TraceWriter(path, BLOCK_SIZE, conditions={"target": HOSTILE}) as writer:
        for step, (bs, mode, forced, measured_ms) in enumerate(
            [
                (2, "speculate", "", 10.0),
                (2, "speculate", "", 10.5),
                (2, "plain", "", 5.0),
                (1, "speculate", "ratio 0.5", 9.0),
                (2, "speculate", "", 30.0),
            ],
            start=1,
        ):
            confidence = rng.uniform(0.3, 0.9, (bs, BLOCK_SIZE - 1)).astype(np.float32)
            confidence[:, 5:] = 0  # the head stopped after five
            weighed = Candidates(
                np.arange(5 * bs + 1),
                bs + np.linspace(0, 2.0 * bs, 5 * bs + 1) ** 0.5,
                np.linspace(8, 12, 5 * bs + 1),
            )
            if mode == "plain":
                weighed = Candidates(np.array([0]), np.array([float(bs)]), np.array([5.0]))
            decides = with_reasons and not forced
            writer.write_step(
                step=step,
                request_ids=[f"{HOSTILE} {i}" for i in range(bs)],
                verify_lens=[1] * bs if mode == "plain" else [4] + [2] * (bs - 1),
                accepted=[0] * bs if mode == "plain" else [2] + [0] * (bs - 1),
                contexts=[20 + step + i for i in range(bs)],
                mode=mode,
                confidence=None if mode == "plain" else confidence,
                predicted_ms=float("nan") if forced else 5.0 if mode == "plain" else 10.0,
                measured_ms=measured_ms,
                phase_ms={"draft": 2.0, "decide": 0.5, "verify": 6.0},
                forced=forced,
                head_rows=() if mode == "plain" else (2 * bs, 3 * bs),
                candidates=weighed if decides else None,
                draft_gains=[-0.2, 0.3][:bs] if decides else [],
            )
    return path
