"""README's first table, from the rows of ``scripts/never_slower.py`` and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dcut_sglang.bench.stats import geomean, paired_ratio

Row = dict[str, Any]
GROUPS = ("mixed", "easy", "hard")
_HEAD = (
    "| prompts | concurrency | plain | DFLASH | DCUT | DCUT/plain | by replay | DCUT/DFLASH "
    "| accept length | rows/step | plain steps |"
)


def newest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each cell, by prompts and concurrency."""
    cells = {(row["prompts"], row["concurrency"]): row for row in rows}
    return [cells[key] for key in sorted(cells, key=lambda k: (GROUPS.index(k[0]), k[1]))]


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown lines: tokens per CPU-second, and ratios with 95 % intervals paired by wave."""
    return [_HEAD, "|---|---:|---:|---:|---:|---|---:|---|---:|---:|---:|", *map(_line, rows)]


def geomean_over_plain(rows: Sequence[Row]) -> float:
    """Over the easy and the mixed cells."""
    return geomean([row["over_plain"] for row in rows if row["prompts"] != "hard"])


def _line(row: Row) -> str:
    waves = row["tokens_per_cpu_s"]
    means = " | ".join(f"{np.mean(waves[arm]):.1f}" for arm in ("plain", "dflash", "dcut"))
    predicted = row.get("predicted_over_plain")
    return (
        f"| {row['prompts']} | {row['concurrency']} | {means} | {_ratio(waves, 'plain')} | "
        f"{'' if predicted is None else f'{predicted:.2f}'} | {_ratio(waves, 'dflash')} | "
        f"{row['accept_length']:.2f} | {row['rows_per_step']:.1f} | "
        f"{100 * row['plain_share']:.0f} % |"
    )


def _ratio(waves: dict[str, list[float]], arm: str) -> str:
    """An arm that ran one wave only has no interval."""
    mine, theirs = waves["dcut"][: len(waves[arm])], waves[arm]
    ratio = paired_ratio(mine, theirs)
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if len(theirs) > 1 else ""
    return f"{ratio.mean:.2f}{interval}"
