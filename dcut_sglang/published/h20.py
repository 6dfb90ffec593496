"""Published step costs as cost tables, and what had to be assumed to make them so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dcut_sglang.cost import CostTable

Edition = Literal["May", "July"]
PUBLISHED = Path(__file__).parents[1] / "data" / "published.json"
BATCH_SIZES = (4, 8, 16, 32, 64)
ROW_RATIOS = (0.25, 0.5, 0.75, 1.0)
# The published ratios count rows with anchors: 4, 8, 12 and 16 of 16 per request. As shares of
# the 15 drafts, which is what a ``CostTable`` counts:
DRAFT_RATIOS = tuple((16 * ratio - 1) / 15 for ratio in ROW_RATIOS)
THROUGHPUT = {
    "May": "throughput_may2026_page",
    "July": "throughput_july2026_page_paper_aligned",
}


def published() -> dict[str, Any]:
    """The committed figures; see ``data/README.md``."""
    data: dict[str, Any] = json.loads(PUBLISHED.read_text())
    return data


def throughput(edition: Edition, model: str, arm: str) -> dict[int, float]:
    """Published tokens per second by batch size."""
    row = published()[THROUGHPUT[edition]]["models"][model][arm]["throughput_tok_s"]
    return {int(bs): float(value) for bs, value in row.items()}


def keep_ratio(edition: Edition, model: str, arm: str = "D-Cut-B16") -> dict[int, float]:
    """Published mean keep ratio by batch size: rows with anchors over bs * D."""
    row = published()[THROUGHPUT[edition]]["models"][model][arm]["keep_ratio"]
    return {int(bs): float(value) for bs, value in row.items()}


def step_ms(model: str = "Qwen3-8B") -> dict[int, list[float]]:
    """Published milliseconds of a whole step at each of ``ROW_RATIOS``, by batch size."""
    name = {
        "Qwen3-8B": "Qwen3-8B_H20_TP1_B16_ms",
        "Qwen3.5-35B-A3B": "Qwen3.5-35B-A3B_H20_TP2_ms",
    }[model]
    rows = published()["cost_table"][name]["rows"]
    return {int(bs): [float(ms) for ms in row] for bs, row in rows.items()}


def qwen3_8b(edition: Edition = "May") -> CostTable:
    """Qwen3-8B on one H20, D = 16.

    The published cell is the whole step. A plain step is taken from plain decoding's throughput
    of the edition; the draft's cost is what remains of the whole step, extended in a straight
    line from 50 and 25 % down to the anchors alone, above a plain step. No context axis is
    published.
    """
    return _table(step_ms("Qwen3-8B"), throughput(edition, "Qwen3-8B", "AR"), "Qwen3-8B, TP1")


def flat_moe() -> CostTable:
    """Qwen3.5-35B-A3B on H20, TP2, D = 16: a nearly flat curve.

    Ratio costs are published at bs 64 only; at the other batch sizes they are assumed to stand
    in the same proportion to that batch size's plain step, which is published.
    """
    plain = throughput("May", "Qwen3.5-35B-A3B", "AR")
    at_64 = np.array(step_ms("Qwen3.5-35B-A3B")[64])
    plain_ms = {bs: 1000 * bs / plain[bs] for bs in BATCH_SIZES}
    rows = {bs: (at_64 * plain_ms[bs] / plain_ms[64]).tolist() for bs in BATCH_SIZES}
    return _table(rows, plain, "Qwen3.5-35B-A3B, TP2; ratio costs assumed below bs 64")


def _table(
    rows: Mapping[int, list[float]], plain_tokens_per_s: Mapping[int, float], model: str
) -> CostTable:
    verify_ms = np.zeros((len(rows), 5, 1))
    draft_ms = np.zeros((len(rows), 1))
    for i, (bs, whole) in enumerate(sorted(rows.items())):
        plain_ms = 1000 * bs / plain_tokens_per_s[bs]
        anchors_only = whole[0] - (whole[1] - whole[0]) * DRAFT_RATIOS[0] / (
            DRAFT_RATIOS[1] - DRAFT_RATIOS[0]
        )
        draft_ms[i, 0] = max(anchors_only - plain_ms, 0.0)
        verify_ms[i, :, 0] = [plain_ms, *(np.array(whole) - draft_ms[i, 0])]
    return CostTable(
        16,
        tuple(sorted(rows)),
        (0.0, *DRAFT_RATIOS),
        (1024,),
        verify_ms,
        draft_ms,
        {"host": "H20", "model": model, "source": "AngelSlim D-Cut page"},
    )
