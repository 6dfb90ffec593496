"""A benchmark run: every arm at every load, pass after pass, one row each, resumable."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from dcut_sglang.bench import observed, rows
from dcut_sglang.bench.arms import LAUNCHES, Arm, launch_args, relative
from dcut_sglang.bench.arrivals import run_arrivals
from dcut_sglang.bench.endpoint import Endpoint, ServerError
from dcut_sglang.bench.fleet import Fleet
from dcut_sglang.bench.plan import Cell, Plan, rotated
from dcut_sglang.bench.progress import say
from dcut_sglang.bench.server import Server
from dcut_sglang.bench.steady import run_steady_wave, staggered
from dcut_sglang.bench.wave_fields import equality, from_wave, hashes, rates
from dcut_sglang.bench.waves import Prompt, RequestFailed, run_wave, warm

Row = dict[str, Any]
SCHEMA = 1
_WARM_UP_TOKENS = 12
# Algorithms whose steps verify a fixed number of drafts, each behind the last.
_CHAINS = ("DFLASH", "STANDALONE", "EAGLE3", "NEXTN")


@dataclass(frozen=True)
class Job:
    """One row to be: what is known of it before it is measured, and how to measure it."""

    conditions: Row
    cell: Cell
    arm: Arm


class Session:
    """Measures arms and appends rows to a file.

    Args:
        urls: servers that are up already, by name.
        settings: of every DCUT server that is started, on top of its own.
        out: the rows' file. Rows in it that were made under the same conditions are not made
            again.
        logs: folder for logs and traces.

    Attributes:
        rows: of this plan, those found in the file and new ones.
        skipped: arms that cannot run here, with the reason.
    """

    def __init__(
        self,
        plan: Plan,
        arms: Sequence[Arm],
        *,
        urls: dict[str, str],
        settings: Row,
        out: Path,
        logs: Path,
    ) -> None:
        self._plan = plan
        self._arms = arms
        self._urls = urls
        self._settings = settings
        self._out = out
        self._logs = logs
        self._common = rows.conditions()
        self._hashes: dict[Path, str] = {}
        self._described: dict[str, Row] = {}
        self._known = {rows.key(row): row for row in rows.read(out) if row.get("schema") == SCHEMA}
        self.rows: list[Row] = []
        self.skipped: dict[str, str] = {}

    def run(self) -> list[Row]:
        """Measure what is missing.

        Raises:
            RowRefusedError, RequestFailed, ServerError: a server failed, or DCUT was not active;
                rows up to there are in the file.
            OutOfMemoryError: the servers do not fit.
        """
        jobs = self._jobs()
        missing = [job for job in jobs if rows.key(job.conditions) not in self._known]
        self.rows = [self._known[rows.key(job.conditions)] for job in jobs if job not in missing]
        say(f"{len(jobs)} rows, {len(self.rows)} of them in {relative(self._out)} already")
        if not missing:
            return self.rows
        arms = [arm for arm in self._arms if any(job.arm == arm for job in missing)]
        with Fleet(
            self._plan.pair, arms, self._plan.dtype, self._logs, self._urls, self._settings
        ) as fleet:
            self.skipped = fleet.skipped
            todo = [job for job in missing if job.arm.server in fleet.servers]
            if todo:
                self._warm_up(fleet, [job.cell for job in todo])
            self._measure_all(fleet, todo)
        return self.rows

    def _jobs(self) -> list[Job]:
        return [
            Job(self._conditions(number, cell, arm), cell, arm)
            for number in range(self._plan.passes)
            for cell in self._plan.cells
            for arm in rotated(self._arms, number)
        ]

    def _measure_all(self, fleet: Fleet, todo: Sequence[Job]) -> None:
        begun, work_done = time.monotonic(), 0.0
        for done, job in enumerate(todo, start=1):
            row = self._measure(fleet, job)
            rows.append(self._out, [row])
            self.rows.append(row)
            work_done += job.cell.work
            left = sum(job.cell.work for job in todo[done:])
            left_s = left * (time.monotonic() - begun) / work_done
            say(f"{_progress(row)}; {done}/{len(todo)}, about {left_s:.0f} s left")

    def _conditions(self, number: int, cell: Cell, arm: Arm) -> Row:
        """The row's fields that are known before it is measured."""
        plan = self._plan
        return {
            "schema": SCHEMA,
            "benchmark": "bench",
            **self._common,
            "pair": plan.pair.name,
            **self._server(arm.server),
            "arm": arm.name,
            "server": arm.server,
            "knobs": dict(arm.knobs),
            "seed": plan.seed,
            "data": cell.data.name,
            "load": {
                "kind": "closed" if cell.concurrency is not None else "rate",
                "tokens": plan.tokens,
                "lengths": "staggered" if cell.concurrency is not None else "equal",
                "requests": cell.num_requests,
                "ignore_eos": plan.ignore_eos,
                "data_sha256": cell.data.sha256,
            },
            "concurrency": cell.concurrency,
            "request_rate": cell.request_rate,
            "pass": number,
        }

    def _server(self, name: str) -> Row:
        """Conditions that all arms of one server share."""
        if name not in self._described:
            url = self._urls.get(name)
            self._described[name] = self._found(url) if url else self._started(name)
        return self._described[name]

    def _started(self, name: str) -> Row:
        plan, launch = self._plan, LAUNCHES[name]
        flags = launch_args(name, plan.pair, plan.dtype, self._logs, self._settings)
        drafter = getattr(plan.pair, launch.drafter) if launch.drafter else None
        return {
            "device": "cpu",
            "dtype": plan.dtype,
            "threads": 1,
            "model": self._checkpoint(plan.pair.target),
            "drafter": self._checkpoint(drafter) if drafter is not None else None,
            "flags": [relative(flag) for flag in flags],
            "url": None,
        }

    def _found(self, url: str) -> Row:
        """What a server says about itself; ServerError where none answers."""
        endpoint = Endpoint(url)
        if not endpoint.alive:
            raise ServerError(f"--url {url}: no answer on /health")
        info = endpoint.info()
        drafter = info.get("speculative_draft_model_path")
        return {
            "device": info.get("device"),
            "dtype": info.get("dtype"),
            "threads": None,
            "model": self._checkpoint(Path(info["model_path"])),
            "drafter": self._checkpoint(Path(drafter)) if drafter else None,
            "flags": None,
            "url": url,
        }

    def _checkpoint(self, folder: Path) -> Row:
        """Null for a hash where the files are not on this machine."""
        if not folder.is_dir():
            return {"path": relative(folder), "sha256": None}
        if folder not in self._hashes:
            self._hashes[folder] = rows.file_hash(folder)
        return {"path": relative(folder), "sha256": self._hashes[folder]}

    def _requests(self, cell: Cell) -> list[Prompt]:
        return cell.data.requests(cell.num_requests, self._plan.seed)

    def _warm_up(self, fleet: Fleet, cells: Sequence[Cell]) -> None:
        """Bring the prompts into the prefix caches, and let each server decode, DCUT some more."""
        largest = {cell.data.name: cell for cell in sorted(cells, key=lambda c: c.num_requests)}
        prompts = list(
            dict.fromkeys(prompt for cell in largest.values() for prompt in self._requests(cell))
        )
        concurrencies = sorted(cell.concurrency or 1 for cell in cells)
        concurrency = concurrencies[-1]
        say(f"warming up: {len(prompts)} prompts to each server")
        for name, server in fleet.servers.items():
            observer = fleet.observers.get(name)
            if observer is not None:
                observer.begin()
            warm(server, prompts)
            run_wave(server, prompts[:concurrency], concurrency, _WARM_UP_TOKENS)
            if observer is not None:
                # It learns costs and confidences at first, small batches and large ones.
                for size in sorted({concurrencies[0], concurrency}):
                    run_wave(server, prompts[: 2 * size], size, self._plan.tokens)
                observer.end()

    def _measure(self, fleet: Fleet, job: Job) -> Row:
        arm, server = job.arm, fleet.servers[job.arm.server]
        observer = fleet.observers.get(arm.server)
        if observer is not None:
            if arm.knobs:
                server.set_state(**arm.knobs)
            observer.begin()
        before = observer.requests_drafted if observer is not None else 0
        what = f"{arm.name}, {job.cell.data.name}, {rows.load_label(job.conditions)}"
        try:
            measured = self._load(server, job.cell, arm)
            if observer is not None:
                measured |= observer.end()
        except RequestFailed as error:
            raise RequestFailed(f"{what}: {error}") from error
        except (requests.RequestException, psutil.NoSuchProcess) as error:
            log = f"\n{server.log_tail()}" if isinstance(server, Server) else ""
            raise ServerError(f"{what}: the server no longer answers ({error}){log}") from error
        row = {**job.conditions, **dict.fromkeys(observed.FIELDS), **measured}
        row["equal_to_plain"] = self._equality(row)
        row["time"] = rows.now()
        rows.check(row, before)
        return row

    def _load(self, server: Endpoint, cell: Cell, arm: Arm) -> Row:
        plan, prompts = self._plan, self._requests(cell)
        if cell.concurrency is None:
            assert cell.request_rate is not None, "a cell has one of the two"
            found = run_arrivals(
                server,
                plan.pair.target,
                prompts,
                cell.request_rate,
                plan.tokens,
                seed=plan.seed,
                ignore_eos=plan.ignore_eos,
                workdir=self._logs / "arrivals",
            )
            return {
                "overall": rates(found.overall),
                "steady": None,
                "tokens_per_s_per_user": None,
                **found.latencies,
                "output_hashes": hashes(found.overall),
            }
        launch = LAUNCHES.get(arm.server)
        if launch is not None and launch.algorithm == "NGRAM":
            # It drafts from what it has answered: the same requests, in the pass before.
            server.flush_cache()
            warm(server, prompts)
        lengths = staggered(plan.tokens, len(prompts))
        wave = run_steady_wave(server, prompts, cell.concurrency, lengths, plan.ignore_eos)
        return {
            **from_wave(wave, cell.concurrency),
            **observed.from_answers(
                wave.timelines, is_chain=launch is not None and launch.algorithm in _CHAINS
            ),
        }

    def _equality(self, row: Row) -> dict[str, int] | None:
        """Against plain's first pass over the same requests."""
        for other in self.rows if row["arm"] != "plain" or row["pass"] else [row]:
            same_load = all(
                other[name] == row[name] for name in ("data", "concurrency", "request_rate")
            )
            if other["arm"] == "plain" and other["pass"] == 0 and same_load:
                return equality(row, other)
        return None


def _progress(row: Row) -> str:
    part = row["steady"] or row["overall"]
    per_cpu_s = part["tokens_per_cpu_s"]
    rate = f"{part['tokens_per_s']:.1f} tokens/s"
    if per_cpu_s is not None:
        rate += f", {per_cpu_s:.1f} per CPU-s"
    equal = row["equal_to_plain"]
    same = f", {equal['equal']}/{equal['of']} as plain" if equal else ""
    return f"{row['arm']}, {row['data']}, {rows.load_label(row)}, pass {row['pass']}: {rate}{same}"
