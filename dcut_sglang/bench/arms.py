"""The arms of a comparison, under equal flags: how their servers are started, and what differs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcut_sglang.bench.server import REPO_ROOT, Server
from dcut_sglang.config import WITHOUT


@dataclass(frozen=True)
class ModelPair:
    """A target and what drafts for it.

    Attributes:
        drafter: DFlash checkpoint.
        small_model: a smaller language model with the target's tokenizer, for STANDALONE.
        eagle3_head: EAGLE-3 checkpoint.
        dspark_drafter: DSpark checkpoint.
    """

    name: str
    target: Path
    drafter: Path
    small_model: Path | None = None
    eagle3_head: Path | None = None
    dspark_drafter: Path | None = None


PAIRS = {
    "smollm2": ModelPair(
        "smollm2",
        REPO_ROOT / ".cache" / "models" / "smollm2",
        REPO_ROOT / "models" / "smollm2-135m-dflash",
        eagle3_head=REPO_ROOT / "models" / "smollm2-135m-eagle3",
    ),
    "tiny": ModelPair(
        "tiny", REPO_ROOT / "models" / "tiny" / "target", REPO_ROOT / "models" / "tiny" / "drafter"
    ),
}

# DFLASH caps an unset --max-running-requests at 48; equal flags need it set. The memory fraction
# is of what is free when a server starts, and others that start beside it take from that.
# Overlap scheduling hides nothing on a CPU, and each request takes a step behind its end. SGLang
# turns it off for EAGLE and NGRAM, and DCUT does; plain decoding and DFLASH are measured at their
# best as well.
COMMON_ARGS = (
    *("--max-running-requests", "32", "--max-total-tokens", "16384"),
    *("--mem-fraction-static", "0.9", "--disable-overlap-schedule"),
)

# D-Cut as its page describes it: four ratios, drafts alone weighed, a whole block for everybody
# at every step, confidences and costs as they come.
AS_PUBLISHED: dict[str, Any] = {
    "objective": "paper",
    "keep_ratios": [0.25, 0.5, 0.75, 1.0],
    "plain_steps": False,
    "draft_subsets": False,
    "head_stages": [],
    "short_blocks": False,
    "calibration": False,
    "cost_correction": False,
}
# DCUT without one of its additions.
ABLATIONS = {f"dcut-{name.replace(' ', '-')}": less for name, less in WITHOUT.items()}
SHORT_BLOCK = 8
# A chain: EAGLE's trees need --speculative-eagle-topk above 1.
_CHAIN = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)


@dataclass(frozen=True)
class Launch:
    """What a server has beyond the flags common to all.

    Attributes:
        algorithm: of ``--speculative-algorithm``; None: plain decoding.
        drafter: name of the ModelPair's field that holds its drafter.
        args: further ``--speculative-...`` flags.
        settings: DCUT's configuration.
    """

    algorithm: str | None = None
    drafter: str | None = None
    args: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


LAUNCHES = {
    "plain": Launch(),
    "dflash": Launch("DFLASH", "drafter"),
    "dcut": Launch("DCUT", "drafter"),
    "dcut-paper": Launch("DCUT", "drafter", settings=AS_PUBLISHED),
    "dflash-8": Launch("DFLASH", "drafter", ("--speculative-num-draft-tokens", str(SHORT_BLOCK))),
    "dcut-8": Launch("DCUT", "drafter", ("--speculative-num-draft-tokens", str(SHORT_BLOCK))),
    "ngram": Launch("NGRAM", args=("--speculative-num-draft-tokens", "8")),
    "standalone": Launch("STANDALONE", "small_model", _CHAIN),
    "eagle3": Launch("EAGLE3", "eagle3_head", _CHAIN),
    "mtp": Launch("NEXTN", args=_CHAIN),
    "dspark": Launch("DSPARK", "dspark_drafter"),
    **{name: Launch("DCUT", "drafter", settings=less) for name, less in ABLATIONS.items()},
}


@dataclass(frozen=True)
class Arm:
    """One line of a comparison.

    Attributes:
        name: unique in a run.
        server: the ``LAUNCHES`` entry, or ``--url`` name, whose server it uses.
        knobs: run-time settings that this arm needs of it.
    """

    name: str
    server: str
    knobs: dict[str, float] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The name without what tells two measurements of the same arm apart."""
        return self.name.partition("@")[0]

    @property
    def wants_drafts(self) -> bool:
        """Whether DCUT must draft for this arm, or only where it pays."""
        return self.knobs.get("dcut_force_plain") != 1


FIXED_RATIOS = {25: 0.25, 50: 0.5, 75: 0.75, 100: 1.0}
ARMS = {
    **{name: Arm(name, name) for name in ("plain", "dflash")},
    "dcut": Arm("dcut", "dcut", {"dcut_force_ratio": -1}),
    **{
        f"dcut-{percent}": Arm(f"dcut-{percent}", "dcut", {"dcut_force_ratio": ratio})
        for percent, ratio in FIXED_RATIOS.items()
    },
    **{name: Arm(name, name) for name in LAUNCHES if name not in ("plain", "dflash", "dcut")},
}
# Without one of these the comparison says nothing; the others are skipped with a reason.
REQUIRED_SERVERS = ("plain", "dflash", "dcut")


class UnknownArmError(ValueError):
    """An arm that is not defined, with those that are."""


def find_arm(name: str, urls: Sequence[str] = ()) -> Arm:
    """The arm of that name; ``NAME@LABEL`` measures an arm under a second name.

    Args:
        urls: names of servers that are up already; each is an arm of its own.

    Raises:
        UnknownArmError: there is none.
    """
    base = name.partition("@")[0]
    if base in ARMS:
        return Arm(name, ARMS[base].server, ARMS[base].knobs)
    if base in urls:
        return Arm(name, base)
    raise UnknownArmError(f"no arm {name!r}; there are {', '.join([*ARMS, *urls])}")


def why_not(server: str, pair: ModelPair) -> str | None:
    """Why a server cannot be started for this pair on this device; None where nothing is known
    against it. What is found out only by starting it is not known here."""
    launch = LAUNCHES[server]
    if launch.algorithm == "NEXTN":
        config = json.loads((pair.target / "config.json").read_text())
        if not config.get("num_nextn_predict_layers"):
            return f"the target of {pair.name} has no layers for multi-token prediction"
    if launch.drafter is not None:
        path: Path | None = getattr(pair, launch.drafter)
        what = launch.drafter.replace("_", " ")
        if path is None:
            return f"no {what} for {pair.name}"
        if not (path / "config.json").exists():
            return f"no {what} in {relative(path)}"
    if launch.algorithm is not None:
        return _why_not_on_cpu(launch.algorithm)
    return None


def _why_not_on_cpu(algorithm: str) -> str | None:
    """What the CPU support says; None too where it is not asked, without SGLang."""
    try:
        rivals = importlib.import_module("dcut_sglang.host.cpu.rivals")
    except ImportError:
        return None
    reason: str | None = rivals.runs_on_cpu(algorithm)
    return reason


def relative(text: str | Path) -> str:
    """Paths inside the repository without its place, as rows and messages have them."""
    return str(text).replace(f"{REPO_ROOT}/", "")


def speculative_args(algorithm: str, pair: ModelPair) -> tuple[str, ...]:
    """Launch arguments of an algorithm that takes the pair's DFlash drafter."""
    return (
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(pair.drafter)),
    )


def trace_path(logs: Path, server: str = "dcut") -> Path:
    """Where a DCUT server writes its decision trace."""
    return logs / f"{server}.trace"


def launch_args(
    server: str, pair: ModelPair, dtype: str, logs: Path, settings: dict[str, Any] | None = None
) -> list[str]:
    """All launch arguments of a server but the model; common ones first.

    Args:
        settings: of DCUT, on top of the server's own.
    """
    launch = LAUNCHES[server]
    args = [*COMMON_ARGS, "--dtype", dtype]
    if launch.algorithm is not None:
        args += ["--speculative-algorithm", launch.algorithm]
    if launch.drafter is not None:
        args += ["--speculative-draft-model-path", str(getattr(pair, launch.drafter))]
    args += launch.args
    if launch.algorithm == "DCUT":
        # Every comparison measures its own costs, on the machine as it is now.
        own = {"cost_cache_dir": "", "trace_path": str(trace_path(logs, server))}
        args += ["--dcut-config", json.dumps({**own, **launch.settings, **(settings or {})})]
    return args


def make_server(
    server: str,
    pair: ModelPair,
    dtype: str,
    logs: Path,
    extra: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
) -> Server:
    """A server of ``LAUNCHES``; not started yet."""
    trace_path(logs, server).unlink(missing_ok=True)
    args = launch_args(server, pair, dtype, logs, settings)
    return Server(pair.target, [*args, *extra], log=logs / f"{server}-{dtype}.log")
