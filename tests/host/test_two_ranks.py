"""Two tensor-parallel ranks: the ids of one rank, and nobody waits for a choice that differs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import (
    BLOCK_SIZE,
    COMMON_ARGS,
    SEEDS,
    SETTINGS,
    SPECULATE,
    STRICT,
    TARGET,
    Case,
    assert_same_ids,
    ids_of,
    prompts,
    run,
)

from dcut_sglang.bench.server import Server, cpu_environment

FAULTS = Path(__file__).parent / "faults"
CHOICES = {
    "auto": {"dcut_force_ratio": -1},
    "ratio 0.25": {"dcut_force_ratio": 0.25},
    "full": {"dcut_force_ratio": 1.0},
    "plain": {"dcut_force_plain": 1},
    "random": {"dcut_force_random": 5},
}


@pytest.fixture(scope="module")
def two_ranks(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """DCUT on two ranks, the second of them slow and with confidences of its own."""
    metadata = tmp_path_factory.mktemp("faults") / "dcut_faults-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dcut_faults\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ndcut_faults = dcut_faults:register\n"
    )
    path = cpu_environment()["PYTHONPATH"]
    env = {
        **STRICT,
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0",
        "DCUT_TEST_FAULTY_RANK": "1",
        "PYTHONPATH": os.pathsep.join([str(FAULTS), str(metadata.parent), path]),
    }
    trace = {**SETTINGS, "trace_path": str(logs / "two_ranks.trace")}
    args = (*COMMON_ARGS, *SPECULATE, *SEEDS, "--tp-size", "2")
    args += ("--dcut-config", json.dumps(trace))
    with Server(TARGET, args, log=logs / "two_ranks.log", env=env) as server:
        yield server


def test_ids_equal_one_rank(
    two_ranks: Server, reference: Callable[[list[Case]], list[list[int]]]
) -> None:
    cases = [Case(prompt, 32) for prompt in prompts()[:8]]
    expected = reference(cases)
    for name, choice in CHOICES.items():
        two_ranks.set_state(**choice, dcut_reset_metrics=1)
        start = time.monotonic()
        assert_same_ids(cases, expected, ids_of(run(two_ranks, cases, 8)))
        counters = two_ranks.dcut()
        assert counters["steps"] > 0 and counters["rows_decided"] == counters["rows_verified"]
        if name == "plain":
            assert counters["plain_share"] == 1
        if name == "full":
            assert counters["rows_decided"] == BLOCK_SIZE * counters["request_steps"]
            assert counters["accept_length"] > 2
        elapsed_s = time.monotonic() - start
        print(f"{name}: {elapsed_s:.1f} s")
        assert elapsed_s < 30, f"{name}: the ranks wait for each other"


def test_drawn_tokens_are_the_same_on_both(two_ranks: Server, plain: Server) -> None:
    """Seeded requests equal one rank's; unseeded ones are rank 0's draws, and nobody hangs."""
    two_ranks.set_state(**CHOICES["random"])
    shared = {"max_new_tokens": 24, "frequency_penalty": 0.3, "temperature": 0.9}
    own: list[dict[str, Any]] = [
        {"sampling_seed": 1},
        {"sampling_seed": 2, "top_p": 0.8},
        {"sampling_seed": 3, "regex": "[a-z ]{5,40}"},
        {"temperature": 0, "json_schema": '{"type": "object"}'},
    ]
    bodies = [
        {"text": prompts()[i], "sampling_params": {**shared, **params}}
        for i, params in enumerate([*own, {}, {}])
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = [a.json() for a in pool.map(lambda body: two_ranks.generate(**body), bodies)]
    expected = [plain.generate(**body).json() for body in bodies[: len(own)]]
    assert ids_of(found)[: len(own)] == ids_of(expected)
    assert all(1 <= len(answer["output_ids"]) <= 24 for answer in found)


def test_one_table_for_both(two_ranks: Server) -> None:
    assert two_ranks.dcut()["cost_table"]["fingerprint"]["ranks"] == 2
    log = two_ranks.log.read_text()
    assert "TP1] dcut_faults: this rank is late" in log
    assert "TP0] dcut_faults" not in log
    assert log.count("DCUT: measured step costs in") == 1
