"""The demo's figure: throughput over concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLES: dict[str, dict[str, Any]] = {
    "plain": {"label": "plain decoding", "color": "#555555", "marker": "o", "linestyle": ":"},
    "dflash": {"label": "DFLASH, full block", "color": "#c0504d", "marker": "s", "linestyle": "--"},
    "dcut": {"label": "DCUT", "color": "#1f4e79", "marker": "D", "linestyle": "-"},
}


def throughput_figure(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw tokens per CPU-second over concurrency, a line per arm with the range of its waves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for arm, style in STYLES.items():
        points = sorted((r["concurrency"], r["tokens_per_cpu_s"]) for r in rows if r["arm"] == arm)
        if not points:
            continue
        means = [sum(rates) / len(rates) for _, rates in points]
        spread = [
            [m - min(rates) for m, (_, rates) in zip(means, points, strict=True)],
            [max(rates) - m for m, (_, rates) in zip(means, points, strict=True)],
        ]
        axes.errorbar([c for c, _ in points], means, yerr=spread, capsize=3, **style)
    first = rows[0]
    axes.set_xscale("log", base=2)
    ticks = sorted({r["concurrency"] for r in rows})
    axes.set_xticks(ticks, [str(c) for c in ticks])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("tokens per CPU-second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.set_title(
        f"{first['pair']}, {first['dtype']}, {first['machine']['cpu']}, commit {first['commit']}",
        fontsize=8,
    )
    figure.savefig(path, dpi=150)
    figure.savefig(path.with_suffix(".svg"))
    plt.close(figure)
    return path
