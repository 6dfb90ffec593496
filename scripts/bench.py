"""Every arm at every load: rows for figures, tables and reports.

Arms take turns on servers with equal flags, in at least two passes after a warm-up; each row is
one arm, load and pass. An interrupted run goes on where it stopped. Loads are closed loops
(``--concurrency``) or arrivals at a rate (``--request-rate``, by sglang.benchmark.serving). The
last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dcut_sglang.bench import rows
from dcut_sglang.bench.arms import (
    ABLATIONS,
    ARMS,
    PAIRS,
    Arm,
    ModelPair,
    UnknownArmError,
    find_arm,
)
from dcut_sglang.bench.data import DataError, DataSet, load_data
from dcut_sglang.bench.endpoint import ServerError
from dcut_sglang.bench.fleet import OutOfMemoryError
from dcut_sglang.bench.held_out import GROUPS
from dcut_sglang.bench.plan import Cell, Plan
from dcut_sglang.bench.progress import say
from dcut_sglang.bench.rows import RowRefusedError
from dcut_sglang.bench.server import REPO_ROOT, stop_on_sigterm
from dcut_sglang.bench.session import Session
from dcut_sglang.bench.summary import noise_band, noise_line, points, speedup, table
from dcut_sglang.bench.waves import RequestFailed
from dcut_sglang.machine import fast_dtype

DEFAULT_ARMS = tuple(name for name in ARMS if name not in ABLATIONS)
QUICK_ARMS = tuple(name for name in DEFAULT_ARMS if not name.endswith("-8"))
QUICK = {
    "arms": QUICK_ARMS,
    "data": ["mixed"],
    "concurrency": [1, 8],
    "tokens": 24,
    "requests_per_slot": 2,
    "least_requests": 3,
    "dcut_config": '{"probe_budget_s": 15}',
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; ``--quick`` changes defaults only."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(PAIRS), default="smollm2")
    parser.add_argument("--quick", action="store_true", help="two loads, few tokens: < 15 minutes")
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        default=list(DEFAULT_ARMS),
        help=f"ARM or ARM@LABEL, of {', '.join(ARMS)} and --url names; "
        "default: all but DCUT without one of its additions",
    )
    parser.add_argument(
        "--ablations",
        action="store_true",
        help="DCUT without one of its additions at a time, beside plain, DFLASH and DCUT",
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that is up: in place of the one that the arm NAME would start, "
        "or as an arm of its own",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=list(GROUPS),
        metavar="NAME_OR_FILE",
        help="held-out prompts (easy, hard, mixed), or JSON/JSONL files: GSM8K, MATH-500, "
        "HumanEval, MBPP, MT-Bench, ShareGPT or alike",
    )
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--request-rate", type=float, nargs="*", default=[], help="arrivals per second"
    )
    parser.add_argument("--passes", type=int, default=2, help="at least 2, for the noise")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per request")
    parser.add_argument("--requests-per-slot", type=int, default=3)
    parser.add_argument("--least-requests", type=int, default=4, help="per wave")
    parser.add_argument("--num-prompts", type=int, default=32, help="per request rate")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dcut-config", default="{}", help="JSON, for every DCUT server")
    parser.add_argument("--out", type=Path, help="default: bench_results/bench-MODEL.jsonl")
    given = sys.argv[1:] if argv is None else argv
    if "--quick" in given:
        parser.set_defaults(**QUICK)
    if "--ablations" in given:
        parser.set_defaults(arms=("plain", "dflash", "dcut", *ABLATIONS))
    args = parser.parse_args(given)
    if args.passes < 1 or min([*args.concurrency, args.tokens, args.requests_per_slot]) < 1:
        parser.error("passes, concurrency, tokens and requests must be at least 1")
    if any(not rate > 0 for rate in args.request_rate):
        parser.error("a request rate must be above 0")
    if not args.concurrency and not args.request_rate:
        parser.error("nothing to do: give --concurrency or --request-rate")
    return args


def read_urls(pairs: list[str]) -> dict[str, str]:
    """``NAME=URL`` arguments.

    Raises:
        ValueError: one is not of that form.
    """
    urls = {}
    for pair in pairs:
        name, _, url = pair.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise ValueError(f"--url takes NAME=URL, with http:// or https://, got {pair!r}")
        urls[name] = url.rstrip("/")
    return urls


def cells(args: argparse.Namespace, pair: ModelPair) -> tuple[Cell, ...]:
    """Every load on every data set."""
    found: list[Cell] = []
    for name in args.data:
        data: DataSet = load_data(name, pair)
        for concurrency in args.concurrency:
            count = max(args.least_requests, args.requests_per_slot * concurrency)
            found.append(Cell(data, count, concurrency=concurrency))
        found += [Cell(data, args.num_prompts, request_rate=rate) for rate in args.request_rate]
    return tuple(found)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark; the final JSON object."""
    pair = PAIRS[args.model]
    urls = read_urls(args.url)
    names = [*args.arms, *(name for name in urls if name not in ARMS and name not in args.arms)]
    arms: list[Arm] = [find_arm(name, list(urls)) for name in dict.fromkeys(names)]
    prefix = "bench-quick" if args.quick else "bench"
    prefix += "-ablations" if args.ablations else ""
    out = args.out or REPO_ROOT / "bench_results" / f"{prefix}-{pair.name}.jsonl"
    dtype = fast_dtype() if pair.name == "smollm2" else "float32"
    plan = Plan(
        pair, cells(args, pair), args.passes, args.tokens, dtype, args.seed, args.ignore_eos
    )
    session = Session(
        plan,
        arms,
        urls=urls,
        settings=json.loads(args.dcut_config),
        out=out,
        logs=REPO_ROOT / ".cache" / "bench-logs" / pair.name,
    )
    failure = None
    try:
        session.run()
    except (RowRefusedError, RequestFailed, ServerError, OutOfMemoryError) as error:
        failure = str(error)
        print(f"bench: stopped: {error}", file=sys.stderr, flush=True)
    found = points(session.rows)
    band = noise_band(found)
    print("\n" + "\n".join(table(found)) + f"\n\n{noise_line(band)}")
    for name, reason in session.skipped.items():
        print(f"skipped: {name}: {reason}")
    say(f"rows in {out}; figures: scripts/plot.py {out}")
    measured = list(dict.fromkeys(point.arm for point in found))
    return {
        "ok": failure is None and bool(measured),
        **({"error": failure} if failure else {}),
        "arms": measured,
        "skipped": session.skipped,
        "rows": len(session.rows),
        "noise": round(band, 4) if band is not None else None,
        "over_plain": {
            arm: {
                f"{point.load[0]}, {rows.load_label(point.rows[0])}": round(ratio, 3)
                for point in found
                if point.arm == arm and (ratio := speedup(found, arm, point.load)) is not None
            }
            for arm in measured
        },
        "out": str(out),
    }


def main() -> int:
    """Parse, run, print the JSON line; 1 when the run stopped, 2 for unusable arguments."""
    stop_on_sigterm()
    args = parse()
    try:
        result = run(args)
    except (DataError, UnknownArmError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
