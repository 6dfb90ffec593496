"""Servers shared by the real-server tests: a start costs half a minute, a request milliseconds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import COMMON_ARGS, SEEDS, SETTINGS, SPECULATE, STRICT, TARGET, Case, ids_of, run

from dcut_sglang.bench.server import Server

# Servers import the custom logit processors of the tests.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts real servers."""
    for item in items:
        if "host" in item.path.parts:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def plain(logs: Path) -> Iterator[Server]:
    """The target alone, without speculation; with seeds.

    Without overlap, under which SGLang's penalties lag a token behind.
    """
    args = (*COMMON_ARGS, *SEEDS, "--disable-overlap-schedule")
    with Server(TARGET, args, log=logs / "plain.log") as server:
        yield server


@pytest.fixture(scope="session")
def reference(plain: Server) -> Callable[[list[Case]], list[list[int]]]:
    """Token ids of plain decoding, computed one request at a time and kept."""
    known: dict[Case, list[int]] = {}

    def ids(cases: list[Case]) -> list[list[int]]:
        new = [case for case in dict.fromkeys(cases) if case not in known]
        known.update(zip(new, ids_of(run(plain, new, 1)), strict=True))
        return [known[case] for case in cases]

    return ids


@pytest.fixture(scope="session")
def dcut(logs: Path) -> Iterator[Server]:
    """DCUT with SGLang's defaults: overlap scheduling, radix cache, pages of one token."""
    # A cache folder that cannot be created, as on a full or read-only disk.
    settings = json.dumps({**SETTINGS, "cost_cache_dir": "/dev/null/costs", "cpu_overlap": True})
    args = (*COMMON_ARGS, *SPECULATE, "--dcut-config", settings)
    with Server(TARGET, args, log=logs / "dcut.log", env=STRICT) as server:
        yield server


@pytest.fixture(scope="session")
def dcut_paged(logs: Path) -> Iterator[Server]:
    """DCUT the other way: synchronous, no radix cache, pages of 16, with seeds, traced.

    Its plain steps make as many passes as they can, however long that takes.
    """
    settings = {**SETTINGS, "trace_path": str(logs / "steps.trace"), "trace_max_mb": 32}
    settings |= {"plain_step_ms": 1e6}
    # Its trace is compared with the table: costs stay as probed.
    settings |= {"cost_correction": False}
    args = (
        *COMMON_ARGS,
        *SPECULATE,
        *SEEDS,
        *("--dcut-config", json.dumps(settings)),
        *("--disable-radix-cache", "--page-size", "16"),
    )
    with Server(TARGET, args, log=logs / "dcut_paged.log", env=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def dcut_retracting(logs: Path) -> Iterator[Server]:
    """DCUT with seeds, retracting a request at every third step."""
    args = (*COMMON_ARGS, *SPECULATE, *SEEDS, "--dcut-config", json.dumps(SETTINGS))
    env = {**STRICT, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
    with Server(TARGET, args, log=logs / "dcut_retracting.log", env=env) as server:
        yield server


@pytest.fixture(params=["dcut", "dcut_paged"], scope="session")
def each_dcut(request: pytest.FixtureRequest) -> Server:
    """Both DCUT servers, one after the other."""
    return request.getfixturevalue(request.param)
