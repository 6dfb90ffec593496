"""Every figure and table of a benchmark, from its rows and nothing else.

    scripts/plot.py bench_results/bench-smollm2.jsonl
    make regret > regret.txt; scripts/plot.py ROWS --replay regret.txt

Writes PNG and SVG of each figure, ``table.md`` and ``speedups.md`` to
``bench_results/figures/NAME``. A figure whose rows are missing is skipped with the reason. The
last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcut_sglang.bench import rows as row_files
from dcut_sglang.bench import speed_figures, step_figures
from dcut_sglang.bench.speed_figures import NothingToDrawError
from dcut_sglang.bench.summary import (
    Row,
    noise_band,
    noise_line,
    of_last_commit,
    points,
    speedup_table,
    table,
)

Figure = Callable[[list[Row], Path, str], Path]
FIGURES: dict[str, Figure] = {
    "throughput": speed_figures.throughput,
    "per_user": speed_figures.per_user,
    "speedup": speed_figures.heat_map,
    "fixed_and_auto": speed_figures.fixed_and_auto,
    "arrivals": speed_figures.arrivals,
    "cost_curve": step_figures.cost_curve,
    "kept_by_batch_size": step_figures.kept_by_batch_size,
    "acceptance": step_figures.acceptance,
    "reliability": step_figures.reliability,
    "predicted_and_measured": step_figures.predicted_and_measured,
}


def caption(row: Row) -> str:
    """The conditions of a figure, in a line."""
    return (
        f"{row['pair']}, {row['dtype']}, {row['machine']['cpu']}, {row['threads']} thread(s), "
        f"SGLang {row['versions']['sglang']}, T = 0, {row['load']['tokens']} tokens, "
        f"commit {row['commit']}, {row['time'][:10]}"
    )


def read_replay(path: Path) -> dict[str, Any]:
    """The JSON that ends the output of ``dcut replay --regret``.

    Raises:
        ValueError: the last line is no JSON object.
    """
    lines = path.read_text().strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected the output of `dcut replay --regret`, ending in JSON")
    return found


def draw(path: Path, out: Path, replay: Path | None) -> dict[str, Any]:
    """All figures and tables of a file; what was drawn and what was not.

    Raises:
        ValueError: the file has no rows of the benchmark.
    """
    every = [row for row in row_files.read(path) if row.get("benchmark") == "bench"]
    if not every:
        raise ValueError(f"{path} has no rows of the benchmark; make some with `make bench`")
    rows = of_last_commit(every)
    if len(rows) < len(every):
        print(f"{len(every) - len(rows)} rows of other commits or machines are left out")
    drawn, skipped = [], {}
    for name, figure in FIGURES.items():
        try:
            drawn.append(figure(rows, out / name, caption(rows[-1])).name)
        except NothingToDrawError as error:
            skipped[name] = str(error)
    if replay is not None:
        found = read_replay(replay)
        drawn.append(
            step_figures.share_of_knowing(
                found, out / "share_of_knowing", f"recorded texts of SmolLM2, {replay.name}"
            ).name
        )
    else:
        skipped["share_of_knowing"] = "no --replay file"
    found_points = points(rows)
    head = f"{caption(rows[-1])}; {noise_line(noise_band(found_points))}\n\n"
    (out / "table.md").write_text(head + "\n".join(table(found_points)) + "\n")
    (out / "speedups.md").write_text(head + "\n".join(speedup_table(found_points)) + "\n")
    return {"ok": bool(drawn), "figures": drawn, "skipped": skipped, "out": str(out)}


def main() -> int:
    """Parse, draw, print the JSON line; 2 for unusable input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="JSONL file of scripts/bench.py")
    parser.add_argument("--out", type=Path, help="default: figures/NAME beside the rows")
    parser.add_argument("--replay", type=Path, help="output of `dcut replay --regret`")
    args = parser.parse_args()
    out = args.out or args.rows.parent / "figures" / args.rows.stem
    out.mkdir(parents=True, exist_ok=True)
    try:
        result = draw(args.rows, out, args.replay)
    except (ValueError, OSError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    for name, reason in result["skipped"].items():
        print(f"skipped: {name}: {reason}")
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
