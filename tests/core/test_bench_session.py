"""A whole run against servers that only pretend: passes, resuming, and what stops it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pretending import PretendingHandler, PretendingServer

from dcut_sglang.bench import rows as row_files
from dcut_sglang.bench.arms import PAIRS, find_arm
from dcut_sglang.bench.data import DataSet
from dcut_sglang.bench.endpoint import ServerError
from dcut_sglang.bench.plan import Cell, Plan
from dcut_sglang.bench.rows import RowRefusedError
from dcut_sglang.bench.session import Session
from dcut_sglang.bench.steady import staggered
from dcut_sglang.bench.waves import Prompt, RequestFailed
from dcut_sglang.calibration import Calibration
from dcut_sglang.host.metrics import StepMetrics

DATA = DataSet("mixed", tuple(Prompt("k", ids=(i, 1)) for i in range(8)), "0")


class Pretender(PretendingServer):
    """Answers like SGLang: each prompt is continued by its first id, a chunk per two tokens."""

    def __init__(self, dcut: bool = False, drafted: int = 5) -> None:
        super().__init__(_Handler)
        self.dcut = dcut
        self.drafted = drafted
        self.knobs: list[dict[str, float]] = []
        self.hangs_up = False
        self.num_flushes = 0

    def state(self) -> dict[str, Any]:
        if not self.dcut:
            return {}
        counters = {**StepMetrics(16).snapshot(), "requests_drafted": self.drafted, "steps": 9}
        more = {"cost_table": None, "config": {}, "calibration": Calibration(15).to_json()}
        return {"dcut": {**counters, **more, "block_size": 16}}


class _Handler(PretendingHandler):
    server: Pretender

    def do_GET(self) -> None:
        info = {"device": "cpu", "dtype": "float32", "model_path": "/nowhere"}
        self.send(json.dumps({**info, "internal_states": [self.server.state()]}).encode())

    def do_POST(self) -> None:
        if self.path == "/flush_cache":
            self.server.num_flushes += 1
            return self.send(b"flushed")
        body = self.body()
        if self.path == "/set_internal_state":
            self.server.knobs.append(body["server_args"])
            return self.send(b"[true]")
        self.server.answers_left -= 1
        if self.server.answers_left < 0:
            if self.server.hangs_up:
                return self.connection.close()
            return self.send(b"out of memory", status=500)
        count, word = body["sampling_params"]["max_new_tokens"], f"{body['input_ids'][0]} "
        answers = [
            {"text": word * n, "meta_info": {"completion_tokens": n}}
            for n in sorted({*range(2, count + 1, 2), count})
        ]
        if not body.get("stream"):
            return self.send(json.dumps(answers[-1]).encode())
        return self.send_events(answers)


@pytest.fixture
def servers() -> Iterator[dict[str, Pretender]]:
    found = {"plain": Pretender(), "dcut": Pretender(dcut=True)}
    yield found
    for server in found.values():
        server.stop()


def make_session(
    servers: dict[str, Pretender],
    folder: Path,
    arms: tuple[str, ...] = ("dcut", "dcut-25", "plain"),
    **changes: Any,
) -> Session:
    plan = {
        "pair": PAIRS["tiny"],
        "cells": (Cell(DATA, 4, concurrency=1), Cell(DATA, 8, concurrency=4)),
        "passes": 2,
        "tokens": 6,
        "dtype": "float32",
        **changes,
    }
    return Session(
        Plan(**plan),
        [find_arm(name) for name in arms],
        urls={name: server.url for name, server in servers.items()},
        settings={},
        out=folder / "rows.jsonl",
        logs=folder / "logs",
    )


def test_a_run_gives_every_row_once(servers: dict[str, Pretender], tmp_path: Path) -> None:
    found = make_session(servers, tmp_path).run()
    assert found == row_files.read(tmp_path / "rows.jsonl")
    assert len(found) == len({row_files.key(row) for row in found}) == 3 * 2 * 2
    assert [row["arm"] for row in found[:3]] == ["plain", "dcut", "dcut-25"]
    for row in found:
        count = 4 if row["concurrency"] == 1 else 8
        assert row["overall"]["tokens"] == sum(staggered(6, count))
        assert row["equal_to_plain"] == {"equal": count, "of": count}
        assert row["url"] == servers[row["server"]].url and row["flags"] is None
    assert {"dcut_force_ratio": 0.25} in servers["dcut"].knobs


def test_ngram_forgets_between_waves(servers: dict[str, Pretender], tmp_path: Path) -> None:
    """It would find the answers of the pass before, to the same requests."""
    ngram = Pretender()
    try:
        servers = {**servers, "ngram": ngram}
        names = ("plain", "dcut", "ngram")
        found = make_session(servers, tmp_path, arms=names).run()
    finally:
        ngram.stop()
    assert sum(row["arm"] == "ngram" for row in found) == ngram.num_flushes == 4
    assert servers["plain"].num_flushes == servers["dcut"].num_flushes == 0


def test_an_interrupted_run_goes_on(servers: dict[str, Pretender], tmp_path: Path) -> None:
    servers["plain"].answers_left = 8 + 4 + 4 + 5
    with pytest.raises(RequestFailed, match="plain, mixed, concurrency .: HTTP 500: out of memory"):
        make_session(servers, tmp_path).run()
    path = tmp_path / "rows.jsonl"
    before = path.read_text()
    assert 0 < len(before.splitlines()) < 12
    servers["plain"].answers_left = 1 << 30
    assert len(make_session(servers, tmp_path).run()) == 12
    assert path.read_text().startswith(before) and len(path.read_text().splitlines()) == 12
    servers["plain"].answers_left = 0
    assert len(make_session(servers, tmp_path).run()) == 12, "nothing is left to ask for"
    servers["plain"].answers_left = 1 << 30
    assert len(make_session(servers, tmp_path, tokens=5).run()) == 12
    assert len(path.read_text().splitlines()) == 24, "other conditions are measured"


def test_a_server_that_dies_makes_no_row(servers: dict[str, Pretender], tmp_path: Path) -> None:
    servers["plain"].answers_left, servers["plain"].hangs_up = 8 + 4 + 2, True
    with pytest.raises(ServerError, match="plain, mixed, concurrency 1: the server no longer"):
        make_session(servers, tmp_path).run()
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_dcut_that_never_drafted_makes_no_row(
    servers: dict[str, Pretender], tmp_path: Path
) -> None:
    servers["dcut"].drafted = 0
    with pytest.raises(RowRefusedError, match="not drafted once"):
        make_session(servers, tmp_path).run()
    assert {row["arm"] for row in row_files.read(tmp_path / "rows.jsonl")} == {"plain"}


def test_a_dead_or_other_server_makes_no_row(servers: dict[str, Pretender], tmp_path: Path) -> None:
    servers["dcut"].dcut = False
    with pytest.raises(RowRefusedError, match="does not run DCUT"):
        make_session(servers, tmp_path).run()
    servers["dcut"].shutdown()
    servers["dcut"].server_close()
    with pytest.raises(ServerError, match="no answer on /health"):
        make_session(servers, tmp_path).run()
