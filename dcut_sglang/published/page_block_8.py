"""The part of ``docs/published.md`` on blocks of 8 and the best published rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcut_sglang.published import block_8, h20
from dcut_sglang.published.bar import Bar, bars
from dcut_sglang.published.claims import EDITIONS


def block_8_lines() -> list[str]:
    """What is assumed of D = 8, and how well it fits."""
    saving = [b.amount for b in block_8.fits("July")]
    share = [b.amount for b in block_8.fits("July", "share")]
    full, auto = (h20.throughput("July", "Qwen3-8B", arm)[4] for arm in ("DFlash-B8", "D-Cut-B8"))
    return [
        "",
        "## What D = 8 costs",
        "",
        "No cost table is published for D = 8. Assumed: verifying costs what as many rows of D = "
        "16 cost, and a draft of 8 costs a fixed time per request less than a draft of 16, and "
        "never less than nothing. For each population two free numbers, this time and the level of "
        "the population, are fitted to July's ten B8 rows, D-Cut-B8 with the published selector "
        f"(four buckets, anchors counted): {min(saving):.2f}-{max(saving):.2f} ms per request, "
        f"{_misfits('July', 'saving')} root mean square error. For May the time is carried over "
        f"and the level alone fitted to five rows: {_misfits('May', 'saving')}.",
        "",
        "Tried first: a draft of 8 costs one share of a draft of 16, also two numbers. The share "
        f"comes out at {min(share):.2f}-{max(share):.2f}, but fits worse: "
        f"{_misfits('July', 'share')} in July, {_misfits('May', 'share')} in May. It is shown "
        "beside; it plays no part in the other tables.",
        "",
        "Predicted / published - 1, the middle of the populations:",
        "",
        "| row | assumed | bs 4 | bs 8 | bs 16 | bs 32 | bs 64 |",
        "|---|---|" + "---:|" * 5,
        *_error_rows(),
        "",
        "Costs and choices, over the populations:",
        "",
        "| what | bs 4 | bs 8 | bs 16 | bs 32 | bs 64 |",
        "|---|" + "---:|" * 5,
        *_cost_rows(),
        *_keep_rows(),
        "",
        f"* July at bs 4: D-Cut-B8 is published below DFlash-B8 ({auto:.0f} < {full:.0f}), which a "
        "selector that may keep every row is never predicted to be; no cost fits both.",
        "* May at bs 4: as at D = 16, one accept length does not hold over batch sizes in May.",
        "* What counts as the draft's cost is what a step costs beyond a plain one at zero drafts. "
        "Up to bs 16 that is at most 2 ms, and the fit takes nearly all of it away. No drafter is "
        "free: the number is what a whole step of D = 8 saves, wherever it saves it.",
    ]


def bar_lines() -> list[str]:
    """Our policy beside the best published rows, and what the difference is worth."""
    every = [bar for edition in EDITIONS for bar in bars(edition)]
    lines = [
        "",
        "## Against the best published D-Cut row",
        "",
        "Ours: every number of drafts, the better D on average, plain steps where they win. "
        "Model's error: its own prediction of that published row, with the published selector, "
        "over the published number; the D-Cut-B8 rows were fitted, so this flatters the model. "
        "Ours / selector: both predicted, the published selector with its better D; this ratio "
        "compares two policies in one model. At the row's level: ours / published, where the "
        "population's level is not one for all batch sizes, but at each the one at which the "
        "model's published selector reaches exactly the published row (its D; the population's "
        "spreads and all costs as before). In that comparison the model's error has no part.",
        "",
        "| edition | bs | best published | model's error | ours | ours / published "
        "| ours / selector | **at the row's level** | ours / plain | ours against published |",
        "|---|---:|---|---:|---|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {b.edition} | {b.bs} | {b.published:.0f} ({b.arm}) | {b.own_error:+.1%} "
        f"| {b.ours:.0f} ({b.what}) | {b.ratio:.3f} | {b.ours / b.selector:.3f} "
        f"| {b.ratio_at_level:.3f} | {b.ours / b.plain:.2f} | {b.verdict} |"
        for b in every
    ]
    at_least = [b for b in every if b.ratio >= 1]
    within = [b for b in every if b.within_error]
    below = [b for b in every if b.ratio < 1 and not b.within_error]
    added = [b.ours / b.predicted - 1 for b in at_least if b.what != "plain"]
    at_level = [b.ratio_at_level for b in every]
    policies = [b.ours / b.selector - 1 for b in every if b.what != "plain"]
    lines += [
        "",
        f"* At least the best published row: {_names(at_least)}. Of the margin of those that "
        f"draft, all but {min(added):.1%} to {max(added):.1%} is the model's own error.",
        f"* Below it by less than the model's own error: {_names(within)}. The model puts the "
        "published selector itself below its published row there, and ours above the selector; "
        "since the latter holds everywhere in the model, this cannot speak for ours.",
        f"* Below it by more: {_names(below) or 'none'}.",
        "* With one level for all batch sizes the model cannot tell whether ours passes the best "
        "published rows, except at bs 64 in May, where plain steps do, by published numbers "
        "alone. What it does say: on the same costs and populations ours is "
        f"{min(policies):.1%} to {max(policies):.1%} above the published selector where it "
        "drafts. Most of what D = 8 gives, the published rows have already.",
        "* At the level that gives each row itself, ours is "
        f"{min(at_level):.3f} to {max(at_level):.3f} of the best published row, at least "
        "it at every batch size. Since the four buckets are among all numbers of drafts, this says "
        "how much choosing freely adds, and can hardly fall below 1.",
        f"* With one share instead, ours / published is {_ratios('May')} in May and "
        f"{_ratios('July')} in July (bs 4-64).",
    ]
    return lines


def _misfits(edition: h20.Edition, assumption: block_8.Assumption) -> str:
    misfits = [b.misfit for b in block_8.fits(edition, assumption)]
    return f"{min(misfits):.1%}-{max(misfits):.1%}"


def _error_rows() -> list[str]:
    return [
        f"| {edition} {arm} | {name} | " + " | ".join(f"{e:+.1%}" for e in errors) + " |"
        for edition in ("July", "May")
        for assumption, name in (("saving", "time per request"), ("share", "one share"))
        for arm, errors in block_8.middle_errors(edition, assumption).items()  # type: ignore[arg-type]
    ]


def _cost_rows() -> list[str]:
    whole = h20.qwen3_8b("July").draft_ms[:, 0]
    every = np.array([b.table.draft_ms[:, 0] for b in block_8.fits("July")])
    return [
        "| draft of 16, July, ms | " + " | ".join(f"{ms:.1f}" for ms in whole) + " |",
        "| draft of 8, July, ms | " + _ranges(every, ".1f") + " |",
    ]


def _keep_rows() -> list[str]:
    seen = h20.keep_ratio("May", "Qwen3-8B", "D-Cut-B8")
    every = np.array(
        [[b.selector(bs).keep_ratio for bs in h20.BATCH_SIZES] for b in block_8.fits("May")]
    )
    return [
        "| keep ratio, May, D-Cut-B8 (published) | "
        + " | ".join(f"{ratio:.2f}" for ratio in seen.values())
        + " |",
        "| keep ratio, May, four buckets (predicted) | " + _ranges(every, ".2f") + " |",
    ]


def _ranges(every: np.ndarray[tuple[int, ...], np.dtype[np.float64]], digits: str) -> str:
    """Least and greatest over the populations [P, batch sizes], one cell per batch size."""
    return " | ".join(
        f"{low:{digits}}-{high:{digits}}"
        for low, high in zip(every.min(axis=0), every.max(axis=0), strict=True)
    )


def _names(cells: Sequence[Bar]) -> str:
    return ", ".join(f"{b.name} ({b.ratio - 1:+.1%})" for b in cells)


def _ratios(edition: h20.Edition) -> str:
    return " / ".join(f"{b.ratio:.3f}" for b in bars(edition, "share"))
