"""What of the published D-Cut tables the cost model and the selector reproduce.

A throughput is bs * tokens per request and step / step time. The step times are published for
Qwen3-8B; the tokens come from an ``AcceptModel`` fitted on rows that D-Cut did not choose (full,
75 and 50 %), and the auto rows are predicted. Several populations fit about equally well: all of
them predict, the middle of their predictions is compared, and where they disagree by more than
the tolerance the data do not determine the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from dcut_sglang.config import Objective
from dcut_sglang.published import h20
from dcut_sglang.published.accept_model import (
    AcceptModel,
    pattern_search,
    tokens_at_depth,
    tokens_at_rows,
)
from dcut_sglang.published.chosen import Chosen, choose

FloatArray = npt.NDArray[np.float64]
Status = Literal["reproduced", "not reproduced", "not determined"]

TOLERANCE = 0.03
FIXED_ARMS = {0.5: "D-Cut-Fixed-R50", 0.75: "D-Cut-Fixed-R75", 1.0: "DFlash-B16"}
SPREADS = tuple((r, p) for r in (0.0, 0.5, 1.0, 1.5, 2.0) for p in (0.0, 1.0, 2.0, 3.0, 5.0))
# Populations that fit within this factor of the best one are not told apart.
AS_GOOD = 1.5
# What the published data cannot be made to agree with; ``docs/published.md`` says why.
KNOWN_MISSES = frozenset(
    {
        "Qwen3-8B May full bs 4",
        "Qwen3-8B May full bs 64",
        "Qwen3.5-27B-TP4 May auto bs 8",
        "Qwen3.5-27B-TP4 May auto bs 64",
        "Qwen3.5-35B-A3B May auto bs 4",
        "Qwen3-8B May choice bs 8",
    }
)


@dataclass(frozen=True)
class Check:
    """One published number and its prediction.

    Attributes:
        name: what is predicted, e.g. "Qwen3-8B May auto bs 16".
        published, predicted: in the same unit.
        half_range: half the spread of equally good predictions, relative; 0: a single one.
        status: by ``TOLERANCE``, unless the data do not determine the prediction.
    """

    name: str
    published: float
    predicted: float
    half_range: float = 0.0
    tolerance: float = TOLERANCE

    @property
    def error(self) -> float:
        """(predicted - published) / published."""
        return self.predicted / self.published - 1

    @property
    def status(self) -> Status:
        if self.half_range > self.tolerance:
            return "not determined"
        return "reproduced" if abs(self.error) <= self.tolerance else "not reproduced"


@dataclass(frozen=True)
class Fitted:
    """A population, the tokens per step it gives at each published ratio, and its misfit.

    Attributes:
        tokens: float64 [batch sizes, ratios], with the batch size's own factor.
        misfit: root mean square relative error on the fitted rows.
    """

    model: AcceptModel
    tokens: FloatArray
    misfit: float


def tokens_by_ratio(model: AcceptModel) -> FloatArray:
    """Tokens per request and step, float64 [batch sizes, ratios]; a ratio counts anchors."""
    survival = model.survival()
    return np.array(
        [
            [tokens_at_rows(survival, bs, model.block_size * ratio) for ratio in h20.ROW_RATIOS]
            for bs in h20.BATCH_SIZES
        ]
    )


@cache
def may_fits() -> tuple[Fitted, ...]:
    """Populations that fit Qwen3-8B's May full, 75 and 50 % rows about equally well, best first.

    Each batch size has one factor of its own (its accept length and what its step time misses),
    so the fit decides the shape: how tokens fall as the ratio does.
    """
    step_ms = h20.step_ms()
    seen = np.array(
        [
            [
                h20.throughput("May", "Qwen3-8B", arm)[bs] * step_ms[bs][i] / bs / 1000
                for i, arm in enumerate(FIXED_ARMS.values(), start=1)
            ]
            for bs in h20.BATCH_SIZES
        ]
    )
    fits = []
    for spreads in SPREADS:

        def mean_factor(point: FloatArray, spreads: tuple[float, float] = spreads) -> float:
            tokens = tokens_by_ratio(AcceptModel(float(point[0]), *spreads))
            return abs(float(np.log(seen / tokens[:, 1:]).mean()))

        # The batch sizes' factors must average 1, which fixes the level.
        point, _ = pattern_search(mean_factor, [0.8 + 0.5 * spreads[1]])
        model = AcceptModel(float(point[0]), *spreads)
        tokens = tokens_by_ratio(model)
        tokens *= np.exp(np.log(seen / tokens[:, 1:]).mean(axis=1, keepdims=True))
        misfit = float(np.sqrt(((tokens[:, 1:] / seen - 1) ** 2).mean()))
        fits.append(Fitted(model, tokens, misfit))
    fits.sort(key=lambda fit: fit.misfit)
    return tuple(fit for fit in fits if fit.misfit <= AS_GOOD * fits[0].misfit)


@cache
def july_fits() -> tuple[Fitted, ...]:
    """The same shapes at the accept length of Qwen3-8B's July full rows, one for all sizes."""
    length = july_accept_length()
    fits = []
    for may in may_fits():
        shape = (may.model.request_spread, may.model.position_spread)

        def loss(point: FloatArray, shape: tuple[float, float] = shape) -> float:
            survival = AcceptModel(float(point[0]), *shape).survival()
            return abs(tokens_at_depth(survival, 16) - length)

        point, _ = pattern_search(loss, [may.model.level])
        model = AcceptModel(float(point[0]), *shape)
        fits.append(Fitted(model, tokens_by_ratio(model), may.misfit))
    return tuple(fits)


def fits_of(edition: h20.Edition) -> tuple[Fitted, ...]:
    """The populations of one edition."""
    return may_fits() if edition == "May" else july_fits()


def accept_lengths(edition: h20.Edition) -> dict[int, float]:
    """Tokens per request and step that the full rows of Qwen3-8B and its step times imply."""
    full = h20.throughput(edition, "Qwen3-8B", "DFlash-B16")
    return {bs: full[bs] * h20.step_ms()[bs][3] / bs / 1000 for bs in h20.BATCH_SIZES}


def july_accept_length() -> float:
    return float(np.mean(list(accept_lengths("July").values())))


def at_keep_ratio(fit: Fitted, bs: int, ratio: float) -> float:
    """Tokens per second of steps that mix the two buckets around a mean keep ratio."""
    row = h20.BATCH_SIZES.index(bs)
    tokens = np.interp(ratio, h20.ROW_RATIOS, fit.tokens[row])
    ms = np.interp(ratio, h20.ROW_RATIOS, h20.step_ms()[bs])
    return float(1000 * bs * tokens / ms)


def full_checks() -> list[Check]:
    """Full verification from one accept length per edition."""
    checks = []
    editions: tuple[h20.Edition, ...] = ("May", "July")
    for edition in editions:
        length = float(np.mean(list(accept_lengths(edition).values())))
        full = h20.throughput(edition, "Qwen3-8B", "DFlash-B16")
        for bs in h20.BATCH_SIZES:
            predicted = 1000 * bs * length / h20.step_ms()[bs][3]
            checks.append(Check(f"Qwen3-8B {edition} full bs {bs}", full[bs], predicted))
    return checks


def auto_checks() -> list[Check]:
    """D-Cut's own May rows, at the published mean keep ratio."""
    ratio = h20.keep_ratio("May", "Qwen3-8B")
    auto = h20.throughput("May", "Qwen3-8B", "D-Cut-B16")
    checks = [
        _from_range(
            f"Qwen3-8B May auto bs {bs}",
            auto[bs],
            [at_keep_ratio(fit, bs, ratio[bs]) for fit in may_fits()],
        )
        for bs in h20.BATCH_SIZES
    ]
    for model in ("Qwen3.5-27B-TP4", "Qwen3.5-35B-A3B"):
        auto = h20.throughput("May", model, "D-Cut-B16")
        ratio = h20.keep_ratio("May", model)
        fixed = {r: h20.throughput("May", model, arm) for r, arm in FIXED_ARMS.items()}
        for bs in h20.BATCH_SIZES:
            # No step times are published: the fixed rows themselves are the cost model, and
            # the auto row a mixture of them in time per token.
            ms_per_token = [1000 / fixed[r][bs] for r in FIXED_ARMS]
            predicted = 1000 / float(np.interp(ratio[bs], list(FIXED_ARMS), ms_per_token))
            checks.append(Check(f"{model} May auto bs {bs}", auto[bs], predicted))
    return checks


@cache
def strategy_fit() -> tuple[AcceptModel, tuple[Check, ...]]:
    """The strategy table (bs 32, D 16): seven numbers from three."""
    rows = h20.published()["strategy_table_bs32_D16"]["rows"]
    seen = np.array([row["accepted"] for row in rows]) / 32

    def tokens(point: FloatArray) -> FloatArray:
        model = AcceptModel(float(point[0]), abs(float(point[1])), abs(float(point[2])))
        survival = model.survival(4096)
        return np.array(
            [
                tokens_at_depth(survival, row["verify_tokens"] // 32)
                if row["strategy"].startswith(("fixed", "full"))
                else tokens_at_rows(survival, 32, row["verify_tokens"] / 32)
                for row in rows
            ]
        )

    def loss(point: FloatArray) -> float:
        return float(((tokens(point) / seen - 1) ** 2).sum())

    starts = ([1.7, 0.5, 1.0], [3.0, 1.5, 3.0], [5.3, 1.5, 5.0])
    point, _ = min((pattern_search(loss, start) for start in starts), key=lambda found: found[1])
    model = AcceptModel(float(point[0]), abs(float(point[1])), abs(float(point[2])))
    checks = [
        Check(f"strategy table, {row['strategy']}", row["accepted"], 32 * float(predicted))
        for row, predicted in zip(rows, tokens(point), strict=True)
    ]
    return model, tuple(checks)


def speedup_checks() -> list[Check]:
    """Speed-ups that the May page prints, from its own throughputs; July averages per data set."""
    checks = []
    for model, arms in h20.published()["speedup_may2026_page"]["rows"].items():
        name = "Qwen3.5-27B-TP4" if model == "Qwen3.5-27B" else model
        plain = h20.throughput("May", name, "AR")
        for arm, printed in arms.items():
            rates = h20.throughput("May", name, arm)
            ratios = [rates[bs] / plain[bs] for bs in h20.BATCH_SIZES]
            mean = float(np.exp(np.mean(np.log(ratios))))
            checks.append(Check(f"{model} May geometric mean of {arm}", printed[6], mean))
    return checks


def over_fits(
    fits: tuple[Fitted, ...], edition: h20.Edition, bs: int, objective: Objective
) -> list[Chosen]:
    """The published four buckets, for each population that fits."""
    table = h20.qwen3_8b(edition)
    return [choose(fit.model, table, bs, objective) for fit in fits]


def choice_checks() -> list[Check]:
    """What the selector does by itself: the May choices, and July's auto rows.

    With the anchors in the numerator; ``docs/published.md`` shows both. May: the mean keep
    ratio, within 0.05. July: throughput, because its keep ratios were carried over from May.
    """
    checks = []
    for bs, seen in h20.keep_ratio("May", "Qwen3-8B").items():
        every = [c.keep_ratio for c in over_fits(may_fits(), "May", bs, "throughput")]
        checks.append(_from_range(f"Qwen3-8B May choice bs {bs}", seen, every, 0.05 / seen))
    for bs, rate in h20.throughput("July", "Qwen3-8B", "D-Cut-B16").items():
        every = [c.tokens_per_s for c in over_fits(july_fits(), "July", bs, "throughput")]
        checks.append(_from_range(f"Qwen3-8B July auto bs {bs}", rate, every))
    return checks


def _from_range(
    name: str, published: float, every: list[float], tolerance: float = TOLERANCE
) -> Check:
    middle = (max(every) + min(every)) / 2
    return Check(name, published, middle, (max(every) - min(every)) / 2 / middle, tolerance)


def all_checks() -> list[Check]:
    """Every check, in the order of the page."""
    return [
        *full_checks(),
        *auto_checks(),
        *strategy_fit()[1],
        *choice_checks(),
        *speedup_checks(),
    ]
