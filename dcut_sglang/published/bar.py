"""Our policy against the best published D-Cut row at each batch size, Qwen3-8B."""

from __future__ import annotations

from dataclasses import dataclass

from dcut_sglang.published import block_8, h20
from dcut_sglang.published.additions import additions
from dcut_sglang.published.chosen import middle
from dcut_sglang.published.own_level import ours_at_level_of
from dcut_sglang.published.tables import fits_of

# Where the prediction stays below the best published row; by less than the model's own error.
BELOW_BEST = frozenset({"May bs 8", "May bs 16", "May bs 32", "July bs 8", "July bs 32"})


@dataclass(frozen=True)
class Bar:
    """One batch size; tokens per second.

    Attributes:
        plain: published plain decoding.
        arm: the best published D-Cut row, D-Cut-B16 or D-Cut-B8.
        published: what it reached.
        predicted: the model's prediction of that row, with the published selector.
        selector: the published selector with the better D, predicted.
        ours: our policy with the better D, or plain steps, predicted.
        what: D = 16, D = 8 or plain, whichever ours is.
        ours_at_level: ours on the load on which the model's published selector reaches exactly
            ``published``, with that row's D.
    """

    edition: h20.Edition
    bs: int
    plain: float
    arm: str
    published: float
    predicted: float
    selector: float
    ours: float
    what: str
    ours_at_level: float

    @property
    def name(self) -> str:
        return f"{self.edition} bs {self.bs}"

    @property
    def ratio(self) -> float:
        """ours / published."""
        return self.ours / self.published

    @property
    def ratio_at_level(self) -> float:
        """ours / published, where the model gives the published row itself."""
        return self.ours_at_level / self.published

    @property
    def own_error(self) -> float:
        """predicted / published - 1: how far the model itself is from the published row."""
        return self.predicted / self.published - 1

    @property
    def within_error(self) -> bool:
        """Below the published row, but by less than the model's own prediction of that row."""
        return self.own_error < self.ratio - 1 < 0

    @property
    def verdict(self) -> str:
        if self.ratio >= 1:
            return "at least"
        return "below, by less than the model's error" if self.within_error else "below"


def bars(edition: h20.Edition, assumption: block_8.Assumption = "saving") -> list[Bar]:
    """One for each published batch size."""
    published_8 = h20.throughput(edition, "Qwen3-8B", "D-Cut-B8")
    fits = fits_of(edition)
    of_16 = [(f.model, h20.qwen3_8b(edition), h20.DRAFT_RATIOS) for f in fits]
    of_8 = [(b.model, b.table, block_8.BUCKETS) for b in block_8.fits(edition, assumption)]
    found = []
    for a in additions(edition, assumption):
        arm, published, predicted = max(
            ("D-Cut-B16", a.published, a.anchors),
            ("D-Cut-B8", published_8[a.bs], a.selector_8),
            key=lambda row: row[1],
        )
        populations = of_16 if arm == "D-Cut-B16" else of_8
        at_level = [
            ours_at_level_of(shape, table, a.bs, published, buckets, a.plain)
            for shape, table, buckets in populations
        ]
        what = "D = 16" if a.plain_steps >= a.block_8 else "D = 8"
        found.append(
            Bar(
                edition,
                a.bs,
                a.plain,
                arm,
                published,
                predicted,
                max(a.anchors, a.selector_8),
                a.best,
                "plain" if a.best == a.plain else what,
                middle(at_level),
            )
        )
    return found
