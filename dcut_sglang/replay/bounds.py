"""What the best possible policies reach: one that knows probabilities, one that knows outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.calibrated import cross_fitted
from dcut_sglang.replay.policies import Choice, View, expected_accepted, keep_best, rank
from dcut_sglang.replay.step_cost import StepCost

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class Knowing:
    """The best policy that knows calibrated survival before it pays for the draft.

    What it knows of a step: the survival of every draft, raw and calibrated (fitted per position
    on other texts), the context lengths and the exact cost of everything it could do. What it
    does not: outcomes, and the survivals of later steps. What it may do: a plain step, or a draft
    of any depth of which it verifies any number; a server can only decide the latter after the
    draft is paid for, so this is a bound, not a rule to ship.

    Greatest tokens per millisecond over a run is not the greatest of every step's ratio: with a
    price (tokens per millisecond) it is the greatest sum of tokens - price * ms, at the price
    that the run itself earns. A cut also leaves good drafts for the next step, so that a kept
    one gains less than its survival; scaling all gains by one factor is the same as another
    price. Hence one unknown, the price, and the variants are a search over it, with what it
    believes (``beliefs``) and, as a check of the argument, each step's best ratio.

    Args:
        beliefs: float32 [B, N, D-1], survivals of the anchors to be replayed.
        prices: tokens per millisecond; ``inf`` takes the cheapest step, ``nan`` the best ratio
            of each step. Every price is tried with every belief.
    """

    def __init__(self, beliefs: Float32Array, prices: Sequence[float]) -> None:
        self.beliefs = beliefs
        self._prices = np.tile(np.asarray(prices, dtype=np.float64), len(beliefs))
        self._belief = np.repeat(np.arange(len(beliefs)), len(prices))
        self.labels = tuple(
            f"belief {b}, price {p:.4g}"
            for b, p in zip(self._belief.tolist(), self._prices.tolist(), strict=True)
        )

    def choose(self, view: View) -> Choice:
        believed = self.beliefs[self._belief[view.variant][:, None], view.anchor]
        price = self._prices[view.variant][:, None]
        plain_ms = view.cost.verify(view.context, np.array([0]))
        verify_ms = view.cost.verify(view.context)
        num_steps = len(believed)
        best = np.zeros(num_steps)  # scores are gains over a plain step
        kept = np.zeros(view.anchor.shape, dtype=np.int64)
        depths = np.zeros(num_steps, dtype=np.int64)
        for depth in self._depths(view.cost):
            block = believed[:, :, :depth]
            ranked = rank(block)
            tokens = expected_accepted(ranked).astype(np.float64)
            ms = verify_ms[:, : tokens.shape[1]] + view.cost.draft(view.context, depth)[:, None]
            score = _score(tokens, ms, plain_ms, price, view.bs)
            num_kept = np.argmax(score, axis=1)
            better = np.flatnonzero(score[np.arange(num_steps), num_kept] > best)
            if not len(better):
                continue
            best[better] = score[better, num_kept[better]]
            kept[better] = keep_best(block[better], ranked[better], num_kept[better])
            depths[better] = depth
        return Choice(kept, depths == 0, depths)

    def _depths(self, cost: StepCost) -> list[int]:
        """Depths worth trying: only the whole block when a shallower draft costs the same."""
        if not cost.table.head_ms.any():
            return [cost.max_depth]
        wanted = {1, 2, 3, 4, 6, 8, 11, cost.max_depth}
        return sorted(depth for depth in wanted if depth <= cost.max_depth)


def beliefs(bank: AnchorBank) -> Float32Array:
    """What the knowing policy may believe: calibrated survival, raw survival, their mean.

    The calibration is fitted on few texts: where the drafter is calibrated already it only adds
    noise, and the best policy would not use it. float32 [3, N, D-1].
    """
    calibrated = cross_fitted(bank)
    return np.stack([calibrated, bank.survival, (calibrated + bank.survival) / 2])


def _score(
    tokens: FloatArray, ms: FloatArray, plain_ms: FloatArray, price: FloatArray, bs: int
) -> FloatArray:
    """Gain of keeping K drafts over a plain step, [W, K]; by the rule of each step's price."""
    with np.errstate(invalid="ignore"):
        priced = tokens - price * (ms - plain_ms)
    score = np.where(np.isinf(price), plain_ms - ms, priced)
    return np.where(np.isnan(price), (bs + tokens) / ms - bs / plain_ms, score)


class Clairvoyant:
    """The best policy that knows every accept length of the text, later ones included.

    For one request at a time the best way through its text is a shortest path over anchors: an
    edge keeps n <= L accepted drafts and costs a share of the step. The share is not known
    before the batch is, so it is priced: base + row_price * n, for a range of row prices, and
    once as measured for a batch in which all requests keep n. With those values to go, each
    step takes the cheaper of drafting (lengths from the shortest path) and a plain step, at
    their exact cost. Exact for one request; for a batch the best of the range.

    Args:
        bank: the anchors to be replayed.
        cost: costs at the batch size to be replayed.
        context: mean context at which edges are priced.
        row_price_factors: row prices, as multiples of the mean cost of a verified draft.
    """

    def __init__(
        self,
        bank: AnchorBank,
        cost: StepCost,
        context: float,
        row_price_factors: Sequence[float] = (0.0, 0.3, 0.6, 0.8, 1.0, 1.3, 1.8, 3.0),
    ) -> None:
        at = np.array([context])
        bs, depth = cost.bs, cost.max_depth
        uniform = cost.verify(at, bs * np.arange(depth + 1))[0] / bs
        row_price = (uniform[-1] - uniform[0]) / depth
        edges = [uniform] + [
            uniform[0] + factor * row_price * np.arange(depth + 1) for factor in row_price_factors
        ]
        draft_ms = cost.draft(at, np.arange(depth + 1)) / bs
        plain_ms = float(uniform[0])
        solved = [_shortest(bank, edge + draft_ms, plain_ms, p) for edge in edges for p in (0, 1)]
        self.to_go = np.stack([to_go for to_go, _ in solved])  # float64 [V, N + 1]
        self.kept = np.stack([kept for _, kept in solved])  # int64 [V, N]
        self.labels = tuple(f"edges {v}" for v in range(len(solved)))
        # The value at the end of a text is 0, whatever text follows in the bank.
        self._after = np.arange(len(bank.accept))
        self._ends = self._after + bank.remaining
        self._end_place = len(bank.accept)

    def choose(self, view: View) -> Choice:
        variant = view.variant[:, None]
        kept = self.kept[variant, view.anchor]
        depth = kept.max(axis=1)
        saved = self._value(variant, view.anchor + 1, view.anchor) - self._value(
            variant, view.anchor + kept + 1, view.anchor
        )
        draft_ms = view.cost.draft(view.context, depth)
        drafting = draft_ms + view.cost.verify_each(view.context, kept.sum(axis=1))
        plain = view.cost.verify(view.context, np.array([0]))[:, 0]
        is_plain = saved.sum(axis=1) <= drafting - plain
        return Choice(np.where(is_plain[:, None], 0, kept), is_plain, depth)

    def _value(self, variant: IntArray, place: IntArray, anchor: IntArray) -> FloatArray:
        return self.to_go[variant, np.where(place >= self._ends[anchor], self._end_place, place)]


def _shortest(
    bank: AnchorBank, edge_ms: FloatArray, plain_ms: float, plain_allowed: int
) -> tuple[FloatArray, IntArray]:
    """Cheapest way from every anchor to the end of its text.

    Args:
        edge_ms: float64 [D], cost of a drafting step that keeps n drafts.
        plain_allowed: whether a request may also take a plain step on its own.

    Returns:
        (milliseconds to go float64 [N + 1], the last entry 0 for "at the end";
        drafts to keep int64 [N] when the step drafts).
    """
    n = len(bank.accept)
    to_go = np.zeros(n + 1)
    kept = np.zeros(n, dtype=np.int64)
    # A draft beyond the last token of the text gains nothing.
    useful = np.minimum(bank.accept, bank.remaining - 1)
    lengths = np.diff(bank.start)
    for back in range(1, int(lengths.max()) + 1):
        at = bank.start[1:][lengths >= back] - back
        ahead = np.arange(1, min(len(edge_ms), back) + 1)
        # remaining == back for a whole text; a shorter remaining never occurs.
        landing = np.where(ahead < back, at[:, None] + ahead, n)
        total = edge_ms[: len(ahead)] + to_go[landing]
        total[np.arange(len(ahead)) > useful[at][:, None]] = np.inf
        best = np.argmin(total, axis=1)
        kept[at] = best
        to_go[at] = total[np.arange(len(at)), best]
        if plain_allowed:
            to_go[at] = np.minimum(to_go[at], plain_ms + to_go[landing[:, 0]])
    return to_go, kept
