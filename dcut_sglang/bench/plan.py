"""What a run measures: loads on data sets, passes, and the order of the arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcut_sglang.bench.arms import Arm, ModelPair
from dcut_sglang.bench.data import DataSet


@dataclass(frozen=True)
class Cell:
    """One load on one data set: so many requests in flight, or so many arrivals per second."""

    data: DataSet
    num_requests: int
    concurrency: int | None = None
    request_rate: float | None = None

    @property
    def work(self) -> float:
        """Its share of a run's time, roughly: steps get slower with the batch, but not as much as
        it grows."""
        return self.num_requests / (self.concurrency or 4) ** 0.6


@dataclass(frozen=True)
class Plan:
    """What a run measures.

    Attributes:
        tokens: new tokens per request, on average (``steady.staggered``).
        ignore_eos: whether answers go on to ``tokens`` whatever the model says.
        seed: of the order of prompts and of the arrivals.
    """

    pair: ModelPair
    cells: tuple[Cell, ...]
    passes: int
    tokens: int
    dtype: str
    seed: int = 0
    ignore_eos: bool = False


def rotated(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Another arm first in each pass, so that none always runs on the machine that another one
    heated up; plain first in pass 0, whose outputs the others are compared with."""
    ordered = sorted(arms, key=lambda arm: arm.name != "plain")
    place = number % len(ordered) if ordered else 0
    return ordered[place:] + ordered[:place]
