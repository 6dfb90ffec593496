"""One look for every figure: an arm has the same colour, marker and line everywhere, and two arms
differ in marker or line too, for those who print in black and white."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Style = dict[str, Any]

ARM_STYLES: dict[str, Style] = {
    "plain": {"label": "plain decoding", "color": "#444444", "marker": "o", "linestyle": ":"},
    "dflash": {"label": "DFLASH, full block", "color": "#c0504d", "marker": "s", "linestyle": "--"},
    "dcut": {"label": "DCUT", "color": "#1f4e79", "marker": "D", "linestyle": "-", "linewidth": 2},
    "dcut-25": {"label": "DCUT, 25 %", "color": "#9dc3e6", "marker": "v", "linestyle": "-"},
    "dcut-50": {"label": "DCUT, 50 %", "color": "#6fa8dc", "marker": "<", "linestyle": "--"},
    "dcut-75": {"label": "DCUT, 75 %", "color": "#4a86c5", "marker": ">", "linestyle": "-."},
    "dcut-100": {"label": "DCUT, 100 %", "color": "#2e6da4", "marker": "^", "linestyle": ":"},
    "dcut-paper": {
        "label": "D-Cut as published",
        "color": "#7f6000",
        "marker": "P",
        "linestyle": "-.",
    },
    "dflash-8": {"label": "DFLASH, D = 8", "color": "#e6a19f", "marker": "s", "linestyle": "-."},
    "dcut-8": {"label": "DCUT, D = 8", "color": "#7aa6c2", "marker": "d", "linestyle": "--"},
    "ngram": {"label": "NGRAM", "color": "#6aa84f", "marker": "x", "linestyle": ":"},
    "standalone": {"label": "STANDALONE", "color": "#8e7cc3", "marker": "*", "linestyle": "--"},
    "eagle3": {"label": "EAGLE-3, chain", "color": "#b45f06", "marker": "h", "linestyle": "-."},
    "mtp": {"label": "MTP", "color": "#a64d79", "marker": "p", "linestyle": ":"},
    "dspark": {"label": "DSPARK", "color": "#38761d", "marker": "X", "linestyle": "--"},
    **{
        f"dcut-{name}": {
            "label": f"DCUT, {label}",
            "color": color,
            "marker": marker,
            "linestyle": "-",
        }
        for name, label, color, marker in (
            ("whole-blocks", "head over whole blocks", "#1f4e79", "1"),
            ("all-or-none", "drafts for all or none", "#2e6da4", "2"),
            ("long-blocks", "long blocks only", "#4a86c5", "3"),
            ("always-drafts", "always drafts", "#c0504d", "4"),
            ("four-ratios", "four ratios", "#7f6000", "+"),
            ("uncalibrated", "uncalibrated", "#8e7cc3", "H"),
            ("whole-vocabulary", "head over all tokens", "#6aa84f", "8"),
        )
    },
}
# For arms that have no style of their own, and for anything else that comes in a series.
SERIES: tuple[Style, ...] = tuple(
    {"color": color, "marker": marker, "linestyle": line}
    for color, marker, line in (
        ("#111111", "o", "-"),
        ("#1f4e79", "s", "--"),
        ("#c0504d", "D", "-."),
        ("#6aa84f", "^", ":"),
        ("#8e7cc3", "v", "-"),
        ("#b45f06", "P", "--"),
        ("#666666", "x", "-."),
        ("#a64d79", "*", ":"),
    )
)
HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def arm_style(arm: str) -> Style:
    """Label, colour, marker and line of an arm; ``ARM@LABEL`` looks like ARM, but thinner."""
    base, _, again = arm.partition("@")
    if base not in ARM_STYLES:
        number = sum(map(ord, base))
        return {"label": arm, **SERIES[number % len(SERIES)]}
    style = ARM_STYLES[base]
    if not again:
        return style
    return {**style, "label": f"{style['label']} ({again})", "linewidth": 0.8}


def pyplot() -> Any:
    """matplotlib without a window; imported when something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    # The same figure gives the same bytes.
    matplotlib.rcParams["svg.hashsalt"] = "dcut_sglang"
    matplotlib.rcParams["font.size"] = 9
    from matplotlib import pyplot as plt

    return plt


def panels(count: int, width: float = 5.2, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A figure with so many axes beside each other."""
    figure, axes = pyplot().subplots(
        1, count, figsize=(width * count, height), layout="constrained", squeeze=False
    )
    return figure, list(axes[0])


def log_ticks(axes: Any, values: Sequence[float]) -> None:
    """A base-2 axis with ticks where something was measured."""
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def save(figure: Any, path: Path, caption: str = "") -> Path:
    """Write PNG and SVG under the caption; returns the PNG's path."""
    if caption:
        width = int(19 * figure.get_size_inches()[0])
        lines = [part for line in caption.splitlines() for part in textwrap.wrap(line, width)]
        figure.suptitle("\n".join(lines), fontsize=7, color="#555555")
    path = path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    pyplot().close(figure)
    return path
