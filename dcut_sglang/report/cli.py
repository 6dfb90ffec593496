"""``dcut report``: rows and traces as one HTML file.

dcut report bench_results/*.jsonl -o report.html
dcut report dcut.trace --steps 200:400 -o report.html
dcut report old.trace --costs TABLE -o report.html     candidates recomputed
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dcut_sglang import __version__
from dcut_sglang.config import ConfigError, DCutConfig
from dcut_sglang.cost import CostTableError
from dcut_sglang.replay.cli import BUILT_IN_COSTS, load_costs
from dcut_sglang.report.errors import ReportError
from dcut_sglang.report.page import page
from dcut_sglang.report.rows import Rows, read_rows
from dcut_sglang.report.traces import TIME_SURPRISE, TOKEN_SURPRISE, Window, trace_data
from dcut_sglang.selector import Selector
from dcut_sglang.trace import Trace, TraceError, read_trace
from dcut_sglang.trace.records import FORMAT


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dcut report``."""
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="ROWS_OR_TRACE", help="JSON lines, decision traces"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="HTML file to write")
    parser.add_argument("--title", default="D-Cut report")
    parser.add_argument(
        "--steps",
        default="1:1000",
        metavar="A:B",
        help="steps of each trace to show, by place; default: %(default)s",
    )
    parser.add_argument(
        "--costs",
        help="cost table to recompute candidates with where a trace has none: "
        f"a JSON file or one of {', '.join(BUILT_IN_COSTS)}",
    )
    parser.add_argument("--config", help="DCUT configuration of --costs: JSON or a file")


def run_report(args: argparse.Namespace) -> int:
    """Run ``dcut report``; returns the exit status: 2 for unusable input."""
    try:
        text = page(report_data(args))
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text, encoding="utf-8")
    except (ReportError, TraceError, CostTableError, ConfigError, OSError) as error:
        print(f"dcut report: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output} ({len(text) / 2**20:.1f} MiB); open it in a browser")
    return 0


def report_data(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the page shows, as plain data.

    Raises:
        ReportError, TraceError, CostTableError, ConfigError, OSError: unusable input.
    """
    window = Window.parse(args.steps)
    selector = None
    if args.costs:
        selector = Selector(load_costs(args.costs), DCutConfig.parse(args.config))
    rows, conditions, traces = [], [], []
    for path in args.inputs:
        found = read_input(path)
        if isinstance(found, Rows):
            rows += [row.to_json() for row in found.arms]
            conditions += found.conditions
        else:
            traces.append(trace_data(found, path.name, window, selector))
    return {
        "title": args.title,
        "version": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "costs": args.costs,
        "surprise": {"time": TIME_SURPRISE, "tokens": TOKEN_SURPRISE},
        "rows": rows,
        "conditions": conditions,
        "traces": traces,
    }


def read_input(path: Path) -> Rows | Trace:
    """Rows or a trace, told apart by the first bytes.

    Raises:
        ReportError: neither.
        TraceError: a trace that cannot be read.
        OSError: the file cannot be read.
    """
    if path.is_dir():
        raise ReportError(f"{path}: expected a file of rows or a trace, got a folder")
    with path.open("rb") as file:
        start = file.read(64)
    if start.lstrip()[:1] in (b"{", b""):
        return read_rows(path)
    if FORMAT.encode() not in start:
        raise ReportError(
            f"{path}: expected rows (JSON lines, as in bench_results/) or a decision trace "
            f"(trace_path of --dcut-config); got a file that begins with {start[:16]!r}"
        )
    return read_trace(path)
