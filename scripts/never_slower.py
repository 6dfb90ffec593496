"""DCUT against the better of plain decoding and full DFLASH, at every load.

The three servers are up together; waves of held-out prompts go to them in turn, at each
concurrency and for easy, hard and mixed prompts; of plain decoding and DFLASH, one that is far
behind the other in the first wave runs no more of that cell. Requests differ in length, so that
none is favoured by lockstep (``bench.steady.staggered``). Compared are tokens per CPU-second
of the scheduler process, decoding only, paired by wave, over the time in which at least 85 % of
the slots are busy. Beside each cell stands what replay expects of it, from the drafter's recorded
answers to the same prompts and the server's own costs. ``QUICK=1`` runs four cells. The last line
of output is JSON; the exit status is 1 where DCUT is slower beyond noise, gains less than it
should, or less than replay expects, or does not soon find out that hard prompts do not pay.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dcut_sglang.bench import rows
from dcut_sglang.bench.arms import COMMON_ARGS, PAIRS, make_server
from dcut_sglang.bench.held_out import GROUPS, held_out_prompts, of_group
from dcut_sglang.bench.never_slower_table import geomean_over_plain, newest, table
from dcut_sglang.bench.predicted import RecordedTexts, predicted_over_plain
from dcut_sglang.bench.progress import say
from dcut_sglang.bench.server import REPO_ROOT, Server, stop_on_sigterm
from dcut_sglang.bench.stats import Ratio, geomean, paired_ratio
from dcut_sglang.bench.steady import run_steady_wave, staggered
from dcut_sglang.bench.waves import Prompt, WaveResult, warm
from dcut_sglang.cost import CostTable
from dcut_sglang.machine import fast_dtype

ROWS = REPO_ROOT / "bench_results" / "never-slower.jsonl"
ARMS = ("plain", "dflash", "dcut")
QUICK_CELLS = ((1, "mixed"), (8, "mixed"), (32, "mixed"), (32, "hard"))
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
LOWEST_UPPER_END = 0.97
LOWEST_GEOMEAN = 1.2
LOWEST_SHARE_OF_PREDICTED = 0.95
# Hard prompts, from this concurrency on: steps until the first plain one, time spent looking.
FROM_CONCURRENCY = 16
MOST_STEPS_TO_PLAIN = 32
HIGHEST_LOOK_SHARE = 0.01
# Of plain decoding and DFLASH, one that is so much slower than the other runs one wave only.
OUT_BELOW = 0.6


@dataclass(frozen=True)
class Cell:
    """One concurrency and group of prompts: waves by arm, DCUT's counters, replay's prediction."""

    concurrency: int
    group: str
    waves: dict[str, list[WaveResult]]
    dcut: dict[str, Any]
    predicted_over_plain: float | None

    def ratio(self, denominator: str) -> Ratio:
        """DCUT over an arm, tokens per CPU-second, paired by the waves that both ran."""
        mine, theirs = (
            [wave.tokens_per_cpu_s for wave in self.waves[arm]] for arm in ("dcut", denominator)
        )
        return paired_ratio(mine[: len(theirs)], theirs)

    @property
    def best_other(self) -> str:
        """The better of plain decoding and full DFLASH in this cell."""
        rates = {
            arm: sum(w.num_tokens for w in waves) / sum(w.cpu_s for w in waves)
            for arm, waves in self.waves.items()
        }
        return max(("plain", "dflash"), key=lambda arm: rates[arm])

    def summary(self) -> dict[str, Any]:
        over_best, over_plain = self.ratio(self.best_other), self.ratio("plain")
        return {
            "concurrency": self.concurrency,
            "prompts": self.group,
            "best_other": self.best_other,
            "over_best": [round(v, 3) for v in (over_best.mean, over_best.low, over_best.high)],
            "over_plain": round(over_plain.mean, 3),
            "predicted_over_plain": _rounded(self.predicted_over_plain),
            "over_dflash": round(self.ratio("dflash").mean, 3),
            "accept_length": self.dcut["accept_length"],
            "rows_per_step": round(self.dcut["rows_verified"] / self.dcut["steps"], 2),
            "plain_share": self.dcut["plain_share"],
            "first_plain_step": self.dcut["first_plain_step"],
            "look_share": self.dcut["look_share"],
        }

    @property
    def settles(self) -> bool:
        """Where texts are hard and batches large, whether plain steps were found soon, and
        looking again took little of the time."""
        if self.group != "hard" or self.concurrency < FROM_CONCURRENCY:
            return True
        first, share = self.dcut["first_plain_step"], self.dcut["look_share"]
        return first is not None and first <= MOST_STEPS_TO_PLAIN and share <= HIGHEST_LOOK_SHARE


def measure(
    servers: dict[str, Server],
    prompts: list[Prompt],
    texts: RecordedTexts,
    concurrency: int,
    group: str,
    args: argparse.Namespace,
) -> Cell:
    """Interleaved waves of one cell."""
    chosen = of_group(prompts, group)
    num_requests = max(args.least_requests, args.requests_per_slot * concurrency)
    servers["dcut"].set_state(dcut_reset_metrics=1)
    waves: dict[str, list[WaveResult]] = {arm: [] for arm in ARMS}
    lengths = staggered(args.tokens, num_requests)
    used = [chosen[i % len(chosen)] for i in range(args.waves * num_requests)]
    for wave in range(args.waves):
        batch = used[wave * num_requests : (wave + 1) * num_requests]
        running = [arm for arm in ARMS if not _is_out(waves, arm)]
        for arm in running[wave % len(running) :] + running[: wave % len(running)]:
            waves[arm].append(run_steady_wave(servers[arm], batch, concurrency, lengths))
    dcut = servers["dcut"].dcut()
    bank = texts.of(used, prompts)
    table = CostTable.from_json(dcut["cost_table"])
    predicted = predicted_over_plain(bank, table, concurrency, args.tokens) if bank else None
    cell = Cell(concurrency, group, waves, dcut, predicted)
    rates = ", ".join(f"{arm} {waves[arm][-1].tokens_per_cpu_s:.1f}" for arm in ARMS)
    say(
        f"concurrency {concurrency}, {group}: {rates} tokens/CPU-s; DCUT over {cell.best_other} "
        f"{cell.ratio(cell.best_other)}, over plain {cell.ratio('plain')} "
        f"(replay: {_rounded(predicted)}), "
        f"{100 * cell.dcut['plain_share']:.0f} % plain steps"
    )
    return cell


def _is_out(waves: dict[str, list[WaveResult]], arm: str) -> bool:
    """Whether an arm was so far behind in the first wave that it cannot be DCUT's rival."""
    if arm == "dcut" or not waves[arm]:
        return False
    (other,) = {"plain", "dflash"} - {arm}
    return waves[arm][0].tokens_per_cpu_s < OUT_BELOW * waves[other][0].tokens_per_cpu_s


def row_of(cell: Cell, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """A cell as a row of ``bench_results/``."""
    common = rows.conditions(
        benchmark="never-slower",
        pair="smollm2",
        dtype=dtype,
        threads=1,
        flags=list(COMMON_ARGS),
        tokens=args.tokens,
        lengths="staggered",
        requests_per_slot=args.requests_per_slot,
        command=" ".join(["scripts/never_slower.py", *sys.argv[1:]]),
    )
    per_wave = {
        arm: [round(wave.tokens_per_cpu_s, 3) for wave in waves]
        for arm, waves in cell.waves.items()
    }
    counters = {k: v for k, v in cell.dcut.items() if k not in ("cost_table", "config")}
    return {**common, **cell.summary(), "tokens_per_cpu_s": per_wave, "dcut": counters}


def verdict(cells: list[Cell]) -> dict[str, Any]:
    """The final JSON object."""
    upper = [cell.ratio(cell.best_other).high for cell in cells]
    gained = [cell for cell in cells if cell.group != "hard"]
    over_plain = geomean([cell.ratio("plain").mean for cell in gained])
    predictions = [cell.predicted_over_plain for cell in gained]
    known = [ratio for ratio in predictions if ratio is not None]
    predicted = geomean(known) if known and len(known) == len(gained) else None
    keeps_up = predicted is None or over_plain >= LOWEST_SHARE_OF_PREDICTED * predicted
    return {
        "ok": min(upper) >= LOWEST_UPPER_END
        and over_plain >= LOWEST_GEOMEAN
        and keeps_up
        and all(cell.settles for cell in cells),
        "min_ratio_upper": round(min(upper), 3),
        "geomean_over_plain": round(over_plain, 3),
        "geomean_predicted": _rounded(predicted),
        "cells": [cell.summary() for cell in cells],
    }


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 3)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the servers, measure every cell, keep the rows."""
    pair, dtype = PAIRS["smollm2"], fast_dtype()
    prompts, texts = held_out_prompts(), RecordedTexts()
    if args.quick:
        plan = list(QUICK_CELLS)
    else:
        plan = [(c, group) for group in args.prompts for c in args.concurrency]
    logs = REPO_ROOT / ".cache" / "never-slower-logs"
    say(f"{len(plan)} cells x {args.waves} waves x {len(ARMS)} servers in {dtype}; logs in {logs}")
    with ExitStack() as stack:
        # Nobody traces in service, and a trace costs time.
        untraced = {"trace_path": None}
        servers = {arm: make_server(arm, pair, dtype, logs, settings=untraced) for arm in ARMS}
        # One after the other: DCUT measures its costs as it starts.
        for arm, server in servers.items():
            stack.callback(server.stop)
            server.launch()
            server.wait(timeout_s=600)
            warm(server, prompts)
            say(f"{arm} is up")
        cells = []
        for concurrency, group in plan:
            cells.append(measure(servers, prompts, texts, concurrency, group, args))
            rows.append(ROWS, [row_of(cells[-1], dtype, args)])
    return verdict(cells)


def main() -> int:
    """Parse, run, print the JSON line."""
    stop_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", default=os.environ.get("QUICK") == "1")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--waves", type=int, default=3, help="waves per cell")
    parser.add_argument("--tokens", type=int, default=64, help="mean new tokens per request")
    parser.add_argument("--least-requests", type=int, default=8, help="requests per wave, at least")
    parser.add_argument("--requests-per-slot", type=int, default=2, help="requests of a wave")
    parser.add_argument("--prompts", choices=GROUPS, nargs="+", default=list(GROUPS))
    parser.add_argument("--table", action="store_true", help="print the rows' table, run nothing")
    args = parser.parse_args()
    if args.table:
        known = newest(rows.read(ROWS))
        print("\n".join(table(known)))
        print(f"\nover plain, easy and mixed: {geomean_over_plain(known):.3f}")
        return 0
    result = run(args)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
