"""vLLM's CPU build with the same target and DFlash drafter, beside the benchmark of SGLang's arms.

Each speculation is compared with vLLM's own plain decoding, in passes with the arms in rotated
order, one server at a time. An interrupted run goes on where it stopped. The last line of output is
JSON. `make bench-peer` sets the environment up first.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dcut_sglang.bench import rows
from dcut_sglang.bench.arms import PAIRS, relative
from dcut_sglang.bench.data import DataError, load_data
from dcut_sglang.bench.endpoint import ServerError
from dcut_sglang.bench.held_out import GROUPS
from dcut_sglang.bench.peer import ARMS, NOT_ACROSS_ENGINES, PLAIN, PeerUnavailableError, versions
from dcut_sglang.bench.peer_session import PeerSession
from dcut_sglang.bench.plan import Cell, Plan
from dcut_sglang.bench.progress import say
from dcut_sglang.bench.rows import RowRefusedError
from dcut_sglang.bench.server import REPO_ROOT, stop_on_sigterm
from dcut_sglang.bench.summary import noise_band, noise_line, points, speedup, table
from dcut_sglang.bench.waves import RequestFailed
from dcut_sglang.machine import fast_dtype

NAMES = [arm.name for arm in ARMS]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arms", nargs="+", choices=NAMES, default=NAMES, help=f"{PLAIN} is always one of them"
    )
    parser.add_argument("--data", nargs="+", default=["mixed"], metavar="NAME_OR_FILE",
        help=f"{', '.join(GROUPS)}, or JSON/JSONL files")  # fmt: skip
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--passes", type=int, default=2, help="at least 2, for the noise")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per request")
    parser.add_argument("--requests-per-slot", type=int, default=3)
    parser.add_argument("--least-requests", type=int, default=4, help="per wave")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default=fast_dtype(), help="default: %(default)s, here")
    parser.add_argument(
        "--compiled", action="store_true", help="torch.compile: minutes at each start, faster steps"
    )
    parser.add_argument(
        "--out", type=Path, default=REPO_ROOT / "bench_results" / "bench-peer-smollm2.jsonl"
    )
    args = parser.parse_args(argv)
    counts = [args.passes, args.tokens, args.requests_per_slot, args.least_requests]
    if min([*args.concurrency, *counts]) < 1:
        parser.error("passes, concurrency, tokens and requests must be at least 1")
    return args


def make_session(args: argparse.Namespace, found_versions: dict[str, str]) -> PeerSession:
    """The run that the arguments ask for."""
    pair = PAIRS["smollm2"]
    cells = tuple(
        Cell(load_data(name, pair), max(args.least_requests, args.requests_per_slot * n), n)
        for name in args.data
        for n in args.concurrency
    )
    plan = Plan(pair, cells, args.passes, args.tokens, args.dtype, args.seed, args.ignore_eos)
    arms = [arm for arm in ARMS if arm.name in (PLAIN, *args.arms)]
    logs = REPO_ROOT / ".cache" / "bench-logs" / "peer"
    return PeerSession(plan, arms, args.out, logs, found_versions, args.compiled)


def report(session: PeerSession, failure: str | None) -> dict[str, Any]:
    """Print tables; the final JSON object."""
    found = points(session.rows)
    print("\n" + "\n".join(table(found, over=PLAIN)) + f"\n\n{noise_line(noise_band(found))}")
    print(f"{NOT_ACROSS_ENGINES}.")
    measured = list(dict.fromkeys(point.arm for point in found))
    ratios: dict[str, dict[str, float]] = {arm: {} for arm in measured if arm != PLAIN}
    for point in found:
        ratio = speedup(found, point.arm, point.load, PLAIN)
        if point.arm != PLAIN and ratio is not None:
            label = f"{point.load[0]}, {rows.load_label(point.rows[0])}"
            ratios[point.arm][label] = round(ratio, 3)
    return {
        "ok": failure is None and bool(measured),
        **({"error": failure} if failure else {}),
        "arms": measured,
        "skipped": session.skipped,
        "rows": len(session.rows),
        "over_own_plain": ratios,
        "out": relative(session.out),
    }


def unavailable(reason: str) -> int:
    """vLLM cannot run here: one sentence, the JSON line, exit status 2."""
    print(f"bench-peer: {reason}", file=sys.stderr, flush=True)
    empty: dict[str, Any] = {"arms": [], "skipped": {}, "rows": 0, "over_own_plain": {}}
    print(json.dumps({"ok": False, "error": reason, **empty}))
    return 2


def main() -> int:
    """Parse, run, print the JSON line; 1 when the run stopped, 2 where vLLM cannot run or for
    unusable arguments."""
    stop_on_sigterm()
    args = parse()
    try:
        session = make_session(args, versions())
    except (PeerUnavailableError, DataError) as error:
        return unavailable(str(error))
    say(f"{NOT_ACROSS_ENGINES}.")
    failure = None
    try:
        session.run()
    except PeerUnavailableError as error:
        return unavailable(str(error))
    except (RowRefusedError, RequestFailed, ServerError) as error:
        failure = str(error)
        print(f"bench-peer: stopped: {error}", file=sys.stderr, flush=True)
    print(json.dumps(report(session, failure)))
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
