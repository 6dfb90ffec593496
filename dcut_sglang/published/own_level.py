"""Our policy on the load that gives the published selector its published row.

``additions`` has one population for all batch sizes of an edition, which misses single rows by up
to 5 %: the accept length is published once, and the rows themselves imply that it differs with the
batch size. Assumed here instead: at each batch size the population's level is the one at which the
published selector reaches exactly what is published there; its spreads and all costs stay. On that
load our policy and the published row compare like with like.
"""

from __future__ import annotations

from dataclasses import replace

from dcut_sglang.cost import CostTable
from dcut_sglang.published.accept_model import AcceptModel
from dcut_sglang.published.chosen import choose

# Levels between which drafts go from hopeless to certain.
_LOWEST, _HIGHEST = -6.0, 12.0
_NUM_HALVINGS = 16


def level_of(
    shape: AcceptModel,
    table: CostTable,
    bs: int,
    tokens_per_s: float,
    buckets: tuple[float, ...],
) -> AcceptModel:
    """The population of this shape on which the published selector gives ``tokens_per_s``.

    Throughput grows with the level, since every draft is then accepted more often.

    Args:
        buckets: the selector's, as shares of the drafts.

    Raises:
        ValueError: no level gives that much, or that little.
    """
    low, high = _LOWEST, _HIGHEST
    for level, is_enough in ((low, False), (high, True)):
        found = choose(replace(shape, level=level), table, bs, "throughput", buckets)
        if (found.tokens_per_s >= tokens_per_s) != is_enough:
            raise ValueError(f"bs {bs}: {tokens_per_s} tokens/s lie outside of what blocks give")
    for _ in range(_NUM_HALVINGS):
        level = (low + high) / 2
        found = choose(replace(shape, level=level), table, bs, "throughput", buckets)
        low, high = (low, level) if found.tokens_per_s >= tokens_per_s else (level, high)
    return replace(shape, level=high)


def ours_at_level_of(
    shape: AcceptModel,
    table: CostTable,
    bs: int,
    tokens_per_s: float,
    buckets: tuple[float, ...],
    plain: float,
) -> float:
    """Tokens per second of every number of drafts there, or of plain steps where these win.

    Args:
        tokens_per_s: the published selector's.
        plain: plain decoding's.
    """
    model = level_of(shape, table, bs, tokens_per_s, buckets)
    return max(plain, choose(model, table, bs, "throughput", ()).tokens_per_s)
