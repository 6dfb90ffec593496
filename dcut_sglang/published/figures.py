"""Figures of ``docs/published.md``; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dcut_sglang.published import h20
from dcut_sglang.published.additions import Addition
from dcut_sglang.published.tables import FIXED_ARMS, TOLERANCE, Check, may_fits


def draw_tokens(path: Path) -> None:
    """Tokens per step by keep ratio: fitted rows, populations, and the auto rows."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(h20.BATCH_SIZES), figsize=(12, 3), sharey=True)
    keep = h20.keep_ratio("May", "Qwen3-8B")
    for row, (bs, ax) in enumerate(zip(h20.BATCH_SIZES, axes, strict=True)):
        fits = np.array([fit.tokens[row] for fit in may_fits()])
        ax.fill_between(h20.ROW_RATIOS, fits.min(0), fits.max(0), alpha=0.4, label="fits")
        step_ms = h20.step_ms()[bs]
        for i, (ratio, arm) in enumerate(FIXED_ARMS.items(), start=1):
            tokens = h20.throughput("May", "Qwen3-8B", arm)[bs] * step_ms[i] / bs / 1000
            ax.plot(ratio, tokens, "ko", label="fixed rows (fitted)" if i == 1 else None)
        rate = h20.throughput("May", "Qwen3-8B", "D-Cut-B16")[bs]
        at_auto = rate * np.interp(keep[bs], h20.ROW_RATIOS, step_ms) / bs / 1000
        ax.plot(keep[bs], at_auto, "r*", markersize=10, label="auto row (predicted)")
        ax.set_title(f"bs {bs}")
        ax.set_xlabel("keep ratio")
    axes[0].set_ylabel("tokens per request and step")
    axes[-1].legend(fontsize=7)
    _save(figure, path)


def draw_checks(checks: Sequence[Check], path: Path) -> None:
    """Error of every throughput row, with the range over populations."""
    plt = _pyplot()
    shown = [c for c in checks if "full bs" in c.name or "auto bs" in c.name]
    figure, ax = plt.subplots(figsize=(9, 0.22 * len(shown) + 1))
    colors = {"reproduced": "tab:green", "not reproduced": "tab:red", "not determined": "gray"}
    for y, c in enumerate(reversed(shown)):
        ax.errorbar(
            100 * c.error, y, xerr=100 * c.half_range, fmt="o", color=colors[c.status], capsize=2
        )
    ax.set_yticks(range(len(shown)), [c.name for c in reversed(shown)], fontsize=7)
    ax.axvspan(-100 * TOLERANCE, 100 * TOLERANCE, alpha=0.1, color="tab:green")
    ax.set_xlabel("predicted / published - 1, %")
    _save(figure, path)


def draw_additions(rows: Sequence[Addition], path: Path) -> None:
    """Speed-up over plain decoding by batch size, July."""
    plt = _pyplot()
    figure, ax = plt.subplots(figsize=(7, 4))
    sizes = [a.bs for a in rows]
    full = h20.throughput("July", "Qwen3-8B", "DFlash-B16")
    published_8 = h20.throughput("July", "Qwen3-8B", "D-Cut-B8")
    for label, values, style in (
        ("DFlash-B16 (published)", [full[bs] for bs in sizes], "k:"),
        ("D-Cut-B16 (published)", [a.published for a in rows], "ko"),
        ("D-Cut-B8 (published)", [published_8[bs] for bs in sizes], "k^"),
        ("drafts only, 4 buckets", [a.drafts_only for a in rows], "tab:orange"),
        ("anchors counted", [a.anchors for a in rows], "tab:blue"),
        ("any number, plain steps", [a.plain_steps for a in rows], "tab:green"),
        ("the same, better of D = 8 (assumed) and 16", [a.best for a in rows], "tab:red"),
    ):
        relative = [value / a.plain for value, a in zip(values, rows, strict=True)]
        ax.plot(sizes, relative, style, label=label)
    ax.axhline(1, color="gray", linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(bs) for bs in sizes])
    ax.set_xlabel("batch size")
    ax.set_ylabel("tokens/s over plain decoding")
    ax.set_title("Qwen3-8B, H20, July throughputs, T = 0")
    ax.legend(fontsize=8)
    _save(figure, path)


def _pyplot():  # type: ignore[no-untyped-def]
    """matplotlib is an extra, and must not open a window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _save(figure, path: Path) -> None:  # type: ignore[no-untyped-def]
    figure.tight_layout()
    # No software version in the file: the same figure gives the same bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    _pyplot().close(figure)
