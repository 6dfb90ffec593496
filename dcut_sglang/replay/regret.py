"""Compare policies on the same texts and costs, against the two bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dcut_sglang.config import WITHOUT, DCutConfig
from dcut_sglang.cost import CostTable
from dcut_sglang.replay.anchors import AnchorBank
from dcut_sglang.replay.bounds import Clairvoyant, Float32Array, Knowing, beliefs
from dcut_sglang.replay.controlled import LABEL as CONTROLLED
from dcut_sglang.replay.controlled import replay_controlled
from dcut_sglang.replay.policies import (
    FixedLength,
    FixedRatio,
    Plain,
    Policy,
    Threshold,
    dcut_as_published,
    ours,
)
from dcut_sglang.replay.run import Cell, replay
from dcut_sglang.replay.step_cost import StepCost

KNOWING, CLAIRVOYANT = "knowing", "clairvoyant"
# Two replays of equally good policies differ by less than this in tokens per millisecond.
NOISE = 0.005


@dataclass(frozen=True)
class Comparison:
    """Every policy at one batch size.

    Attributes:
        cells: by policy. ``knowing`` is the best that its search found, or a server's policy
            where one does better: knowing more, it could imitate it. ``clairvoyant`` likewise.
            Both act on the whole batch: they draft for everybody, in whole blocks and to one
            depth, or for nobody. "Ours" may draft for some, each as deep as pays, and in shorter
            blocks, so it is not imitated, and its share of what they reach may exceed 1.
        searched: the two bounds as their searches found them, without imitation.
    """

    bs: int
    cells: dict[str, Cell]
    searched: dict[str, Cell]

    def share_of_knowing(self, label: str) -> float:
        return self.cells[label].tokens_per_ms / self.cells[KNOWING].tokens_per_ms

    def clairvoyant_regret(self, label: str) -> float:
        """Share of the clairvoyant policy's tokens per millisecond that is missed."""
        return 1 - self.cells[label].tokens_per_ms / self.cells[CLAIRVOYANT].tokens_per_ms

    def search_gap(self, bound: str) -> float:
        """How much better the best imitated policy is than a bound's own search; 0: none is."""
        return self.cells[bound].tokens_per_ms / self.searched[bound].tokens_per_ms - 1

    def failed_searches(self) -> list[str]:
        """Bounds whose search misses, by more than noise, what a policy that knows less does."""
        return [
            f"bs {self.bs}: {bound} by {self.search_gap(bound):.2%}"
            for bound in (KNOWING, CLAIRVOYANT)
            if self.search_gap(bound) > NOISE
        ]


def standard_policies(table: CostTable, config: DCutConfig | None = None) -> list[Policy]:
    """The policies that a server could run."""
    return [
        Plain(),
        FixedRatio((0.25, 0.5, 0.75, 1.0)),
        FixedLength(tuple(n for n in (2, 4, 8) if n <= table.block_size)),
        Threshold((0.1, 0.3, 0.5, 0.7)),
        dcut_as_published(table),
        ours(table, config),
    ]


# What each addition is worth: "ours" without it. Recorded texts hold no tokens, so the head's
# vocabulary is none of replay's.
ABLATIONS: dict[str, dict[str, Any]] = {
    f"ours, {name}": less for name, less in WITHOUT.items() if "short_vocabulary" not in less
}


def compare(
    bank: AnchorBank,
    table: CostTable,
    batch_sizes: Sequence[int],
    *,
    config: DCutConfig | None = None,
    num_tokens: int = 1_500,
    num_worlds: int = 32,
    seed: int = 0,
    ablations: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Comparison]:
    """Replay every policy at every batch size; yields one comparison per batch size.

    Args:
        config: of "ours".
        num_tokens: tokens per world, at least; large batches get 250 per place.
        num_worlds: at batch size 1; larger batches get proportionally fewer, at least 4.
        ablations: whether "ours" is also replayed without each of its parts.
        progress: called with the policy about to be replayed.
    """
    believed = beliefs(bank)
    context = float((bank.prompt_len + np.diff(bank.start) / 2).mean())
    for bs in batch_sizes:
        cost = StepCost(table, bs)
        wanted = max(num_tokens, 250 * bs)
        worlds = max(4, num_worlds // bs)

        def run(
            policy: Policy,
            name: str,
            cost: StepCost = cost,
            wanted: int = wanted,
            worlds: int = worlds,
        ) -> list[Cell]:
            if progress is not None:
                progress(f"bs {cost.bs}: {name}")
            return replay(bank, policy, cost, num_tokens=wanted, num_worlds=worlds, seed=seed)

        cells = {
            cell.label: cell
            for policy in standard_policies(table, config)
            for cell in run(policy, policy.labels[0])
        }
        variants: dict[str, dict[str, Any]] = {CONTROLLED: {}} | (ABLATIONS if ablations else {})
        for label, changes in variants.items():
            if progress is not None:
                progress(f"bs {bs}: {label}")
            cells[label] = replay_controlled(
                bank,
                table,
                bs,
                label=label,
                config=replace(config or DCutConfig(), **changes),
                num_tokens=wanted,
                num_worlds=worlds,
                seed=seed,
            )
        imitable = [cell for label, cell in cells.items() if label not in variants]
        rate = max(cell.tokens_per_ms for cell in cells.values())
        searched = {
            KNOWING: search_prices(partial(_run_knowing, run), believed, rate),
            CLAIRVOYANT: _best(run(Clairvoyant(bank, cost, context), CLAIRVOYANT)),
        }
        cells[KNOWING] = _best([searched[KNOWING], *imitable])
        cells[CLAIRVOYANT] = _best([searched[CLAIRVOYANT], cells[KNOWING]])
        yield Comparison(bs, cells, searched)


def _best(cells: Iterable[Cell]) -> Cell:
    return max(cells, key=lambda cell: cell.tokens_per_ms)


def _run_knowing(
    run: Callable[[Policy, str], list[Cell]],
    believed: Float32Array,
    prices: Sequence[float],
) -> list[Cell]:
    return run(Knowing(believed, prices), KNOWING)


def search_prices(
    run: Callable[[Float32Array, Sequence[float]], list[Cell]],
    believed: Float32Array,
    rate: float,
) -> Cell:
    """The best cell over prices and beliefs.

    Prices around ``rate`` (tokens per ms) first, with the calibrated belief alone; then finely
    around the best one, with every belief.

    Args:
        run: cells of every belief given, each with every price.
    """
    around = [float(p) for p in np.geomspace(0.5, 3.0, 7) * rate]
    cells = run(believed[:1], [*around, float("inf"), float("nan")])
    best = max(range(len(around)), key=lambda i: cells[i].tokens_per_ms)
    low, high = around[max(best - 1, 0)], around[min(best + 1, len(around) - 1)]
    finer = [float(p) for p in np.geomspace(low, high, 9)[1:-1]]
    cells += run(believed, [*finer, float("nan")])
    return _best(cells)


def table_rows(comparison: Comparison) -> list[str]:
    """Markdown rows of one comparison, in the order of ``TABLE_HEADER``."""
    rows = []
    for label, cell in comparison.cells.items():
        rows.append(
            f"| {comparison.bs} | {label} | {cell.tokens / cell.steps:.2f} "
            f"| {cell.rows / cell.steps:.1f} | {cell.ms / cell.steps:.1f} "
            f"| {cell.tokens_per_ms:.4f} | {comparison.share_of_knowing(label):.3f} "
            f"| {comparison.clairvoyant_regret(label):.3f} "
            f"| {cell.plain_steps / cell.steps:.2f} |"
        )
    return rows


TABLE_HEADER = [
    "| bs | policy | tokens/step | rows/step | ms/step | tokens/ms | share of knowing "
    "| clairvoyant regret | plain steps |",
    "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
]
