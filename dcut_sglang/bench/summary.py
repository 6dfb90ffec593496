"""Rows of a run put together: means over passes, speed-ups over plain, the noise band."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcut_sglang.bench.rows import load_label

Row = dict[str, Any]
# How many standard deviations the band is wide.
BAND_SIGMAS = 3.0
# Median of the absolute value of a standard normal variable.
_MEDIAN_OF_NORMAL = 0.6745


def speed(row: Row) -> float:
    """What arms are compared by: steady tokens per CPU-second of the scheduler process where they
    are known (other work on the machine does not count), else overall ones, else per second."""
    part = row["steady"] or row["overall"]
    return part["tokens_per_cpu_s"] or part["tokens_per_s"]


Load = tuple[str, int | None, float | None]


def load_of(row: Row) -> Load:
    """Data set, concurrency and request rate."""
    return row["data"], row["concurrency"], row["request_rate"]


@dataclass(frozen=True)
class Point:
    """An arm at one load, over its passes."""

    arm: str
    load: Load
    rows: tuple[Row, ...]

    @property
    def speeds(self) -> list[float]:
        return [speed(row) for row in self.rows]

    @property
    def mean(self) -> float:
        """Geometric mean of the speeds."""
        return math.exp(sum(map(math.log, self.speeds)) / len(self.rows))

    def average(self, *path: str) -> float | None:
        """Mean of a number in the rows, found by its keys; None where no row has it."""
        found = []
        for row in self.rows:
            value: Any = row
            for name in path:
                value = value.get(name) if value is not None else None
            if value is not None:
                found.append(value)
        return float(np.mean(found)) if found else None


def points(rows: Iterable[Row]) -> list[Point]:
    """Passes of an arm at a load together, in the order of their first rows."""
    grouped: dict[tuple[str, Load], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["arm"], load_of(row)), []).append(row)
    return [Point(arm, load, tuple(found)) for (arm, load), found in grouped.items()]


def speedup(found: Sequence[Point], arm: str, load: Load, over: str = "plain") -> float | None:
    """Ratio of two arms' means at a load; None where one is missing."""
    mean = {point.arm: point.mean for point in found if point.load == load}
    return mean[arm] / mean[over] if arm in mean and over in mean else None


def noise_band(found: Sequence[Point]) -> float | None:
    """By how much two arms' means may differ, as a share, without one being faster.

    Three standard deviations of the difference between two means over passes. The deviation of a
    pass comes from the median over all arms and loads, so that a single pass that something else
    disturbed does not widen the band for all; ``is_noise`` sees it where it is. None with one
    pass only.
    """
    repeated = [np.log(point.speeds) for point in found if len(point.rows) > 1]
    if not repeated:
        return None
    deviations = [np.abs(s - s.mean()) * math.sqrt(len(s) / (len(s) - 1)) for s in repeated]
    deviation = float(np.median(np.concatenate(deviations))) / _MEDIAN_OF_NORMAL
    passes = float(np.mean([len(speeds) for speeds in repeated]))
    return math.exp(BAND_SIGMAS * deviation * math.sqrt(2 / passes)) - 1


def is_noise(one: Point, other: Point, band: float | None) -> bool:
    """Whether neither arm can be called faster: the means are within the band, or the passes
    overlap."""
    overlap = min(one.speeds) <= max(other.speeds) and min(other.speeds) <= max(one.speeds)
    return overlap or (band is not None and abs(math.log(one.mean / other.mean)) < math.log1p(band))


def table(found: Sequence[Point], over: str = "plain") -> list[str]:
    """A Markdown table, a line per arm and load, with tokens per CPU-second over those of the arm
    ``over``."""
    lines = [
        "| load | arm | tokens/s | tokens/CPU-s | over plain | TTFT p50, ms | TPOT p50, ms "
        "| accept length | rows/step | keep ratio | plain steps | as plain |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for point in sorted(found, key=lambda p: (p.load[0], p.load[1] or 0, p.load[2] or 0)):
        part = "steady" if point.rows[0]["steady"] else "overall"
        equal = [row["equal_to_plain"] for row in point.rows if row["equal_to_plain"]]
        share = f"{sum(e['equal'] for e in equal)}/{sum(e['of'] for e in equal)}" if equal else ""
        plain_share = point.average("plain_share")
        cells = (
            f"{point.load[0]}, {load_label(point.rows[0])}",
            point.arm,
            _number(point.average(part, "tokens_per_s"), 1),
            _number(point.average(part, "tokens_per_cpu_s"), 1),
            _number(speedup(found, point.arm, point.load, over), 2),
            _number(point.average("ttft_ms", "p50"), 0),
            _number(point.average("tpot_ms", "p50"), 0),
            _number(point.average("accept_length"), 2),
            _number(point.average("rows_per_step"), 1),
            _number(point.average("keep_ratio"), 2),
            f"{100 * plain_share:.0f} %" if plain_share is not None else "",
            share,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def noise_line(band: float | None) -> str:
    """The band in words."""
    if band is None:
        return "noise: unknown, it takes two passes at least"
    return (
        f"noise: arms whose means differ by less than {100 * band:.1f} % are not told apart "
        f"({BAND_SIGMAS:g} standard deviations, from the differences between passes)"
    )


def _number(value: float | None, decimals: int) -> str:
    return f"{value:.{decimals}f}" if value is not None else ""


def of_last_commit(rows: Sequence[Row]) -> list[Row]:
    """Rows made of the same code, on the same machine, with the same models as the last one."""
    same = ("commit", "versions", "machine", "pair", "model", "dtype", "seed")
    return [row for row in rows if all(row[name] == rows[-1][name] for name in same)]


def speedup_table(found: Sequence[Point], over: str = "plain") -> list[str]:
    """A Markdown table: a column per arm, a line per load, tokens per CPU-second over plain's; the
    last line has geometric means. Cells within noise say so."""
    arms = [arm for arm in dict.fromkeys(p.arm for p in found) if arm != over]
    loads = sorted({p.load for p in found}, key=lambda load: (load[0], load[1] or 0, load[2] or 0))
    band = noise_band(found)
    lines = ["| load | " + " | ".join(arms) + " |", "|---|" + "---:|" * len(arms)]
    at = {(p.arm, p.load): p for p in found}
    logs: dict[str, list[float]] = {arm: [] for arm in arms}
    for load in loads:
        if all(speedup(found, arm, load, over) is None for arm in arms):
            continue
        name, concurrency, rate = load
        what = f"concurrency {concurrency}" if concurrency is not None else f"{rate:g} requests/s"
        cells = []
        for arm in arms:
            ratio = speedup(found, arm, load, over)
            if ratio is None:
                cells.append("")
                continue
            logs[arm].append(math.log(ratio))
            within = is_noise(at[arm, load], at[over, load], band)
            cells.append(f"{ratio:.2f}" + (" (noise)" if within else ""))
        lines.append(f"| {name}, {what} | " + " | ".join(cells) + " |")
    means = [f"**{math.exp(np.mean(logs[arm])):.2f}**" if logs[arm] else "" for arm in arms]
    lines.append("| geometric mean | " + " | ".join(means) + " |")
    return lines
