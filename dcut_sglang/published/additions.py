"""What this package adds to D-Cut, on the published costs of Qwen3-8B.

Assumptions, beyond those of ``h20.qwen3_8b`` and, for D = 8, of ``block_8``: the populations of
``published`` (the middle of those that fit); steps drawn without feedback; below 25 % the step
time goes on in a straight line; plain steps, and the better D, are chosen where they win on
average.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcut_sglang.published import block_8, h20
from dcut_sglang.published.chosen import choose, middle
from dcut_sglang.published.tables import fits_of


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
        selector_8: four buckets of a block of 8, anchors counted.
        block_8: every number of drafts of a block of 8, or plain steps.
    """

    edition: h20.Edition
    bs: int
    plain: float
    published: float
    drafts_only: float
    anchors: float
    any_number: float
    plain_steps: float
    selector_8: float
    block_8: float

    @property
    def best(self) -> float:
        """Our policy with the better D, or plain steps."""
        return max(self.plain_steps, self.block_8)


def additions(edition: h20.Edition, assumption: block_8.Assumption = "saving") -> list[Addition]:
    """One row per published batch size."""
    fits = fits_of(edition)
    blocks = block_8.fits(edition, assumption)
    table = h20.qwen3_8b(edition)
    plain = h20.throughput(edition, "Qwen3-8B", "AR")
    auto = h20.throughput(edition, "Qwen3-8B", "D-Cut-B16")
    rows = []
    for bs in h20.BATCH_SIZES:
        drafts_only = middle([choose(f.model, table, bs, "paper").tokens_per_s for f in fits])
        anchors = middle([choose(f.model, table, bs, "throughput").tokens_per_s for f in fits])
        any_number = middle(
            [choose(f.model, table, bs, "throughput", ()).tokens_per_s for f in fits]
        )
        any_number_8 = middle([b.any_number(bs).tokens_per_s for b in blocks])
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
                middle([b.selector(bs).tokens_per_s for b in blocks]),
                max(any_number_8, plain[bs]),
            )
        )
    return rows
