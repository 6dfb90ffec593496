"""What blocks of D = 8 cost and give, from the published Qwen3-8B rows themselves.

No cost table is published for D = 8. Assumed: verifying costs what as many rows of D = 16 cost,
and drafting costs less than at D = 16 by one number, the same at every batch size. Two forms of
it are tried, each with two free numbers per shape of ``july_fits`` (it and the population's
level) against July's ten rows, DFlash-B8 and D-Cut-B8:

    "saving"  a draft of 8 costs ``amount`` ms per request less, and never less than nothing
    "share"   a draft of 8 costs ``amount`` of a draft of 16

"saving" fits better, and carried over to May too, so it is the default. What is called the
draft's cost is what a step costs beyond a plain one at zero drafts (``h20``), so the number says
what a whole step of D = 8 saves rather than what the drafter alone does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from dcut_sglang.cost import CostTable
from dcut_sglang.published import h20
from dcut_sglang.published.accept_model import AcceptModel, pattern_search, tokens_at_depth
from dcut_sglang.published.chosen import Chosen, choose, middle
from dcut_sglang.published.tables import july_fits, may_fits

Assumption = Literal["saving", "share"]
FloatArray = npt.NDArray[np.float64]

BUCKETS = (1 / 7, 3 / 7, 5 / 7, 1.0)  # 2, 4, 6 and 8 of 8 rows, as shares of the 7 drafts
START: dict[Assumption, float] = {"saving": 0.1, "share": 0.6}


@dataclass(frozen=True)
class Block8:
    """A population of blocks of 8 and their costs.

    Attributes:
        amount: of the assumption: ms per request, or a share.
        misfit: root mean square relative error on the fitted rows.
    """

    model: AcceptModel
    table: CostTable
    amount: float
    misfit: float

    def full(self, bs: int) -> float:
        """Tokens per second of steps that verify all 8 rows."""
        ms = self.table.draft(bs, 1024) + float(self.table.verify(bs, 8 * bs, 1024))
        return 1000 * bs * tokens_at_depth(self.model.survival(), 8) / ms

    def selector(self, bs: int) -> Chosen:
        """The published selector: four buckets, anchors counted as July's D = 16 rows want it."""
        return choose(self.model, self.table, bs, "throughput", BUCKETS)

    def any_number(self, bs: int) -> Chosen:
        """Every number of drafts."""
        return choose(self.model, self.table, bs, "throughput", ())


def costs(edition: h20.Edition, assumption: Assumption, amount: float) -> CostTable:
    """The edition's D = 16 table cut at 8 rows per request, with cheaper drafts."""
    table = h20.qwen3_8b(edition)
    ratios = (0.0, *BUCKETS)
    cells = [
        table.verify(bs, bs + np.array(ratios) * bs * 7, table.contexts[0])
        for bs in table.batch_sizes
    ]
    if assumption == "share":
        draft_ms = table.draft_ms * np.clip(amount, 0, 1)
    else:
        saved_ms = max(amount, 0.0) * np.array(table.batch_sizes)[:, None]
        draft_ms = np.maximum(table.draft_ms - saved_ms, 0)
    return CostTable(
        8,
        table.batch_sizes,
        ratios,
        table.contexts,
        np.stack(cells)[:, :, None],
        draft_ms,
        {**table.fingerprint, "assumed": f"rows of D = 16; draft: {assumption} {amount:.3g}"},
    )


@cache
def fits(edition: h20.Edition, assumption: Assumption = "saving") -> tuple[Block8, ...]:
    """One for each shape that fits D = 16, in that order.

    July: level and amount by least squares on DFlash-B8 and D-Cut-B8. May has no DFlash-B8 row:
    July's amount, and the level alone on D-Cut-B8.
    """
    if edition == "July":
        return tuple(
            _best(partial(_july, assumption, f.model), [f.model.level, START[assumption]])
            for f in july_fits()
        )
    return tuple(
        _best(partial(_may, assumption, f.model, july.amount), [f.model.level])
        for f, july in zip(may_fits(), fits("July", assumption), strict=True)
    )


def errors(block: Block8, edition: h20.Edition) -> dict[str, list[float]]:
    """predicted / published - 1 of each published B8 row, by batch size."""
    auto = h20.throughput(edition, "Qwen3-8B", "D-Cut-B8")
    found = {"D-Cut-B8": [block.selector(bs).tokens_per_s / auto[bs] - 1 for bs in auto]}
    if edition == "July":
        full = h20.throughput(edition, "Qwen3-8B", "DFlash-B8")
        found = {"DFlash-B8": [block.full(bs) / full[bs] - 1 for bs in full], **found}
    return found


def middle_errors(edition: h20.Edition, assumption: Assumption) -> dict[str, list[float]]:
    """predicted / published - 1 of each B8 row, the middle of the populations, by batch size."""
    every = [errors(b, edition) for b in fits(edition, assumption)]
    return {
        arm: [middle(at_bs) for at_bs in zip(*(e[arm] for e in every), strict=True)]
        for arm in every[0]
    }


def _july(assumption: Assumption, shape: AcceptModel, point: FloatArray) -> Block8:
    return _block("July", assumption, shape, float(point[0]), float(point[1]))


def _may(assumption: Assumption, shape: AcceptModel, amount: float, point: FloatArray) -> Block8:
    return _block("May", assumption, shape, float(point[0]), amount)


def _block(
    edition: h20.Edition, assumption: Assumption, shape: AcceptModel, level: float, amount: float
) -> Block8:
    model = AcceptModel(level, shape.request_spread, shape.position_spread, block_size=8)
    block = Block8(model, costs(edition, assumption, amount), amount, 0.0)
    squares = np.square(list(errors(block, edition).values()))
    return Block8(model, block.table, amount, float(np.sqrt(squares.mean())))


def _best(block_at: Callable[[FloatArray], Block8], start: list[float]) -> Block8:
    """The block of least misfit. July's misfit has one minimum along the amount, by a scan."""
    point, _ = pattern_search(lambda point: block_at(point).misfit, start, 0.05, 0.0005)
    return block_at(point)
