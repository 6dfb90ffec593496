"""Requests that arrive at a rate, sent and timed by SGLang's own ``sglang.benchmark.serving``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcut_sglang.bench.data import text_of
from dcut_sglang.bench.endpoint import Endpoint
from dcut_sglang.bench.server import cpu_environment
from dcut_sglang.bench.waves import Prompt, RequestFailed, WaveResult

_LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms")


@dataclass(frozen=True)
class Arrivals:
    """One run of the serving benchmark.

    Attributes:
        overall: tokens and time of the whole run.
        latencies: ``ttft_ms``, ``tpot_ms``, ``itl_ms``, each with p50 and p99.
        command: what ran.
    """

    overall: WaveResult
    latencies: dict[str, dict[str, float]]
    command: tuple[str, ...]


def run_arrivals(
    server: Endpoint,
    target: Path,
    prompts: Sequence[Prompt],
    request_rate: float,
    max_tokens: int,
    *,
    seed: int,
    ignore_eos: bool,
    workdir: Path,
) -> Arrivals:
    """Send the prompts at Poisson arrivals.

    Args:
        target: checkpoint folder, for the tokenizer.
        request_rate: mean arrivals per second.
        workdir: for the data-set file, the results and the log.

    Raises:
        RequestFailed: the benchmark failed, or some of its requests did.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    data, results, log = (workdir / name for name in ("prompts.jsonl", "serving.jsonl", "log"))
    results.unlink(missing_ok=True)
    with data.open("w") as file:
        for prompt in prompts:
            # The second turn only tells how long the answer would be; the flag below overrides it.
            turns = [{"content": text_of(target, prompt.ids)}, {"content": "a b c d"}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    command = (
        *(sys.executable, "-m", "dcut_sglang.bench.serving_client", "--backend", "sglang"),
        *("--base-url", server.url, "--model", str(target), "--tokenizer", str(target)),
        *("--dataset-name", "custom", "--dataset-path", str(data)),
        *("--num-prompts", str(len(prompts)), "--sharegpt-output-len", str(max_tokens)),
        *("--request-rate", str(request_rate), "--seed", str(seed), "--temperature", "0"),
        # The prompts have been sent before, so that the prefix cache holds them.
        *("--warmup-requests", "0", "--disable-tqdm"),
        *("--output-file", str(results), "--output-details"),
        *(() if ignore_eos else ("--disable-ignore-eos",)),
    )
    cpu_start, start = server.scheduler_cpu_s(), time.perf_counter()
    with log.open("w") as output:
        code = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **cpu_environment()},
            check=False,
        ).returncode
    wall_s = time.perf_counter() - start
    cpu_s = server.scheduler_cpu_s() - cpu_start
    if code or not results.exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RequestFailed(f"sglang.benchmark.serving failed with status {code}\n{tail}")
    found = json.loads(results.read_text().splitlines()[-1])
    return parse_results(found, len(prompts), wall_s, cpu_s, command)


def parse_results(
    found: dict[str, Any], sent: int, wall_s: float, cpu_s: float, command: tuple[str, ...]
) -> Arrivals:
    """A result line of the serving benchmark.

    Args:
        wall_s: of the whole process; used where the line has no duration.

    Raises:
        RequestFailed: fewer requests were answered than sent.
    """
    if found["completed"] != sent:
        errors = [error for error in found.get("errors", ()) if error]
        raise RequestFailed(
            f"{found['completed']} of {sent} requests were answered; first error: "
            f"{errors[0][:300] if errors else 'none given (prompts too short or too long?)'}"
        )
    overall = WaveResult(
        found.get("duration", wall_s),
        cpu_s,
        found["total_output_tokens"],
        tuple(found["generated_texts"]),
    )
    latencies = {
        name: {"p50": round(found[f"median_{name}"], 3), "p99": round(found[f"p99_{name}"], 3)}
        for name in _LATENCIES
    }
    return Arrivals(overall, latencies, command)
