"""The servers of a run, all up at once, so that the arms can take turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from dcut_sglang.bench.arms import (
    LAUNCHES,
    REQUIRED_SERVERS,
    Arm,
    ModelPair,
    make_server,
    trace_path,
    why_not,
)
from dcut_sglang.bench.endpoint import Endpoint, ServerError
from dcut_sglang.bench.observed import DCutObserver
from dcut_sglang.bench.progress import say
from dcut_sglang.bench.server import Server

# Of a server beside its weights: three interpreters with their libraries, pools.
_SERVER_MB = 2_000
_START_TIMEOUT_S = 900


class OutOfMemoryError(RuntimeError):
    """The servers would not fit beside each other, with what would."""


@dataclass
class Fleet:
    """Starts the servers that the arms need; a context manager that stops them again.

    Args:
        urls: servers that are up already, by name.
        settings: of every DCUT server, on top of its own.

    Attributes:
        servers: by name, those that are up.
        observers: of those that run DCUT.
        skipped: arms that have no server, with the reason.
    """

    pair: ModelPair
    arms: Sequence[Arm]
    dtype: str
    logs: Path
    urls: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    servers: dict[str, Endpoint] = field(default_factory=dict)
    observers: dict[str, DCutObserver] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Fleet:
        """Start them: the DCUT servers last and one after the other, as each measures its costs.

        Raises:
            ServerError: plain, DFLASH or DCUT did not start; others are skipped.
            OutOfMemoryError: see there.
        """
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        wanted = list(dict.fromkeys(arm.server for arm in self.arms))
        own = [name for name in wanted if name not in self.urls]
        reasons = {name: why_not(name, self.pair) for name in own}
        for name, reason in reasons.items():
            if reason is not None:
                self._skip(name, reason)
        own = [name for name in own if reasons[name] is None]
        self._require_memory(len(own))
        for name in wanted:
            if name in self.urls:
                self._adopt(name, Endpoint(self.urls[name]), None)
        is_dcut = {name: LAUNCHES[name].algorithm == "DCUT" for name in own}
        self._launch([name for name in own if not is_dcut[name]])
        for name in own:
            if is_dcut[name]:
                self._launch([name])

    def _launch(self, names: Sequence[str]) -> None:
        started = {}
        for name in names:
            server = make_server(name, self.pair, self.dtype, self.logs, settings=self.settings)
            self._stack.callback(server.stop)
            server.launch()
            started[name] = server
        if started:
            say(f"starting {', '.join(started)} (logs in {self.logs})")
        for name, server in started.items():
            try:
                server.wait(_START_TIMEOUT_S)
            except ServerError as error:
                if name in REQUIRED_SERVERS:
                    raise
                server.stop()
                self._skip(name, f"its server did not start: {first_error(server, error)}")
                continue
            self._adopt(name, server, trace_path(self.logs, name))
            say(f"  {name} is up")

    def _adopt(self, name: str, server: Endpoint, trace: Path | None) -> None:
        self.servers[name] = server
        if "dcut" in server.internal_state():
            self.observers[name] = DCutObserver(server, trace)

    def _skip(self, server: str, reason: str) -> None:
        for arm in self.arms:
            if arm.server == server:
                self.skipped[arm.name] = reason
                say(f"skipped: {arm.name}: {reason}")

    def _require_memory(self, num_servers: int) -> None:
        weights = sum(path.stat().st_size for path in self.pair.target.glob("*.safetensors"))
        needed = num_servers * (_SERVER_MB + 1.2 * weights / 2**20)
        free = psutil.virtual_memory().available / 2**20
        if needed > free:
            raise OutOfMemoryError(
                f"{num_servers} servers need about {needed / 1024:.1f} GB together, "
                f"{free / 1024:.1f} GB are free: name fewer arms with --arms"
            )


def first_error(server: Server, error: ServerError) -> str:
    """The line of a failed start that says why: its last one that names an exception."""
    lines = server.log.read_text(errors="replace").splitlines()
    named = [
        line for line in lines if re.match(r"^(\[.*\] )?[\w.]*(Error|Exception|NotFound)\b", line)
    ]
    return named[-1][:300] if named else str(error).splitlines()[0]
