"""``dcut doctor``: is everything as DCUT expects it, and what to do where it is not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from dcut_sglang import __version__
from dcut_sglang.config import DCutConfig
from dcut_sglang.cost import CostTable, CostTableError
from dcut_sglang.host import compat
from dcut_sglang.host.cpu.activate import BACKEND_NAME, cpu_engine_enabled
from dcut_sglang.machine import allocator


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``ok`` None: for information only."""

    topic: str
    ok: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[self.ok]
        return f"{mark} {self.topic:<12} {self.text}"


def examine(model_path: str | None = None, draft_model_path: str | None = None) -> int:
    """Print the report; 1 when something is wrong, with what to run."""
    print(f"dcut_sglang {__version__}")
    warnings.simplefilter("ignore")  # SGLang's imports warn about every device that is not here
    findings: list[Finding] = []
    for finding in _findings(model_path, draft_model_path):
        print(finding, flush=True)
        findings.append(finding)
    if any(finding.ok is False for finding in findings):
        return 1
    target, drafter = model_path or "TARGET", draft_model_path or "DRAFTER"
    print(
        f"next: python -m sglang.launch_server --model-path {target} --device cpu "
        f"--speculative-algorithm DCUT --speculative-draft-model-path {drafter}"
    )
    return 0


def _findings(model_path: str | None, draft_model_path: str | None) -> Iterator[Finding]:
    if compat.installed_version() is None:
        yield Finding("sglang", False, compat.problems()[0].sentence)
        return
    environment = list(_environment())
    yield from environment
    if any(finding.ok is False for finding in environment):
        return  # sglang does not even import then
    problems = compat.problems()
    for problem in problems:
        yield Finding("seams", False, problem.sentence)
    if problems:
        return
    yield Finding(
        "sglang",
        True,
        f"{compat.installed_version()}; {len(compat.SEAMS)} seams are as expected, "
        "no patches needed",
    )
    yield from _plugins()
    yield from _cost_tables()
    if model_path is not None and draft_model_path is not None:
        yield _drafter(model_path, draft_model_path)


def _environment() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        yield Finding("device", None, f"{torch.cuda.get_device_name()}: not served yet, CPU only")
    yield Finding("torch", None, f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield Finding("allocator", None, _allocator())
    shims = Path(__file__).parent / "cpu" / "shims"
    on_path = str(shims) in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    yield Finding(
        "cpu engine",
        cpu_engine_enabled() and on_path,
        "SGLANG_USE_CPU_ENGINE=1 and the stand-ins are on PYTHONPATH"
        if cpu_engine_enabled() and on_path
        else "not set up; run: source scripts/cpu_env.sh",
    )


def _allocator() -> str:
    found = allocator()
    if found != "libc":
        return found
    return "libc's; tcmalloc is faster on a CPU: apt-get install libtcmalloc-minimal4"


def _plugins() -> Iterator[Finding]:
    registered = {ep.name for ep in entry_points(group="sglang.srt.plugins")}
    allowed = {name for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name}
    if "dcut" not in registered:
        yield Finding("plugin", False, "not installed as a plugin; run: pip install -e .")
        return
    if allowed and "dcut" not in allowed:
        yield Finding("plugin", False, "SGLANG_PLUGINS leaves dcut out; unset it or add dcut to it")
        return
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_registry import get_spec

    from dcut_sglang.host.hooks import HOOKS, missing_hooks

    load_plugins()
    found = get_spec("DCUT") is not None
    missing = missing_hooks()
    if not found or missing:
        what = "DCUT is not registered" if not found else f"not hooked: {', '.join(missing)}"
        yield Finding("plugin", False, f"{what}; see the log lines above")
    else:
        yield Finding("plugin", True, f"DCUT is registered, {len(HOOKS)} hooks are in place")
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.platforms import current_platform

    if cpu_engine_enabled():
        yield Finding(
            "backend",
            BACKEND_NAME in ATTENTION_BACKENDS and current_platform.is_out_of_tree(),
            f"attention backend {BACKEND_NAME}, platform {type(current_platform).__name__}",
        )


def _cost_tables() -> Iterator[Finding]:
    folder = Path(DCutConfig().cost_cache_dir).expanduser()
    tables = sorted(folder.glob("cost-*.json"))
    if not tables:
        yield Finding("costs", None, "none cached; the first start measures them (30 s)")
    for path in tables:
        try:
            fingerprint = CostTable.load(path).fingerprint
            yield Finding(
                "costs",
                None,
                f"cached: {fingerprint.get('target')} + {fingerprint.get('drafter')}, "
                f"{fingerprint.get('dtype')}, {fingerprint.get('device')}",
            )
        except CostTableError as error:
            yield Finding("costs", None, f"will be measured again: {error}")


def _drafter(model_path: str, draft_model_path: str) -> Finding:
    from sglang.srt.utils.hf_transformers_utils import get_config

    from dcut_sglang.host.server_args import check_drafter

    try:
        target = get_config(model_path, trust_remote_code=False).get_text_config()
        draft = get_config(draft_model_path, trust_remote_code=False)
        check_drafter(draft, target=target, drafter=draft_model_path)
    except (OSError, ValueError) as error:
        return Finding("drafter", False, str(error))
    return Finding("drafter", True, f"{draft_model_path} fits {model_path}")
