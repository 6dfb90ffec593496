"""Rows of ``bench_results/``: one JSON object per line, each with the conditions it was made in."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dcut_sglang.bench.server import REPO_ROOT
from dcut_sglang.machine import allocator, cpu_info


def conditions(**more: Any) -> dict[str, Any]:
    """What a measurement depends on beside its settings: commit, versions, machine, time."""
    return {
        "time": now(),
        "commit": _commit(),
        "versions": {
            name: _version(name) for name in ("dcut_sglang", "sglang", "torch", "transformers")
        },
        "machine": {
            "cpu": cpu_info().get("model name", platform.processor()),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "allocator": allocator(),
        },
        **more,
    }


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a JSONL file, creating it and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, none where there is no file. A last line that an interruption
    cut short is left out.

    Raises:
        ValueError: another line is not a JSON object.
    """
    found = []
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:60]}")
        found.append(row)
    return found


# Rows that agree in these measure the same thing.
CONDITIONS = (
    *("commit", "versions", "machine", "device", "dtype", "threads", "pair", "model", "drafter"),
    *("arm", "server", "flags", "knobs", "url", "seed", "data", "load"),
    *("concurrency", "request_rate", "pass"),
)


def key(row: dict[str, Any]) -> str:
    """Equal for rows that measure the same thing under the same conditions."""
    return json.dumps([row.get(name) for name in CONDITIONS], sort_keys=True)


class RowRefusedError(ValueError):
    """A measurement that must not become a row, with the reason."""


def check(row: dict[str, Any], drafted_before: int = 0) -> None:
    """Refuse what was not measured on a working server.

    Args:
        row: of ``make bench``, without failed requests (those raise where they happen).
        drafted_before: requests that its DCUT server drafted for in earlier waves.

    Raises:
        RowRefusedError: no tokens or no time; a DCUT arm whose server does not run DCUT, or where
            it never drafted though plain steps were not asked for.
    """
    what = f"{row['arm']}, {row['data']}, {load_label(row)}, pass {row['pass']}"
    for part in ("overall", "steady"):
        if row[part] is None:
            continue
        for name, value in row[part].items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise RowRefusedError(f"{what}: {part} {name} is {value}; is the server dead?")
    if not str(row["server"]).startswith("dcut"):
        return
    if row["dcut"] is None:
        raise RowRefusedError(
            f"{what}: the server does not run DCUT (no dcut object in its /server_info); start it "
            "with --speculative-algorithm DCUT"
        )
    drafted = row["dcut"]["requests_drafted"] + drafted_before
    if not drafted and row["knobs"].get("dcut_force_plain") != 1:
        raise RowRefusedError(
            f"{what}: DCUT has not drafted once since the server started ({row['dcut']['steps']} "
            "steps in this wave, all plain): this would be a row of plain decoding"
        )


def load_label(row: dict[str, Any]) -> str:
    """The row's load in words."""
    if row["concurrency"] is not None:
        return f"concurrency {row['concurrency']}"
    return f"{row['request_rate']:g} requests/s"


def file_hash(folder: Path) -> str:
    """SHA-256 over a checkpoint's config and weights, 16 digits."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def _commit() -> str:
    """Short commit id, with ``+`` and a hash of the changes where the tree has any.

    Rows and figures are left out: writing the first row must not make the second one differ.
    """
    sources = ("--", ".", ":!bench_results")
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changes = _git("diff", "HEAD", *sources)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else "")


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=REPO_ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
