"""Servers of a run: what is skipped, what does not fit, and what stops with the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dcut_sglang.bench import fleet as fleet_module
from dcut_sglang.bench.arms import PAIRS, find_arm
from dcut_sglang.bench.endpoint import ServerError
from dcut_sglang.bench.fleet import Fleet, OutOfMemoryError, first_error
from dcut_sglang.bench.server import REPO_ROOT, Server

STUB = "import sys, time; print('ValueError: no trees here', flush=True); sys.exit({code})"


class StubServer(Server):
    """Exits at once, as a server that refuses its arguments does."""

    def __init__(self, log: Path) -> None:
        super().__init__("model", log=log)
        self.command = [sys.executable, "-c", STUB.format(code=1)]


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fleet_module,
        "make_server",
        lambda name, pair, dtype, logs, settings: StubServer(logs / f"{name}.log"),
    )
    monkeypatch.setattr(fleet_module, "why_not", lambda name, pair: None)


def test_arms_whose_server_refuses_are_skipped_with_its_reason(tmp_path: Path) -> None:
    with Fleet(PAIRS["tiny"], [find_arm("eagle3")], "float32", tmp_path) as found:
        assert not found.servers
    assert found.skipped == {"eagle3": "its server did not start: ValueError: no trees here"}


def test_a_required_server_that_refuses_stops_the_run(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="no trees here"),
        Fleet(PAIRS["tiny"], [find_arm("dcut-25")], "float32", tmp_path),
    ):
        pass


def test_servers_that_do_not_fit_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = SimpleNamespace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    with (
        pytest.raises(OutOfMemoryError, match=r"1 servers need about .* 1.0 GB are free"),
        Fleet(PAIRS["tiny"], [find_arm("plain")], "float32", tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_the_reason_is_the_last_exception_of_the_log(tmp_path: Path) -> None:
    server = Server("model", log=tmp_path / "log")
    server.log.write_text(
        "[2026] scheduler hit an exception: Traceback\nValueError: first\n"
        "NotImplementedError: this one\n  File x\nKilled\n"
    )
    assert first_error(server, ServerError("x")) == "NotImplementedError: this one"
    server.log.write_text("nothing\n")
    assert first_error(server, ServerError("exited\nlog")) == "exited"


def test_servers_have_rendezvous_ports_of_their_own(tmp_path: Path) -> None:
    commands = [Server("model", log=tmp_path / "log").command for _ in range(3)]
    ports = {command[command.index("--nccl-port") + 1] for command in commands}
    assert len(ports) == 3


def test_sigterm_stops_the_servers(tmp_path: Path) -> None:
    """A script that is told to end leaves no server behind."""
    program = f"""
import sys, time
from pathlib import Path
from dcut_sglang.bench.server import Server, stop_on_sigterm
stop_on_sigterm()
server = Server("model", log=Path({str(tmp_path / "log")!r}))
server.command = [sys.executable, "-c", "import time; time.sleep(600)"]
server.launch()
try:
    print(server._process.pid, flush=True)
    time.sleep(600)
finally:
    server.stop()
"""
    env = {**os.environ, "PYTHONPATH": f"{REPO_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env
    ) as script:
        assert script.stdout is not None
        child = int(script.stdout.readline())
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=60) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(child)
