"""One SGLang server as a child process: start, wait, measure its CPU, stop."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil
import requests

from dcut_sglang.bench.endpoint import Endpoint, ServerError, descendants

REPO_ROOT = Path(__file__).resolve().parents[2]
SHIMS = REPO_ROOT / "dcut_sglang" / "host" / "cpu" / "shims"
_LOG_NOISE = ("Ignore import error", "SyntaxWarning")


def free_port() -> int:
    """A TCP port that is free on the loopback interface now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_environment(threads: int = 1) -> dict[str, str]:
    """What ``scripts/cpu_env.sh`` sets, for child processes."""
    path = os.environ.get("PYTHONPATH", "")
    parts = [str(SHIMS), *(p for p in path.split(os.pathsep) if p and Path(p) != SHIMS)]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join(parts),
        "OMP_NUM_THREADS": str(threads),
    }


class Server(Endpoint):
    """A server on 127.0.0.1. Use as a context manager, or call ``start`` and ``stop``.

    Args:
        model: path of the target checkpoint.
        args: further arguments of ``sglang.launch_server``.
        log: file that receives the server's output.
        env: environment variables on top of this process's and the CPU engine's.
    """

    def __init__(
        self,
        model: str | Path,
        args: Sequence[str] = (),
        *,
        log: Path,
        env: dict[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.log = log
        self.command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
            # Servers that start together would look for a rendezvous port together.
            *("--nccl-port", str(free_port())),
            *("--device", "cpu", "--sleep-on-idle", *map(str, args)),
        ]
        self._env = {**os.environ, **cpu_environment(), **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the process and return at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 300) -> None:
        """Wait until the server answers.

        Raises:
            ServerError: it exited, or did not answer in time.
        """
        assert self._process is not None, "launch first"
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server exited at start-up\n{self.log_tail()}")
            try:
                # /health turns 200 only once the warm-up request has been answered.
                if self.session.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        tail = self.log_tail()
        self.stop()
        raise ServerError(f"no answer from the server after {timeout_s:.0f} s\n{tail}")

    def start(self, timeout_s: float = 300) -> Server:
        """Launch and wait; stops what it started when that fails."""
        self.launch()
        try:
            self.wait(timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and its children; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        family = descendants(process.pid)
        if process.poll() is None:
            family.append(psutil.Process(process.pid))
        for kill in (psutil.Process.terminate, psutil.Process.kill):
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    kill(member)
            _, family = psutil.wait_procs(family, timeout=10)
            if not family:
                break
        process.wait(timeout=10)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether the launcher process runs."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self, num_lines: int = 25) -> str:
        """The end of the log, without the lines that every start prints."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(
            [line for line in lines if not any(n in line for n in _LOG_NOISE)][-num_lines:]
        )

    def scheduler_cpu_s(self) -> float:
        """CPU seconds that the scheduler process has used, all threads, user and system.

        Raises:
            ServerError: there is none: the server is starting, or dead.
        """
        found = super().scheduler_cpu_s()
        if math.isnan(found):
            raise ServerError(f"no scheduler process found\n{self.log_tail()}")
        return found

    def _root_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def memory_mb(self) -> float:
        """Megabytes that the server's processes hold and share with no other."""
        assert self._process is not None
        family = [psutil.Process(self._process.pid), *descendants(self._process.pid)]
        return sum(member.memory_full_info().uss for member in family) / 2**20


def stop_on_sigterm() -> None:
    """Let SIGTERM unwind this process, so that it stops the servers it has started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
