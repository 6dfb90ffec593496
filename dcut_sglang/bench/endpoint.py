"""A server that is up: its HTTP interface, and its scheduler's CPU time where it runs here."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import psutil
import requests


class ServerError(RuntimeError):
    """The server did not start, or died; carries the end of its log."""


class Endpoint:
    """A server found by its URL. ``bench.server.Server`` is one that this process starts.

    Args:
        url: of the server's root, for example ``http://127.0.0.1:30000``.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.session = requests.Session()
        # A server closes a connection that was idle for a while, maybe just as it is used again.
        self.session.headers["Connection"] = "close"
        self._listener: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it answers."""
        try:
            return self.session.get(f"{self.url}/health", timeout=10).status_code == 200
        except requests.RequestException:
            return False

    def scheduler_cpu_s(self) -> float:
        """CPU seconds that the scheduler process has used, all threads, user and system.

        NaN where it is not a process that can be seen here.
        """
        root = self._root_pid()
        for child in descendants(root) if root is not None else ():
            if child.name().startswith("sglang::schedul"):
                times = child.cpu_times()
                return times.user + times.system
        return float("nan")

    def _root_pid(self) -> int | None:
        """The process that listens, when it is one of this machine's."""
        if self._listener is not None:
            return self._listener
        address = urlsplit(self.url)
        if address.hostname not in ("127.0.0.1", "localhost", "::1"):
            return None
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr.port == address.port:
                self._listener = connection.pid
        return self._listener

    def generate(self, **body: Any) -> requests.Response:
        """POST /generate."""
        return self.session.post(f"{self.url}/generate", json=body, timeout=600)

    def set_state(self, **knobs: int | float) -> None:
        """Set run-time knobs through ``/set_internal_state``.

        Raises:
            ServerError: the server rejected one.
        """
        answer = self.session.post(
            f"{self.url}/set_internal_state", json={"server_args": knobs}, timeout=60
        )
        if answer.status_code != 200 or answer.json() != [True]:
            raise ServerError(f"{knobs} rejected: {answer.status_code} {answer.text}")

    def flush_cache(self) -> None:
        """Empty the prefix cache, and what a speculator remembers of texts.

        Raises:
            ServerError: the server refused, because requests are running.
        """
        answer = self.session.post(f"{self.url}/flush_cache", timeout=60)
        if answer.status_code != 200:
            raise ServerError(f"flush_cache rejected: {answer.status_code} {answer.text}")

    def info(self) -> dict[str, Any]:
        """``/server_info``: the server's arguments and state."""
        answer = self.session.get(f"{self.url}/server_info", timeout=60)
        answer.raise_for_status()
        return answer.json()

    def internal_state(self) -> dict[str, Any]:
        """The scheduler's state from ``/server_info``."""
        return self.info()["internal_states"][0]

    def dcut(self) -> dict[str, Any]:
        """The ``dcut`` object of ``/server_info``."""
        return self.internal_state()["dcut"]


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below ``pid``; none where it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
