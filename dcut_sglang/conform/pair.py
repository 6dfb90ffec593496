"""The tiny pair's two servers, plain and DCUT, alike but for speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dcut_sglang.bench.arms import PAIRS, speculative_args
from dcut_sglang.bench.server import Server

# Seeds are honoured only so. Without speculation and with overlap, SGLang's penalties lag a token
# behind, so the plain server runs without.
SEEDS = ("--enable-deterministic-inference",)
SYNCHRONOUS = ("--disable-overlap-schedule",)
# Float32, so that equal means equal; a pool that leaves room for one long prompt beside a full
# batch, in chunks.
ARGS = (
    *SEEDS,
    *("--dtype", "float32", "--max-running-requests", "16", "--max-total-tokens", "8192"),
    *("--chunked-prefill-size", "256"),
)
# A pool that a full batch outgrows, so that requests are retracted and resumed.
SMALL_ARGS = (
    *SEEDS,
    *("--dtype", "float32", "--max-running-requests", "64", "--max-total-tokens", "3072"),
    *("--chunked-prefill-size", "256", "--schedule-conservativeness", "0.01"),
    *("--enable-priority-scheduling",),
)
SETTINGS = {"probe_budget_s": 8, "cost_cache_dir": ""}
# SGLang counts its KV slots after every step and stops at a leak.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


def tiny_server(
    algorithm: str | None, log: Path, args: Sequence[str] = ARGS, drafter: Path | None = None
) -> Server:
    """A server of the tiny target, with DCUT or without (None); not started yet.

    Args:
        drafter: another one than the pair's.
    """
    pair = PAIRS["tiny"]
    if drafter is not None:
        pair = replace(pair, drafter=drafter)
    args = [*args]
    if algorithm is not None:
        args += [*speculative_args(algorithm, pair), "--dcut-config", json.dumps(SETTINGS)]
    return Server(pair.target, args, log=log, env=STRICT)


@contextmanager
def tiny_pair(
    logs: Path, args: Sequence[str] = ARGS, drafter: Path | None = None
) -> Iterator[tuple[Server, Server]]:
    """(DCUT, plain), started side by side and stopped afterwards."""
    servers = (
        tiny_server("DCUT", logs / "dcut.log", args, drafter),
        tiny_server(None, logs / "plain.log", (*args, *SYNCHRONOUS)),
    )
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait(timeout_s=600)
        yield servers
    finally:
        for server in servers:
            server.stop()
