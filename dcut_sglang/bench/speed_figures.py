"""Figures of how fast the arms are: over concurrency, per user, by data set, by keep ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcut_sglang.bench.arms import FIXED_RATIOS
from dcut_sglang.bench.stats import geomean
from dcut_sglang.bench.style import SERIES, arm_style, log_ticks, panels, save
from dcut_sglang.bench.summary import Point, Row, noise_band, noise_line, points, speedup


class NothingToDrawError(ValueError):
    """The rows lack what a figure shows, with what that is."""


Rates = Mapping[str, Mapping[int, Sequence[float]]]
# Tokens per second, by what is known of the server: its CPU time, or only the clock.
_UNITS = {"tokens_per_cpu_s": "tokens per CPU-second", "tokens_per_s": "tokens per second"}


def closed(rows: Sequence[Row]) -> list[Point]:
    """Points of closed loops.

    Raises:
        NothingToDrawError: there are none.
    """
    found = [point for point in points(rows) if point.load[1] is not None]
    if not found:
        raise NothingToDrawError("no rows at a concurrency")
    return found


def unit(found: Sequence[Point]) -> str:
    """The rate that all of the points have."""
    has_cpu = all(row["steady"]["tokens_per_cpu_s"] for point in found for row in point.rows)
    return "tokens_per_cpu_s" if has_cpu else "tokens_per_s"


def data_names(found: Sequence[Point]) -> list[str]:
    """Data sets, in the order in which they come."""
    return list(dict.fromkeys(point.load[0] for point in found))


def draw_rates(axes: Any, rates: Rates, ylabel: str) -> None:
    """A line per arm over concurrency, with the range of its repeats."""
    for arm, by_concurrency in rates.items():
        places = sorted(by_concurrency)
        means = [sum(by_concurrency[c]) / len(by_concurrency[c]) for c in places]
        low = [m - min(by_concurrency[c]) for m, c in zip(means, places, strict=True)]
        high = [max(by_concurrency[c]) - m for m, c in zip(means, places, strict=True)]
        axes.errorbar(places, means, yerr=[low, high], capsize=3, **arm_style(arm))
    log_ticks(axes, [c for by_concurrency in rates.values() for c in by_concurrency])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)


def throughput_figure(rates: Rates, path: Path, caption: str) -> Path:
    """Tokens per CPU-second over concurrency, for one set of prompts."""
    figure, (axes,) = panels(1, width=6, height=4)
    draw_rates(axes, rates, _UNITS["tokens_per_cpu_s"])
    axes.legend(frameon=False)
    return save(figure, path, caption)


def throughput(rows: Sequence[Row], path: Path, caption: str) -> Path:
    """Throughput over concurrency: a panel per data set, a line per arm."""
    found = closed(rows)
    rate, names = unit(found), data_names(found)
    figure, axes = panels(len(names))
    for ax, name in zip(axes, names, strict=True):
        rates: dict[str, dict[int, list[float]]] = {}
        for point in found:
            if point.load[0] == name and point.load[1] is not None:
                values = [row["steady"][rate] for row in point.rows]
                rates.setdefault(point.arm, {})[point.load[1]] = values
        draw_rates(ax, rates, _UNITS[rate])
        ax.set_title(f"{name} prompts" if name in ("easy", "hard", "mixed") else name)
    axes[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, path, f"{caption}\n{noise_line(noise_band(found))}; bars: passes")


def per_user(rows: Sequence[Row], path: Path, caption: str) -> Path:
    """Throughput against the speed that one user sees: up and to the right is better."""
    found = closed(rows)
    names = data_names(found)
    figure, axes = panels(len(names))
    for ax, name in zip(axes, names, strict=True):
        arms = dict.fromkeys(point.arm for point in found if point.load[0] == name)
        for arm in arms:
            chosen = [p for p in found if p.arm == arm and p.load[0] == name]
            chosen.sort(key=lambda point: point.load[1] or 0)
            x = [point.average("tokens_per_s_per_user") for point in chosen]
            y = [point.average("steady", "tokens_per_s") for point in chosen]
            ax.plot(x, y, **arm_style(arm))
            if arm == "dcut":
                for place, rate, point in zip(x, y, chosen, strict=True):
                    ax.annotate(f"c{point.load[1]}", (place, rate), fontsize=6)
        ax.set_xlabel("tokens per second and user")
        ax.set_ylabel("tokens per second")
        ax.set_title(name)
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
    axes[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, path, caption)


def heat_map(rows: Sequence[Row], path: Path, caption: str) -> Path:
    """DCUT's speed-up over plain decoding and over DFLASH, by data set and concurrency."""
    found = closed(rows)
    over = [
        arm
        for arm in ("plain", "dflash")
        if any(speedup(found, "dcut", point.load, arm) is not None for point in found)
    ]
    if not over:
        raise NothingToDrawError("no load with rows of dcut and of plain or dflash")
    names = data_names(found)
    places = sorted({point.load[1] for point in found if point.load[1] is not None})
    figure, axes = panels(
        len(over), width=1.4 + 0.75 * (len(places) + 1), height=1.6 + 0.5 * len(names)
    )
    for ax, other in zip(axes, over, strict=True):
        cells = [
            [speedup(found, "dcut", (name, place, None), other) for place in places]
            for name in names
        ]
        grid = [[*line, _mean(line)] for line in cells]
        grid.append([_mean(column) for column in zip(*grid, strict=True)])
        shown = [[math.nan if v is None else v for v in line] for line in grid]
        # Darker is faster, in colour or not; light enough for the numbers.
        ax.imshow(shown, cmap="Blues", vmin=0.2, vmax=3, alpha=0.7, aspect="auto")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                edge = x == len(places) or y == len(names)
                ax.text(
                    x,
                    y,
                    "" if value is None else f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontweight="bold" if edge else "normal",
                )
        ax.set_xticks(range(len(places) + 1), [*map(str, places), "mean"])
        ax.set_yticks(range(len(names) + 1), [*names, "mean"])
        ax.set_xlabel("concurrent requests")
        ax.set_title(f"DCUT over {arm_style(other)['label']}", fontsize=9)
    return save(figure, path, f"{caption}\nmeans are geometric")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return geomean(known) if known else None


def fixed_and_auto(rows: Sequence[Row], path: Path, caption: str) -> Path:
    """Speed at each fixed keep ratio, against what the selector reaches by itself."""
    found = closed(rows)
    arms = {f"dcut-{percent}": ratio for percent, ratio in FIXED_RATIOS.items()}
    names = [
        name for name in data_names(found) if any(p.arm in arms for p in found if p.load[0] == name)
    ]
    if not names:
        raise NothingToDrawError(f"no rows of {', '.join(arms)}")
    figure, axes = panels(len(names))
    for ax, name in zip(axes, names, strict=True):
        here = [p for p in found if p.load[0] == name]
        places = sorted({p.load[1] for p in here if p.load[1] is not None})
        for place, style in zip(places, SERIES * 3, strict=False):
            load = (name, place, None)
            mean = {p.arm: p for p in here if p.load == load}
            over = mean["plain"].mean if "plain" in mean else 1.0
            fixed = [(ratio, mean[arm].mean / over) for arm, ratio in arms.items() if arm in mean]
            ax.plot(*zip(*fixed, strict=True), label=f"{place} requests", **style)
            if "dcut" in mean:
                kept = mean["dcut"].average("keep_ratio") or 0.0
                auto = mean["dcut"].mean / over
                ax.plot(kept, auto, **{**style, "marker": "*", "markersize": 13, "linestyle": ""})
        ax.axhline(1, color="#999999", linewidth=0.8)
        ax.set_xticks([0, *arms.values()])
        ax.set_xlabel("share of the drafts that is kept; star: chosen by DCUT")
        ax.set_ylabel("speed over plain decoding")
        ax.set_title(name)
        ax.set_ylim(bottom=0)
    axes[-1].legend(frameon=False, fontsize=7)
    return save(figure, path, caption)


def arrivals(rows: Sequence[Row], path: Path, caption: str) -> Path:
    """Throughput and latency over the arrival rate."""
    found = [point for point in points(rows) if point.load[2] is not None]
    if not found:
        raise NothingToDrawError("no rows at a request rate")
    shown = (
        (("overall", "tokens_per_s"), "tokens per second"),
        (("ttft_ms", "p50"), "time to first token, median, ms"),
        (("tpot_ms", "p50"), "time per output token, median, ms"),
    )
    figure, axes = panels(len(shown), width=4.2)
    name = data_names(found)[0]
    for ax, (field, label) in zip(axes, shown, strict=True):
        for arm in dict.fromkeys(p.arm for p in found):
            chosen = sorted(
                (p.load[2] or 0.0, p.average(*field))
                for p in found
                if p.arm == arm and p.load[0] == name
            )
            ax.plot(*zip(*chosen, strict=True), **arm_style(arm))
        ax.set_xlabel("arrivals per second")
        ax.set_ylabel(label)
        ax.set_ylim(bottom=0)
    axes[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, path, f"{caption}, {name}")
