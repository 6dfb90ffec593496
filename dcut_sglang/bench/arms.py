"""The arms of a comparison: plain decoding, builtin DFLASH and DCUT under equal flags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcut_sglang.bench.server import REPO_ROOT, Server


@dataclass(frozen=True)
class ModelPair:
    """A target and its drafter."""

    name: str
    target: Path
    drafter: Path


PAIRS = {
    "smollm2": ModelPair(
        "smollm2",
        REPO_ROOT / ".cache" / "models" / "smollm2",
        REPO_ROOT / "models" / "smollm2-135m-dflash",
    ),
    "tiny": ModelPair(
        "tiny", REPO_ROOT / "models" / "tiny" / "target", REPO_ROOT / "models" / "tiny" / "drafter"
    ),
}

# DFLASH caps an unset --max-running-requests at 48; equal flags need it set.
COMMON_ARGS = ("--max-running-requests", "32", "--max-total-tokens", "16384")


def speculative_args(algorithm: str, pair: ModelPair) -> tuple[str, ...]:
    """Launch arguments of a speculative arm."""
    return (
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(pair.drafter)),
    )


def trace_path(logs: Path) -> Path:
    """Where the DCUT arm writes its decision trace."""
    return logs / "dcut.trace"


def make_server(
    arm: str, pair: ModelPair, dtype: str, logs: Path, extra: Sequence[str] = ()
) -> Server:
    """The server of arm ``plain``, ``dflash`` or ``dcut``; not started yet."""
    algorithm = {"plain": None, "dflash": "DFLASH", "dcut": "DCUT"}[arm]
    args = [*COMMON_ARGS, "--dtype", dtype]
    if algorithm is not None:
        args += speculative_args(algorithm, pair)
    if arm == "dcut":
        trace_path(logs).unlink(missing_ok=True)
        # Every comparison measures its own costs, on the machine as it is now.
        settings = {"cost_cache_dir": "", "trace_path": str(trace_path(logs))}
        args += ["--dcut-config", json.dumps(settings)]
    return Server(pair.target, [*args, *extra], log=logs / f"{arm}-{dtype}.log")
