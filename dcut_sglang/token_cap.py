"""A cap on the time per token of the slowest request (``max_token_ms``), applied to a plan."""

from __future__ import annotations

import numpy as np

from dcut_sglang.cost import BatchCosts
from dcut_sglang.value import FloatArray, IntArray, Prices, ValueModel


def capped(
    net: FloatArray,
    counts: IntArray,
    rows: IntArray,
    cap_ms: float,
    values: ValueModel,
    prices: Prices,
    costs: BatchCosts,
    overhead_ms: tuple[float, float],
) -> tuple[FloatArray, bool]:
    """Rules out what would make the slowest request wait longer for a token than the cap.

    Args:
        net: float64 [n], gain in tokens of drafting for the first ``counts`` [n] of ``rows``.
        rows: int64 [bs], the batch's rows in the memory of values, in the order of drafting.
        cap_ms: the cap, in milliseconds.
        overhead_ms: what a step spends outside of draft, head and verify: plain, drafting.

    Returns:
        (``net``, -inf where ruled out; whether to draft for everybody because that brings the
        slowest request closer to a cap that plain decoding does not keep).
    """
    plain_ms = costs.plain_ms + overhead_ms[0]
    head_ms = costs.head(np.cumsum(values.last_depth(rows))[counts - 1])
    step_ms = costs.draft_forward(counts) + head_ms + overhead_ms[1]
    tokens, kept = values.expected(rows, prices)
    step_ms += costs.verify(costs.bs + np.round(np.cumsum(kept))[counts - 1])
    # A request that is not drafted for emits one token.
    slowest = np.where(counts == len(rows), tokens.min(), 1.0)
    token_ms = step_ms / slowest
    relief = plain_ms > cap_ms and bool(token_ms[-1] < plain_ms)
    return np.where(token_ms <= cap_ms, net, -np.inf), relief
