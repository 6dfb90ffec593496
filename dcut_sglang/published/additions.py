"""What this package adds to D-Cut, on the published costs of Qwen3-8B.

Assumptions, beyond those of ``h20.qwen3_8b``: the populations of ``published`` (the middle of
those that fit); steps drawn without feedback; below 25 % the step time goes on in a straight
line; plain steps are chosen where they win on average; and, since no cost table for D = 8 is
published, a D = 8 step costs what a D = 16 step of as many rows costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcut_sglang.cost import CostTable
from dcut_sglang.published import h20
from dcut_sglang.published.accept_model import AcceptModel, pattern_search, tokens_at_depth
from dcut_sglang.published.chosen import choose
from dcut_sglang.published.tables import Fitted, july_fits, may_fits

D8_RATIOS = (1 / 7, 3 / 7, 5 / 7, 1.0)  # 2, 4, 6 and 8 of 8 rows, as shares of the 7 drafts


@dataclass(frozen=True)
class Addition:
    """Tokens per second at one batch size.

    Attributes:
        plain: published plain decoding.
        published: the published D-Cut-B16 row.
        drafts_only: four buckets, drafts alone in the numerator.
        anchors: four buckets, anchors counted.
        any_number: every number of drafts.
        plain_steps: the same, or plain steps where those win.
        block_8: every number of drafts of a block of 8, or plain steps; nan: no D = 8 row to
            fit the accept length on.
    """

    edition: h20.Edition
    bs: int
    plain: float
    published: float
    drafts_only: float
    anchors: float
    any_number: float
    plain_steps: float
    block_8: float


def additions(edition: h20.Edition) -> list[Addition]:
    """One row per published batch size."""
    fits = may_fits() if edition == "May" else july_fits()
    table = h20.qwen3_8b(edition)
    plain = h20.throughput(edition, "Qwen3-8B", "AR")
    auto = h20.throughput(edition, "Qwen3-8B", "D-Cut-B16")
    blocks_of_8 = block_8_models(fits) if edition == "July" else []
    table_8 = block_8_costs(table)
    rows = []
    for bs in h20.BATCH_SIZES:
        drafts_only = _middle([choose(f.model, table, bs, "paper").tokens_per_s for f in fits])
        anchors = _middle([choose(f.model, table, bs, "throughput").tokens_per_s for f in fits])
        any_number = _middle(
            [choose(f.model, table, bs, "throughput", ()).tokens_per_s for f in fits]
        )
        block_8 = _middle(
            [choose(m, table_8, bs, "throughput", ()).tokens_per_s for m in blocks_of_8]
        )
        rows.append(
            Addition(
                edition,
                bs,
                plain[bs],
                auto[bs],
                drafts_only,
                anchors,
                any_number,
                max(any_number, plain[bs]),
                max(block_8, plain[bs]) if blocks_of_8 else float("nan"),
            )
        )
    return rows


def block_8_lengths() -> dict[int, float]:
    """Accept lengths that July's DFlash-B8 rows imply at the cost of as many D = 16 rows.

    Nearly one number, which is what speaks for the assumption.
    """
    full = h20.throughput("July", "Qwen3-8B", "DFlash-B8")
    return {bs: full[bs] * h20.step_ms()[bs][1] / bs / 1000 for bs in h20.BATCH_SIZES}


def block_8_models(fits: tuple[Fitted, ...]) -> list[AcceptModel]:
    """The fitted shapes at the accept length of DFlash-B8."""
    length = float(np.mean(list(block_8_lengths().values())))
    models = []
    for fit in fits:
        shape = (fit.model.request_spread, fit.model.position_spread)

        def loss(
            point: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
            shape: tuple[float, float] = shape,
        ) -> float:
            survival = AcceptModel(float(point[0]), *shape, block_size=8).survival()
            return abs(tokens_at_depth(survival, 8) - length)

        point, _ = pattern_search(loss, [fit.model.level])
        models.append(AcceptModel(float(point[0]), *shape, block_size=8))
    return models


def block_8_costs(table: CostTable) -> CostTable:
    """A D = 16 table cut at 8 rows per request."""
    ratios = (0.0, *D8_RATIOS)
    cells = [
        table.verify(bs, bs + np.array(ratios) * bs * 7, table.contexts[0])
        for bs in table.batch_sizes
    ]
    return CostTable(
        8,
        table.batch_sizes,
        ratios,
        table.contexts,
        np.stack(cells)[:, :, None],
        table.draft_ms,
        {**table.fingerprint, "assumed": "as many rows of D = 16"},
    )


def _middle(values: list[float]) -> float:
    return (max(values) + min(values)) / 2 if values else float("nan")
