"""``dcut replay``: policies on a recorded or built-in trace, and the published tables.

    dcut replay                          the built-in texts and CPU costs
    dcut replay TRACE --costs TABLE      a server's trace, or an every-anchor file
    dcut replay --published              the published tables
    dcut replay --regret                 shares of the knowing policy on three cost tables
    dcut replay --load                   the load simulator

``--published`` and ``--regret`` end with one line of JSON and exit 1 when not ok.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from dcut_sglang.config import ConfigError, DCutConfig
from dcut_sglang.cost import CostTable, CostTableError
from dcut_sglang.published import h20
from dcut_sglang.replay.anchors import (
    HELD_OUT_TEXTS,
    OPEN_TEXTS,
    AnchorBank,
    NotReplayableError,
)
from dcut_sglang.replay.controlled import LABEL as CONTROLLED
from dcut_sglang.replay.controlled import calibration_errors
from dcut_sglang.replay.policies import FixedRatio, Plain, dcut_as_published, ours
from dcut_sglang.replay.regret import TABLE_HEADER, Comparison, compare, table_rows
from dcut_sglang.replay.reproduce import reproduce
from dcut_sglang.replay.simulator import Load, simulate
from dcut_sglang.trace import Trace, TraceError, read_trace

CPU_COSTS = Path(__file__).parents[1] / "data" / "smollm2_cpu_costs.json"
BUILT_IN_COSTS: dict[str, Callable[[], CostTable]] = {
    "smollm2-cpu": lambda: CostTable.load(CPU_COSTS),
    "qwen3-8b-h20": h20.qwen3_8b,
    "flat-moe-h20": h20.flat_moe,
}


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dcut replay``."""
    parser.add_argument("trace", nargs="?", help="decision trace, or every-anchor .npz file")
    parser.add_argument(
        "--costs",
        default="smollm2-cpu",
        help=f"cost table: a JSON file or one of {', '.join(BUILT_IN_COSTS)}; default: %(default)s",
    )
    parser.add_argument("--config", help="DCUT configuration of 'ours': JSON or a file")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, default=1500, help="per world, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--published", action="store_true", help="recompute the published tables")
    what.add_argument("--regret", action="store_true", help="built-in texts, three cost tables")
    what.add_argument("--load", action="store_true", help="load simulator, rows as JSON lines")
    parser.add_argument(
        "--page", type=Path, help="--published: write published.md and figures here"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--requests", type=int, help="--load: served in all; default 4 waves")
    parser.add_argument(
        "--rate", type=float, help="--load: arrivals per second; default: all at once"
    )
    parser.add_argument("--kind", choices=("all", "easy", "hard"), default="all")
    parser.add_argument("--prompt-len", type=int, help="--load: default as in the texts")
    parser.add_argument("--length", type=int, default=1, help="--load: texts per request")


def run_replay(args: argparse.Namespace) -> int:
    """Run ``dcut replay``; returns the exit status: 2 for unusable input, 1 for "not ok"."""
    try:
        if args.published:
            return run_published(args)
        if args.regret:
            return run_regret(args)
        return run_load(args) if args.load else run_trace(args)
    except (TraceError, CostTableError, ConfigError, ValueError, OSError) as error:
        print(f"dcut replay: {error}", file=sys.stderr)
        return 2


def run_trace(args: argparse.Namespace) -> int:
    table = load_costs(args.costs)
    try:
        bank = _texts(args, table)
    except NotReplayableError as error:
        # The recorded run has been reproduced; only other policies cannot be tried on it.
        print(f"other policies cannot be replayed: {error}")
        return 0
    _print_table(
        compare(
            bank,
            table,
            args.batch_sizes,
            config=DCutConfig.parse(args.config),
            num_tokens=args.tokens,
            seed=args.seed,
            progress=_progress(args),
        )
    )
    return 0


def run_published(args: argparse.Namespace) -> int:
    from dcut_sglang.published.page import write_page
    from dcut_sglang.published.tables import KNOWN_MISSES, TOLERANCE, all_checks

    checks = all_checks()
    for c in checks:
        print(f"{c.name:48s} {c.published:9.4g} {c.predicted:9.4g} {c.error:+7.1%}  {c.status}")
    if args.page:
        write_page(checks, args.page)
        print(f"wrote {args.page / 'published.md'}")
    good = [c for c in checks if c.status == "reproduced"]
    # A keep ratio has an absolute tolerance of its own.
    max_error = max(abs(c.error) for c in good if "choice" not in c.name)
    missed = [c for c in checks if c.status != "reproduced"]
    unexplained = [c.name for c in missed if c.name not in KNOWN_MISSES]
    result = {
        "ok": not unexplained and max_error <= TOLERANCE,
        "max_error": round(max_error, 4),
        "reproduced": [c.name for c in good],
        "not_reproduced": {c.name: f"{c.error:+.1%}, {c.status}" for c in missed},
    }
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def run_regret(args: argparse.Namespace) -> int:
    bank = AnchorBank.load()
    cpu = CostTable.load(CPU_COSTS)
    policies: dict[str, dict[str, float]] = {}
    regret: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    for name, table, sizes in (
        ("SmolLM2-135M, CPU", cpu, args.batch_sizes),
        ("Qwen3-8B, H20 (published)", h20.qwen3_8b("May"), h20.BATCH_SIZES),
        ("flat MoE, H20 (partly assumed)", h20.flat_moe(), h20.BATCH_SIZES),
    ):
        print(f"\n{name}; texts of SmolLM2, D = 16\n")
        found = _print_table(
            compare(
                bank,
                table,
                sizes,
                num_tokens=args.tokens,
                seed=args.seed,
                ablations=table is cpu,
                progress=_progress(args),
            )
        )
        wrong += [f"{name}, {w}" for c in found for w in c.failed_searches()]
        if table is cpu:
            for c in found:
                for label in c.cells:
                    policies.setdefault(label, {})[str(c.bs)] = round(c.share_of_knowing(label), 4)
                    regret.setdefault(label, {})[str(c.bs)] = round(c.clairvoyant_regret(label), 4)
    for line in wrong:
        print(f"search failed: {line}")
    shares = policies[CONTROLLED]
    low = [f"bs {bs}: {s:.3f}" for bs, s in shares.items() if 4 <= int(bs) <= 32 and s < 0.97]
    print(f"\nshares of the knowing policy below 0.97 at bs 4 to 32: {', '.join(low) or 'none'}")
    errors = {name: calibration_errors(texts, cpu) for name, texts in _workloads().items()}
    for name, (raw, calibrated) in errors.items():
        print(f"calibration error of survival, {name}: {raw:.4f} raw, {calibrated:.4f} calibrated")
    result = {
        "ok": not wrong and not low,
        "policies": policies,
        "clairvoyant_regret": regret,
        "ece_raw": {name: round(raw, 4) for name, (raw, _) in errors.items()},
        "ece_calibrated": {name: round(found, 4) for name, (_, found) in errors.items()},
    }
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def _workloads() -> dict[str, AnchorBank]:
    """Texts that the drafter was trained for, and others."""
    return {"home": AnchorBank.load(), "shifted": AnchorBank.load(OPEN_TEXTS)}


def run_load(args: argparse.Namespace) -> int:
    table = load_costs(args.costs)
    bank = _texts(args, table)
    config = DCutConfig.parse(args.config)
    for concurrency in args.concurrency:
        load = Load(
            concurrency,
            args.requests or 4 * concurrency,
            args.rate,
            args.kind,
            args.prompt_len,
            args.length,
            args.seed,
        )
        for policy in (Plain(), FixedRatio((1.0,)), dcut_as_published(table), ours(table, config)):
            row = simulate(bank, policy, table, load)
            values = {k: None if v != v else v for k, v in asdict(row).items()}
            print(json.dumps(values), flush=True)
    return 0


def load_costs(name: str) -> CostTable:
    """A built-in cost table by its name, or one from a JSON file.

    Raises:
        CostTableError: neither.
    """
    built_in = BUILT_IN_COSTS.get(name)
    return built_in() if built_in else CostTable.load(Path(name))


def _texts(args: argparse.Namespace, table: CostTable) -> AnchorBank:
    if args.trace is None or args.trace.endswith(".npz"):
        return AnchorBank.load(args.trace or HELD_OUT_TEXTS)
    trace = read_trace(args.trace)
    if trace.truncated:
        print(f"truncated trace ({trace.end}): {len(trace.steps)} whole steps", file=sys.stderr)
    _print_reproduction(trace, table)
    return AnchorBank.from_trace(trace)


def _print_reproduction(trace: Trace, table: CostTable) -> None:
    r = reproduce(trace, table)
    print(
        f"recorded run: {r.steps} steps ({r.plain_steps} plain), {r.tokens} tokens, {r.rows} rows; "
        f"predicted {r.predicted_ms:.0f} ms, measured {r.measured_ms:.0f} ms "
        f"({r.time_error:+.1%}; by the server, planning included, {r.server_error:+.1%}; "
        f"median step {r.median_step_error:.1%})"
    )


def _print_table(comparisons: Iterable[Comparison]) -> list[Comparison]:
    found = []
    print("\n".join(TABLE_HEADER))
    for comparison in comparisons:
        print("\n".join(table_rows(comparison)), flush=True)
        found.append(comparison)
    return found


def _progress(args: argparse.Namespace) -> Callable[[str], None] | None:
    if args.quiet:
        return None
    started = time.monotonic()

    def show(what: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {what}", file=sys.stderr, flush=True)

    return show


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m dcut_sglang.replay.cli``."""
    parser = argparse.ArgumentParser(prog="dcut replay", description=__doc__)
    add_replay_arguments(parser)
    return run_replay(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
