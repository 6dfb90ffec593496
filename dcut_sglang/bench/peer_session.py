"""A run of the peer's arms: pass after pass, one server at a time, one row per arm and load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from dcut_sglang.bench import observed, rows
from dcut_sglang.bench.arms import Arm, relative
from dcut_sglang.bench.endpoint import ServerError
from dcut_sglang.bench.fleet import first_error
from dcut_sglang.bench.peer import (
    PLAIN,
    PeerEndpoint,
    PeerServer,
    launch_args,
    openai_stream,
    speculation_fields,
)
from dcut_sglang.bench.plan import Cell, Plan, rotated
from dcut_sglang.bench.progress import say
from dcut_sglang.bench.steady import run_steady_wave
from dcut_sglang.bench.wave_fields import equality, from_wave
from dcut_sglang.bench.waves import RequestFailed

Row = dict[str, Any]
SCHEMA = 1
_WARM_UP_TOKENS = 4


@dataclass
class PeerSession:
    """Measures the arms and appends rows to a file; rows in it that were made under the same
    conditions are not made again.

    A server is started for each arm and pass, and stopped after its loads: an engine takes
    gigabytes, and one that waits would still wake up.

    Args:
        versions: of vLLM and what it stands on.
        start: a server of an arm that is up; in tests, one that pretends.

    Attributes:
        rows: of this plan, those found in the file and new ones.
        skipped: arms whose server did not start, with the reason.
    """

    plan: Plan
    arms: Sequence[Arm]
    out: Path
    logs: Path
    versions: dict[str, str]
    compiled: bool = False
    start: Callable[[str], PeerEndpoint] | None = None
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Measure what is missing.

        Raises:
            PeerUnavailableError: vLLM cannot run on this CPU.
            ServerError: plain decoding's server did not start, or a server died.
            RequestFailed, RowRefusedError: what came back is no measurement.
        """
        common = self._common()
        file = rows.read(self.out)
        known = {rows.key(row): row for row in file if row.get("schema") == SCHEMA}
        for number in range(self.plan.passes):
            for arm in rotated(self.arms, number):
                jobs = [(c, self._conditions(common, number, c, arm)) for c in self.plan.cells]
                found = {rows.key(row): row for _, row in jobs}
                self.rows += [known[key] for key in found if key in known]
                missing = [(cell, row) for cell, row in jobs if rows.key(row) not in known]
                if missing and arm.name not in self.skipped:
                    self._measure_all(arm, missing)

    def _measure_all(self, arm: Arm, jobs: Sequence[tuple[Cell, Row]]) -> None:
        say(f"{arm.name}: starting its server (log: {relative(self._log(arm.name))})")
        server = self._start(arm.name)
        if server is None:
            return
        try:
            self._warm_up(server, [cell for cell, _ in jobs])
            for cell, conditions in jobs:
                row = self._measure(server, cell, conditions)
                rows.append(self.out, [row])
                self.rows.append(row)
                say(_progress(row))
        except (requests.RequestException, psutil.NoSuchProcess) as error:
            raise ServerError(f"{arm.name}: the server no longer answers ({error})") from error
        finally:
            if isinstance(server, PeerServer):
                server.stop()

    def _start(self, name: str) -> PeerEndpoint | None:
        """None, with a reason noted, for an arm that can be done without."""
        if self.start is not None:
            return self.start(name)
        plan = self.plan
        server = PeerServer(name, plan.pair, plan.dtype, self._log(name), compiled=self.compiled)
        try:
            server.launch()
            server.wait()
        except ServerError as error:
            server.stop()
            if name == PLAIN:
                raise
            self.skipped[name] = f"its server did not start: {first_error(server, error)}"
            say(f"skipped: {name}: {self.skipped[name]}")
            return None
        except BaseException:
            server.stop()
            raise
        return server

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _warm_up(self, server: PeerEndpoint, cells: Sequence[Cell]) -> None:
        """Bring the prompts into the prefix cache, as far as it takes them, and decode a little."""
        prompts = list(dict.fromkeys(p for cell in cells for p in self._requests(cell)))
        concurrency = max(cell.concurrency or 1 for cell in cells)
        for count, tokens in ((len(prompts), 1), (concurrency, _WARM_UP_TOKENS)):
            run_steady_wave(server, prompts[:count], concurrency, tokens, stream=openai_stream)

    def _requests(self, cell: Cell) -> list[Any]:
        return cell.data.requests(cell.num_requests, self.plan.seed)

    def _measure(self, server: PeerEndpoint, cell: Cell, conditions: Row) -> Row:
        plan, concurrency = self.plan, cell.concurrency
        assert concurrency is not None, "the peer is measured in closed loops only"
        before = server.counters()
        try:
            wave = run_steady_wave(
                *(server, self._requests(cell), concurrency, plan.tokens, plan.ignore_eos),
                stream=openai_stream,
            )
        except RequestFailed as error:
            what = f"{conditions['arm']}, {cell.data.name}, {rows.load_label(conditions)}"
            raise RequestFailed(f"{what}: {error}") from error
        row = {
            **conditions,
            **dict.fromkeys(observed.FIELDS),
            **from_wave(wave, concurrency),
            **speculation_fields(before, server.counters()),
        }
        row["equal_to_plain"] = self._equality(row)
        row["time"] = rows.now()
        rows.check(row)
        if conditions["drafter"] is not None and row["spec_decode"] is None:
            raise rows.RowRefusedError(f"{row['arm']} has drafted nothing in this wave")
        return row

    def _equality(self, row: Row) -> dict[str, int] | None:
        """Against own plain decoding's first pass over the same requests; for that itself, null."""
        for other in self.rows:
            same = all(other[name] == row[name] for name in ("data", "concurrency", "load"))
            if other["arm"] == PLAIN and other["pass"] == 0 and same:
                return equality(row, other)
        return None

    def _common(self) -> Row:
        found, plan = rows.conditions(), self.plan
        own = {"dcut_sglang": found["versions"]["dcut_sglang"]}
        return {
            "schema": SCHEMA,
            "benchmark": "bench-peer",
            **found,
            "versions": {**own, "sglang": None, **self.versions},
            "pair": plan.pair.name,
            "device": "cpu",
            "dtype": plan.dtype,
            "threads": 1,
            "model": _checkpoint(plan.pair.target),
            "knobs": {},
            "url": None,
            "seed": plan.seed,
            "request_rate": None,
        }

    def _conditions(self, common: Row, number: int, cell: Cell, arm: Arm) -> Row:
        """The row's fields that are known before it is measured."""
        plan = self.plan
        flags = launch_args(arm.server, plan.pair, plan.dtype, self.compiled)
        return {
            **common,
            "drafter": _checkpoint(plan.pair.drafter) if arm.name != PLAIN else None,
            "arm": arm.name,
            "server": arm.server,
            "flags": [relative(flag) for flag in flags],
            "data": cell.data.name,
            "load": {
                "kind": "closed",
                "tokens": plan.tokens,
                "requests": cell.num_requests,
                "ignore_eos": plan.ignore_eos,
                "data_sha256": cell.data.sha256,
            },
            "concurrency": cell.concurrency,
            "pass": number,
        }


def _checkpoint(folder: Path) -> Row:
    return {"path": relative(folder), "sha256": rows.file_hash(folder)}


def _progress(row: Row) -> str:
    part, equal = row["steady"], row["equal_to_plain"]
    per_cpu_s = part["tokens_per_cpu_s"]
    words = [f"{row['arm']}, {row['data']}, {rows.load_label(row)}, pass {row['pass']}: "]
    words.append(f"{part['tokens_per_s']:.1f} tokens/s")
    words += [f", {per_cpu_s:.1f} per CPU-s"] if per_cpu_s is not None else []
    words += [f", accept length {row['accept_length']:.2f}"] if row["accept_length"] else []
    words += [f", {equal['equal']}/{equal['of']} as own plain"] if equal else []
    return "".join(words)
