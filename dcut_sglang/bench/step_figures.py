"""Figures of what steps do: their cost, what is kept and accepted, and how well it was foreseen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcut_sglang.bench.speed_figures import NothingToDrawError
from dcut_sglang.bench.style import HATCHES, SERIES, arm_style, log_ticks, panels, save
from dcut_sglang.bench.summary import Row
from dcut_sglang.cost import CostTable

_ACCEPT_ARMS = ("dflash", "dcut", "dcut-25", "dcut-50", "ngram", "standalone", "eagle3", "mtp")


def of_arm(rows: Sequence[Row], arm: str, field: str) -> list[Row]:
    """Rows of an arm that have a field.

    Raises:
        NothingToDrawError: there are none.
    """
    found = [row for row in rows if row["arm"] == arm and row.get(field) is not None]
    if not found:
        raise NothingToDrawError(f"no rows of {arm} with {field}")
    return found


def cost_curve(rows: Sequence[Row], path: Path, caption: str) -> Path:
    """Milliseconds of a step over the tokens that it verifies, by batch size; marks are measured
    cells."""
    table = CostTable.from_json(of_arm(rows, "dcut", "cost_table")[-1]["cost_table"])
    figure, (axes,) = panels(1, width=6, height=4)
    context, depth = float(table.contexts[0]), table.block_size - 1
    for bs, style in zip(table.batch_sizes, SERIES * 3, strict=False):
        tokens = bs * (1 + depth * np.array(table.keep_ratios))
        verify_ms = table.verify(bs, tokens, context)
        axes.plot(tokens, verify_ms, **style, label=f"batch of {bs}", markersize=4)
        # What drafting a whole block for everybody adds; a plain step, on the left, pays none.
        drafted_ms = verify_ms[1:] + table.draft(bs, context)
        axes.plot(tokens[1:], drafted_ms, color=style["color"], linewidth=0.6, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens that the target verifies in a step")
    axes.set_ylabel("ms; dotted: with draft and head")
    axes.legend(frameon=False, fontsize=7)
    device = table.fingerprint.get("device", "")
    return save(figure, path, f"{caption}\ncosts at {context:g} tokens of context, {device}")


def kept_by_batch_size(rows: Sequence[Row], path: Path, caption: str) -> Path:
    """What DCUT drafts, keeps and leaves undrafted, by the number of requests in the step."""
    found = of_arm(rows, "dcut", "by_batch_size")
    depth = found[-1]["dcut"]["block_size"] - 1
    sums: dict[int, Any] = {}
    for row in found:
        for bs, *counts in row["by_batch_size"]:
            sums[bs] = sums.get(bs, np.zeros(4)) + np.array(counts)
    sizes = sorted(sums)
    steps, drafted, kept, plain = np.array([sums[bs] for bs in sizes]).T
    possible = steps * np.array(sizes) * depth
    figure, (axes,) = panels(1, width=6, height=4)
    shown = (
        ("kept, of all drafts that whole blocks would have", kept / possible),
        ("kept, of the drafts that were computed", kept / np.maximum(drafted, 1)),
        ("steps that draft nothing", plain / steps),
    )
    for (label, share), style in zip(shown, SERIES, strict=False):
        axes.plot(sizes, share, label=label, **style)
    log_ticks(axes, [bs for bs in sizes if bs & (bs - 1) == 0])
    axes.set_xlabel("requests in the step")
    axes.set_ylabel("share")
    axes.set_ylim(0, 1.03)
    axes.legend(frameon=False, fontsize=7)
    return save(figure, path, caption)


def summed(rows: Sequence[Row], field: str) -> Any:
    """Counts of lists of different lengths, added up."""
    total = np.zeros(max(len(row[field]) for row in rows))
    for row in rows:
        total[: len(row[field])] += row[field]
    return total


def acceptance(rows: Sequence[Row], path: Path, caption: str) -> Path:
    """How many drafts a step accepts, and how often each position is accepted where verified."""
    known = {
        arm: found
        for arm in _ACCEPT_ARMS
        if (found := [r for r in rows if r["arm"] == arm and r.get("accept_histogram")])
    }
    if not known:
        raise NothingToDrawError("no rows with accept_histogram")
    figure, (left, right) = panels(2)
    shown = [arm for arm in known if not arm.startswith("dcut-")]
    width = 0.8 / len(shown)
    for number, arm in enumerate(shown):
        counts = summed(known[arm], "accept_histogram")
        style, places = arm_style(arm), np.arange(len(counts)) + (number - len(shown) / 2) * width
        label = f"{style['label']}: {(np.arange(len(counts)) + 1) @ counts / counts.sum():.2f}"
        hatch = HATCHES[number % len(HATCHES)]
        left.bar(
            places + width / 2,
            counts / counts.sum(),
            width,
            color=style["color"],
            hatch=hatch,
            edgecolor="white",
            label=label,
        )
    left.set_xlabel("accepted drafts of a request's step")
    left.set_ylabel("share of the steps")
    left.legend(frameon=False, fontsize=7, title="accept length")
    for arm, found in known.items():
        found = [row for row in found if row.get("position_verified")]
        if found:
            verified = summed(found, "position_verified")
            accepted = summed(found, "position_accepted")[: len(verified)]
            place = np.arange(1, len(accepted) + 1)
            share = accepted / np.maximum(verified[: len(accepted)], 1)
            right.plot(place, share, **{**arm_style(arm), "markersize": 4})
    right.set_xlabel("position of the draft")
    right.set_ylabel("accepted, where it was verified")
    right.set_ylim(0, 1.03)
    right.legend(frameon=False, fontsize=7)
    return save(figure, path, caption)


def reliability(rows: Sequence[Row], path: Path, caption: str) -> Path:
    """The drafter's confidence against what came, as it is and as calibrated online."""
    found = of_arm(rows, "dcut", "reliability")
    sums = {
        name: summed([r["reliability"] for r in found], name) for name in found[0]["reliability"]
    }
    some = sums["count"] > 0
    count, came = sums["count"][some], sums["accepted"][some] / sums["count"][some]
    figure, (axes,) = panels(1, width=4.4, height=4.2)
    for name, style in zip(("raw", "calibrated"), (SERIES[2], SERIES[1]), strict=True):
        said = sums[name][some] / count
        error = float(np.abs(said - came) @ count / count.sum())
        axes.plot(said, came, label=f"{name}: error {error:.3f}", **style)
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
    axes.set_xlabel("confidence in the next draft")
    axes.set_ylabel("share accepted")
    axes.legend(frameon=False, fontsize=8)
    return save(figure, path, f"{caption}\n{int(count.sum())} verified drafts; ten bins")


def predicted_and_measured(rows: Sequence[Row], path: Path, caption: str) -> Path:
    """Step times: what the costs said before the step, and what it took."""
    samples = [s for row in of_arm(rows, "dcut", "step_sample") for s in row["step_sample"]]
    if not samples:
        raise NothingToDrawError("no timed steps in the rows of dcut")
    found = np.array(samples, dtype=float)
    figure, (axes,) = panels(1, width=4.6, height=4.2)
    edges = [1, 2, 4, 8, 16, 32, 1 << 30]
    for low, high, style in zip(edges, edges[1:], SERIES, strict=False):
        part = found[(found[:, 0] >= low) & (found[:, 0] < high)]
        if len(part):
            last = int(part[:, 0].max())
            label = (
                f"{low} to {last} requests" if last > low else f"{low} request" + "s" * (low > 1)
            )
            axes.scatter(
                part[:, 2],
                part[:, 3],
                s=10,
                alpha=0.6,
                label=label,
                color=style["color"],
                marker=style["marker"],
            )
    ends = [found[:, 2:].min(), found[:, 2:].max()]
    axes.plot(ends, ends, color="#999999", linewidth=0.8)
    if ends[1] > 8 * ends[0]:
        axes.set_xscale("log")
        axes.set_yscale("log")
    error = float(np.median(np.abs(found[:, 2] / found[:, 3] - 1)))
    axes.set_xlabel("predicted, ms")
    axes.set_ylabel("measured, ms (thread's CPU time)")
    axes.legend(frameon=False, fontsize=7)
    return save(figure, path, f"{caption}\n{len(found)} steps; median error {100 * error:.1f} %")


def share_of_knowing(replay: Mapping[str, Any], path: Path, caption: str) -> Path:
    """Each policy's share of the best possible, as ``dcut replay --regret`` found it, and the
    calibration errors there."""
    policies = replay.get("policies")
    if not policies:
        raise NothingToDrawError("the replay's last line has no policies; run `make regret`")
    figure, (left, right) = panels(2)
    shown = [name for name in policies if not name.startswith("ours, ")]
    for name, style in zip(shown, SERIES * 3, strict=False):
        by_size = {int(bs): share for bs, share in policies[name].items()}
        left.plot(by_size.keys(), by_size.values(), label=name, **{**style, "markersize": 4})
    log_ticks(left, [int(bs) for bs in policies[shown[0]]])
    left.set_xlabel("batch size")
    left.set_ylabel("tokens per ms, share of the knowing policy's")
    left.legend(frameon=False, fontsize=6)
    left.set_ylim(0, 1.1)
    names = list(replay["ece_raw"])
    for number, (field, label) in enumerate((("ece_raw", "raw"), ("ece_calibrated", "calibrated"))):
        places = np.arange(len(names)) + (number - 0.5) * 0.38
        values = [replay[field][name] for name in names]
        right.bar(
            places, values, 0.36, label=label, color=SERIES[2 - number]["color"],
            hatch=HATCHES[number], edgecolor="white",
        )  # fmt: skip
    right.set_xticks(range(len(names)), names)
    right.set_xlabel("texts")
    right.set_ylabel("calibration error of survival")
    right.legend(frameon=False, fontsize=8)
    return save(figure, path, caption)
