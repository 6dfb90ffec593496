"""Plain decoding, builtin DFLASH and DCUT on this machine's CPU, side by side.

Part 1 checks that all emit the same token ids (float32). Part 2 sends waves of prompts through
the OpenAI-compatible API at rising concurrency, the arms interleaved, and compares tokens per
CPU-second of the scheduler process, decoding only. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dcut_sglang.bench import rows
from dcut_sglang.bench.arms import COMMON_ARGS, PAIRS, ModelPair, make_server, trace_path
from dcut_sglang.bench.data import chat_ids
from dcut_sglang.bench.progress import say
from dcut_sglang.bench.server import REPO_ROOT, Server, stop_on_sigterm
from dcut_sglang.bench.speed_figures import throughput_figure
from dcut_sglang.bench.stats import Ratio, paired_ratio
from dcut_sglang.bench.waves import Prompt, WaveResult, run_wave, warm
from dcut_sglang.cost import CostTable
from dcut_sglang.machine import fast_dtype
from dcut_sglang.replay.reproduce import reproduce
from dcut_sglang.trace import read_trace

ARMS = ("plain", "dflash", "dcut")
PHASES = ("draft", "head", "confidence", "decide", "verify", "commit")
IDENTITY_CONCURRENCY = 8
FORCED = {
    "dcut ratio 0.25": {"dcut_force_ratio": 0.25},
    "dcut ratio 0.5": {"dcut_force_ratio": 0.5},
    "dcut plain steps": {"dcut_force_plain": 1},
}
AUTO = {"dcut_force_ratio": -1}


def load_prompts(pair: ModelPair) -> list[Prompt]:
    """Held-out prompts of the pair, kinds interleaved."""
    if pair.name == "smollm2":
        path = REPO_ROOT / "scripts" / "demo_prompts.json"
    else:
        path = REPO_ROOT / "models" / "tiny" / "prompts.json"
    return [Prompt(entry["kind"], entry["prompt"]) for entry in json.loads(path.read_text())]


def start(arms: tuple[str, ...], pair: ModelPair, dtype: str, logs: Path) -> dict[str, Server]:
    """Start the arms together and wait for all of them."""
    servers = {arm: make_server(arm, pair, dtype, logs) for arm in arms}
    say(f"starting {', '.join(arms)} in {dtype} (imports dominate; logs in {logs})")
    with ExitStack() as on_failure:
        for server in servers.values():
            on_failure.callback(server.stop)
            server.launch()
        for arm, server in servers.items():
            server.wait(timeout_s=600)
            say(f"  {arm} is up")
        on_failure.pop_all()
    return servers


def output_ids(server: Server, inputs: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy continuations, ``IDENTITY_CONCURRENCY`` requests at a time."""

    def one(input_ids: list[int]) -> list[int]:
        answer = server.generate(
            input_ids=input_ids,
            sampling_params={"temperature": 0, "max_new_tokens": max_tokens},
        )
        answer.raise_for_status()
        return answer.json()["output_ids"]

    with ThreadPoolExecutor(IDENTITY_CONCURRENCY) as pool:
        return list(pool.map(one, inputs))


def identity(
    servers: dict[str, Server], pair: ModelPair, args: argparse.Namespace
) -> dict[str, int]:
    """How many of the prompts give the same ids as plain decoding, by arm."""
    prompts = load_prompts(pair)[: args.identity_prompts]
    inputs = [list(chat_ids(pair.target, prompt.text)) for prompt in prompts]
    say(f"part 1: identity of {len(inputs)} prompts x {args.tokens} tokens, float32")
    expected = output_ids(servers["plain"], inputs, args.tokens)
    same: dict[str, int] = {}

    def compare(name: str, server: Server) -> None:
        server_start = time.monotonic()
        found = output_ids(server, inputs, args.tokens)
        same[name] = sum(a == b for a, b in zip(expected, found, strict=True))
        tokens_per_s = sum(map(len, found)) / (time.monotonic() - server_start)
        note = ""
        if name.startswith("dcut"):
            state = server.dcut()
            per_step = state["rows_verified"] / max(1, state["steps"])
            note = f", accept length {state['accept_length']:.2f}, {per_step:.0f} rows per step"
        say(f"  {name}: {same[name]}/{len(inputs)} identical, {tokens_per_s:.1f} tokens/s{note}")

    compare("dflash", servers["dflash"])
    for name, knobs in {"dcut": AUTO, **FORCED}.items():
        servers["dcut"].set_state(**knobs, dcut_reset_metrics=1)
        compare(name, servers["dcut"])
    servers["dcut"].set_state(**AUTO)
    return same


def measure(
    servers: dict[str, Server], pair: ModelPair, args: argparse.Namespace
) -> dict[int, dict[str, Any]]:
    """Waves at every concurrency: results by arm, and DCUT's counters."""
    prompts = load_prompts(pair)
    say("part 2: speed; bringing the prompts into each server's prefix cache")
    for server in servers.values():
        warm(server, prompts)
    plan = [(c, wave) for c in args.concurrency for wave in range(args.waves)]
    cells: dict[int, dict[str, Any]] = {}
    begun = time.monotonic()
    for done, (concurrency, wave) in enumerate(plan):
        if wave == 0:
            servers["dcut"].set_state(dcut_reset_metrics=1)
            cells[concurrency] = {"waves": {arm: [] for arm in ARMS}}
        num_requests = args.requests_per_slot * concurrency
        first = wave * num_requests
        batch = [prompts[(first + i) % len(prompts)] for i in range(num_requests)]
        # Rotate the order, so that no arm always runs on the machine another one heated up.
        for arm in ARMS[wave % len(ARMS) :] + ARMS[: wave % len(ARMS)]:
            result = run_wave(servers[arm], batch, concurrency, args.tokens)
            cells[concurrency]["waves"][arm].append(result)
        cells[concurrency]["dcut"] = servers["dcut"].dcut()
        rates = ", ".join(
            f"{arm} {cells[concurrency]['waves'][arm][-1].tokens_per_cpu_s:.1f}" for arm in ARMS
        )
        spent, share = time.monotonic() - begun, _work(plan[: done + 1]) / _work(plan)
        left_s = spent / share - spent
        say(f"  concurrency {concurrency}, wave {wave + 1}/{args.waves}: {rates} tokens/CPU-s; "
            f"about {left_s:.0f} s left")  # fmt: skip
    return cells


def _work(plan: list[tuple[int, int]]) -> float:
    return sum(4 + concurrency for concurrency, _ in plan)


def ratio(waves: dict[str, list[WaveResult]], numerator: str, denominator: str) -> Ratio:
    """Tokens per CPU-second of one arm over another, paired by wave."""
    return paired_ratio(
        [w.tokens_per_cpu_s for w in waves[numerator]],
        [w.tokens_per_cpu_s for w in waves[denominator]],
    )


def make_rows(
    cells: dict[int, dict[str, Any]], pair: ModelPair, dtype: str, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per arm and concurrency."""
    common = rows.conditions(
        benchmark="demo",
        pair=pair.name,
        dtype=dtype,
        threads=1,
        flags=list(COMMON_ARGS),
        tokens=args.tokens,
        requests_per_slot=args.requests_per_slot,
        command=" ".join(["scripts/demo.py", *sys.argv[1:]]),
    )
    out = []
    for concurrency, cell in cells.items():
        for arm in ARMS:
            waves: list[WaveResult] = cell["waves"][arm]
            out.append(
                {
                    **common,
                    "arm": arm,
                    "concurrency": concurrency,
                    "waves": len(waves),
                    "tokens_per_s": [round(w.tokens_per_s, 3) for w in waves],
                    "tokens_per_cpu_s": [round(w.tokens_per_cpu_s, 3) for w in waves],
                    "dcut": {k: v for k, v in cell["dcut"].items() if k != "cost_table"}
                    if arm == "dcut"
                    else None,
                }
            )
    return out


def draw(new_rows: list[dict[str, Any]], path: Path) -> Path:
    """Throughput over concurrency."""
    rates: dict[str, dict[int, list[float]]] = {arm: {} for arm in ARMS}
    for row in new_rows:
        rates[row["arm"]][row["concurrency"]] = row["tokens_per_cpu_s"]
    row = new_rows[0]
    caption = f"{row['pair']}, {row['dtype']}, {row['machine']['cpu']}, commit {row['commit']}"
    return throughput_figure(rates, path, caption)


def print_table(cells: dict[int, dict[str, Any]]) -> None:
    """The comparison, a line per concurrency."""
    print(
        "\n| concurrency | plain tok/s | DFLASH tok/s | DCUT tok/s | accept length | rows/step "
        "| keep ratio | plain steps | DCUT/plain | DCUT/DFLASH |\n"
        "|---:|---:|---:|---:|---:|---:|---:|---:|---|---|"
    )
    for concurrency, cell in cells.items():
        waves, state = cell["waves"], cell["dcut"]
        rates = [sum(w.tokens_per_s for w in waves[arm]) / len(waves[arm]) for arm in ARMS]
        kept = state["drafts_kept"] / max(1, state["drafts_proposed"])
        print(
            f"| {concurrency} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[2]:.1f} "
            f"| {state['accept_length']:.2f} | {state['rows_verified'] / state['steps']:.1f} "
            f"| {kept:.2f} | {100 * state['plain_share']:.0f} % "
            f"| {ratio(waves, 'dcut', 'plain')} | {ratio(waves, 'dcut', 'dflash')} |"
        )
    print(
        "\nRatios: tokens per CPU-second of the scheduler process, paired by wave, geometric mean "
        "and 95 % bootstrap interval; decoding only.\n",
        flush=True,
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole demo; the final JSON object."""
    pair = PAIRS[args.model]
    speed_dtype = fast_dtype() if pair.name == "smollm2" else "float32"
    logs = REPO_ROOT / ".cache" / "demo-logs"
    if speed_dtype == "float32":
        say("speed is measured in float32: this CPU has no bf16 instructions"
            if pair.name == "smollm2" else "the tiny pair is float32 throughout")  # fmt: skip
    else:
        say("speed is measured in bf16, which is not token-equal across batch shapes")
    servers = start(ARMS, pair, "float32", logs)
    try:
        same = identity(servers, pair, args)
        if speed_dtype != "float32":
            for server in servers.values():
                server.stop()
            servers = start(ARMS, pair, speed_dtype, logs)
        cells = measure(servers, pair, args)
    finally:
        for server in servers.values():
            server.stop()
    print_table(cells)
    table = CostTable.from_json(next(iter(cells.values()))["dcut"]["cost_table"])
    recorded = reproduce(read_trace(trace_path(logs)), table)
    say(f"replay of the recorded run: {recorded.tokens} tokens, {recorded.rows} rows in "
        f"{recorded.steps} steps; predicted {recorded.predicted_ms / 1e3:.1f} s, measured "
        f"{recorded.measured_ms / 1e3:.1f} s ({100 * recorded.time_error:+.1f} %; by the server, "
        f"planning included, {100 * recorded.server_error:+.1f} %)")  # fmt: skip
    path = REPO_ROOT / "bench_results" / f"demo-{pair.name}.jsonl"
    new_rows = make_rows(cells, pair, speed_dtype, args)
    rows.append(path, new_rows)
    figure = draw(new_rows, path.with_suffix(".png"))
    say(f"rows in {path.relative_to(REPO_ROOT)}, figure in {figure.relative_to(REPO_ROOT)}")

    identical = min(same.values())
    busiest = cells[max(cells)]["dcut"]
    phases = {p: busiest[f"{p}_ms"] for p in PHASES}
    return {
        "ok": identical == args.identity_prompts,
        "identical": identical,
        "prompts": args.identity_prompts,
        "dcut_over_plain": {c: round(ratio(v["waves"], "dcut", "plain").mean, 3)
                            for c, v in cells.items()},
        "dcut_over_dflash": {c: round(ratio(v["waves"], "dcut", "dflash").mean, 3)
                             for c, v in cells.items()},
        "accept_length": {c: v["dcut"]["accept_length"] for c, v in cells.items()},
        "selector_share": round(phases["decide"] / sum(phases.values()), 5),
        "confidence_share": round(phases["confidence"] / sum(phases.values()), 5),
        "replay_time_error": round(recorded.time_error, 4),
        "server_time_error": round(recorded.server_error, 4),
        "probe_s": busiest["probe_s"],
    }  # fmt: skip


def main() -> int:
    """Parse, run, print the JSON line; 1 when an answer differed."""
    stop_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", choices=sorted(PAIRS), default="smollm2")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per request")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--waves", type=int, default=2, help="waves per concurrency")
    parser.add_argument(
        "--requests-per-slot",
        type=int,
        default=2,
        help="requests of a wave, per concurrent request",
    )
    parser.add_argument("--identity-prompts", type=int, default=16)
    result = run(parser.parse_args())
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
