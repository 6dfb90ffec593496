"""Rows of ``bench_results/``: one JSON object per line, each with the conditions it was made in."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dcut_sglang.bench.server import REPO_ROOT
from dcut_sglang.machine import cpu_info


def conditions(**more: Any) -> dict[str, Any]:
    """What a measurement depends on beside its settings: commit, versions, machine, time."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            name: _version(name) for name in ("dcut_sglang", "sglang", "torch", "transformers")
        },
        "machine": {
            "cpu": cpu_info().get("model name", platform.processor()),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        **more,
    }


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a JSONL file, creating it and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def fast_dtype() -> str:
    """The dtype in which this CPU multiplies matrices fastest.

    Without bf16 instructions, torch's bf16 GEMM runs at a tenth of its float32 speed.
    """
    flags = set(cpu_info().get("flags", "").split())
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16"} else "float32"


def _commit() -> str:
    """Short commit id, with ``+`` where the tree has changes."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=REPO_ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
