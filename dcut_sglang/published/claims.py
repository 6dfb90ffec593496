"""Sentences of the sources that their own tables contradict, each with the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from dcut_sglang.published import h20
from dcut_sglang.published.h20 import Edition

EDITIONS: tuple[Edition, ...] = ("May", "July")


@dataclass(frozen=True)
class Contradiction:
    """A claim in our words, the numbers that speak against it, and whether they do."""

    claim: str
    tables: str
    holds: bool


def contradictions() -> list[Contradiction]:
    """Recomputed from ``published.json``; ``holds`` is False if the data stopped disagreeing."""
    speedups = h20.published()["speedup_may2026_page"]["rows"]
    return [
        _loses(
            "May page and summaries: on Qwen3-8B D-Cut is above EAGLE-3 at every batch size",
            ("May", "Qwen3-8B", "D-Cut-B16", "EAGLE-3"),
            "only the B8 row is",
        ),
        _loses(
            "Summaries of the May page: D-Cut beats MTP throughout on Qwen3.5-27B",
            ("May", "Qwen3.5-27B-TP4", "D-Cut-B16", "MTP"),
        ),
        _loses(
            "May page: D-Cut beats MTP on MoE models at every batch size",
            ("May", "Qwen3.5-122B-A10B", "D-Cut-B16", "MTP"),
        ),
        _loses(
            "D-Cut makes speculation work again at high concurrency (Qwen3-8B, May)",
            ("May", "Qwen3-8B", "D-Cut-B16", "AR"),
            f"plain decoding still wins; printed {speedups['Qwen3-8B']['D-Cut-B16'][3:5]}",
        ),
        _loses(
            "Pruning by measured cost cannot lose to full verification (27B, both editions)",
            ("July", "Qwen3.5-27B-TP4", "D-Cut-B8", "DFlash-B8"),
        ),
        _loses(
            "The bucket with the highest utility is picked, so auto is at least the best fixed "
            "ratio (35B-A3B, May, against 50 %)",
            ("May", "Qwen3.5-35B-A3B", "D-Cut-B16", "D-Cut-Fixed-R50"),
        ),
        _kept_drafts(),
        _accept_length(),
        _gain(),
        _keep_ratio_carried(),
    ]


def _loses(claim: str, where: tuple[Edition, str, str, str], note: str = "") -> Contradiction:
    edition, model, arm, rival = where
    ours, theirs = h20.throughput(edition, model, arm), h20.throughput(edition, model, rival)
    lost = [bs for bs in h20.BATCH_SIZES if ours[bs] < theirs[bs]]
    cells = ", ".join(f"bs {bs}: {ours[bs]:.0f} < {theirs[bs]:.0f}" for bs in lost)
    name = "plain decoding" if rival == "AR" else rival
    tables = f"{arm} below {name} at {cells} tokens/s"
    return Contradiction(claim, f"{tables} ({note})" if note else tables, bool(lost))


def _kept_drafts() -> Contradiction:
    seen = h20.keep_ratio("May", "Qwen3-8B")[32]
    by_formula = (1 + 0.25 * 15) / 16
    rows = [row["verify_tokens"] for row in h20.published()["strategy_table_bs32_D16"]["rows"]]
    return Contradiction(
        "K = ceil(ratio * bs * (D - 1)) drafts are kept",
        f"a step at 25 % would verify {by_formula:.3f} of bs * D rows with its anchors; the keep "
        f"ratio at bs 32 is {seen}, and the strategy table's 25 % is {rows[1]} of {rows[-1]} rows: "
        "the ratio counts rows, anchors included, so K = ceil(ratio * bs * D) - bs",
        seen < by_formula - 0.02 and rows[1] == 0.25 * rows[-1],
    )


def _accept_length() -> Contradiction:
    implied = {
        edition: [
            h20.throughput(edition, "Qwen3-8B", "DFlash-B16")[bs] * ms[3] / bs / 1000
            for bs, ms in h20.step_ms().items()
        ]
        for edition in EDITIONS
    }
    low, high = min(implied["May"]), max(implied["May"])
    july_low, july_high = min(implied["July"]), max(implied["July"])
    return Contradiction(
        "About 6.3 tokens of a block are accepted, 60 % of the verification is wasted",
        f"the full rows and the step times imply {low:.2f}-{high:.2f} tokens in May and "
        f"{july_low:.2f}-{july_high:.2f} in July: 80 % and 71 % wasted; 6.3 belongs to the "
        "strategy table's load",
        high < 6 and july_high < 6,
    )


def _gain() -> Contradiction:
    rows = h20.published()["strategy_table_bs32_D16"]["rows"]
    gains = [100 * (rows[i + 1]["accepted"] / rows[i]["accepted"] - 1) for i in (0, 2, 4)]
    return Contradiction(
        "At the same budget the global top-K accepts 20-25 % more than a fixed length",
        f"{gains[0]:.1f} / {gains[1]:.1f} / {gains[2]:.1f} % at 25 / 50 / 75 %; the throughput "
        "tables show far less: a population in which all drafts are alike, where a global top-K "
        "is no better than a fixed length, fits the May rows best and predicts the auto rows",
        gains[2] < 20,
    )


def _keep_ratio_carried() -> Contradiction:
    models = ("Qwen3-8B", "Qwen3.5-27B-TP4", "Qwen3.5-35B-A3B")
    same = all(h20.keep_ratio("May", m) == h20.keep_ratio("July", m) for m in models)
    full = [
        h20.throughput("July", "Qwen3-8B", "DFlash-B16")[bs]
        / h20.throughput("May", "Qwen3-8B", "DFlash-B16")[bs]
        for bs in h20.BATCH_SIZES
    ]
    return Contradiction(
        "July's keep ratios were measured with July's throughputs",
        "they are May's to the last digit for all three models, although the accept length rose "
        f"by {100 * (min(full) - 1):.0f}-{100 * (max(full) - 1):.0f} % on the same step times; at "
        "July's accept length the selector keeps 0.5-0.6 at bs 4 and 0.5 at bs 8",
        same,
    )
