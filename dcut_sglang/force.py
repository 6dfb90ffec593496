"""A forced choice of verify lengths, in place of the selector's: for tests and comparisons.

SGLang's ``/set_internal_state`` carries numbers only, so each form is a numeric knob:

``dcut_force_ratio``    0..1, keep that share of the batch's drafts, the best ones
``dcut_force_plain``    1, draft nothing and verify one token per request
``dcut_force_random``   a seed, draw each step's verify lengths uniformly from 1..D, whether it
                        drafts for all requests, for some or for none, in blocks
                        of which size, how deep, and the passes of plain steps
``dcut_verify_len_<i>`` 1..D, verify length of the requests whose place in the batch is i modulo
                        the number of lengths; ``dcut_verify_len_0`` starts a new list, places
                        that were left out get 1

-1 (0 for ``dcut_force_plain``) gives the choice back to the selector. The last knob set wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dcut_sglang.stages import Stages, WholeBlock
from dcut_sglang.survival import RankedDrafts, num_kept_at_ratio

MAX_FORCED_LENGTHS = 64
MAX_SEED = 1 << 32
KNOBS = ("dcut_force_ratio", "dcut_force_plain", "dcut_force_random") + tuple(
    f"dcut_verify_len_{i}" for i in range(MAX_FORCED_LENGTHS)
)


@dataclass(frozen=True)
class Forced:
    """One forced choice; exactly one field is set (``plain`` counts as set when True).

    Raises:
        ValueError: none or several are set.
    """

    plain: bool = False
    ratio: float | None = None
    lengths: tuple[int, ...] | None = None
    random_seed: int | None = None

    def __post_init__(self) -> None:
        chosen = (self.ratio, self.lengths, self.random_seed)
        if self.plain + sum(choice is not None for choice in chosen) != 1:
            raise ValueError(f"exactly one choice must be set, got {self}")

    def describe(self) -> str:
        """For logs and ``/server_info``."""
        if self.plain:
            return "plain"
        if self.ratio is not None:
            return f"ratio {self.ratio:g}"
        if self.lengths is not None:
            return f"lengths {list(self.lengths)}"
        return f"random lengths, seed {self.random_seed}"

    def drafted(self, bs: int, step: int) -> torch.Tensor:
        """Places of the requests to draft for: int64 [n] on the host, ascending.

        Random lengths come with random modes: some steps draft for none, some for a few.
        """
        if self.plain:
            return torch.arange(0)
        if self.random_seed is not None:
            generator = self._generator(step, of=1)
            mode = torch.rand(1, generator=generator).item()
            chosen = torch.rand(bs, generator=generator) < 0.5
            if mode < 0.5:
                return torch.nonzero(chosen).view(-1) if mode < 0.3 else torch.arange(0)
        return torch.arange(bs)

    def draft_block_size(self, sizes: tuple[int, ...], step: int) -> int:
        """One of the block sizes (ascending) that can be drafted; at random for random lengths,
        else the largest."""
        if self.random_seed is None:
            return sizes[-1]
        place = torch.randint(len(sizes), (1,), generator=self._generator(step, of=3)).item()
        return sizes[int(place)]

    def num_passes(self, most: int, num_drafted: int, step: int) -> int:
        """Forwards of a step: 1 where it drafts, else as many as may be, up to that for random
        lengths."""
        if num_drafted or most == 1:
            return 1
        if self.random_seed is None:
            return most
        return int(torch.randint(1, most + 1, (1,), generator=self._generator(step, of=4)).item())

    def stages(self, depth: int, step: int) -> Stages:
        """How deep the head goes; at random for random lengths, whole blocks otherwise."""
        if self.random_seed is None:
            return WholeBlock(depth)
        return _RandomStages(depth, self._generator(step, of=2))

    def _generator(self, step: int, of: int) -> torch.Generator:
        assert self.random_seed is not None
        return torch.Generator().manual_seed(self.random_seed * 1_000_003 + 5 * step + of)

    def verify_lens(
        self,
        ranked: RankedDrafts,
        block_size: int,
        step: int,
        drafted: npt.NDArray[np.int64],
        depth: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Verify lengths int32 [bs] of decode step ``step`` (counted by the caller).

        Fixed and random lengths are made on the host and copied to the device; a request that
        was not drafted for has its anchor verified.

        Args:
            drafted, depth: int64 [n], places that were drafted for and drafts computed there.
        """
        bs, device = ranked.bs, ranked.request.device
        if self.ratio is not None:
            return ranked.verify_lens(num_kept_at_ratio(self.ratio, bs, block_size))
        lens = torch.ones(bs, dtype=torch.int32)
        at, most = torch.from_numpy(drafted), 1 + torch.from_numpy(depth).int()
        if self.lengths is not None:
            cycled = [self.lengths[i % len(self.lengths)] for i in range(bs)]
            lens[at] = torch.tensor(cycled, dtype=torch.int32)[at].minimum(most)
        elif self.random_seed is not None:
            generator = self._generator(step, of=0)
            drawn = torch.randint(1, block_size + 1, (bs,), generator=generator, dtype=torch.int32)
            lens[at] = drawn[at].minimum(most)
        return lens.to(device)


class _RandomStages:
    """Up to three stages at random depths, each for a random part of the requests."""

    def __init__(self, depth: int, generator: torch.Generator) -> None:
        self._generator = generator
        draws = torch.randint(1, depth + 1, (3,), generator=generator).tolist()
        self._boundaries = sorted(set(draws))

    def next(
        self, survival: npt.NDArray[np.float32], places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], int]:
        lo = survival.shape[1]
        ahead = [depth for depth in self._boundaries if depth > lo]
        chosen = torch.rand(len(places), generator=self._generator).numpy() < 0.7
        if not ahead:
            return np.zeros(len(places), dtype=bool), lo
        return (chosen if lo else np.ones(len(places), dtype=bool)), ahead[0]


def apply_knob(
    current: Forced | None, name: str, value: int | float, block_size: int
) -> Forced | None:
    """The forced choice after setting knob ``name`` to ``value``; None: the selector chooses.

    Raises:
        ValueError: an unknown knob or a value outside its range, with the range.
    """
    if name not in KNOBS:
        raise ValueError(f"unknown knob {name!r}; known: {', '.join(KNOBS[:4])}, ...")
    if name == "dcut_force_plain":
        if value not in (0, 1):
            raise ValueError(f"{name} must be 1 (force plain steps) or 0 (off), got {value}")
        return Forced(plain=True) if value else None
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    if value == -1:
        return None
    if name == "dcut_force_ratio":
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in 0..1, or -1 for off, got {value}")
        return Forced(ratio=float(value))
    if name == "dcut_force_random":
        if value != int(value) or not 0 <= value < MAX_SEED:
            raise ValueError(
                f"{name} must be an integer seed in 0..{MAX_SEED - 1}, or -1 for off, got {value}"
            )
        return Forced(random_seed=int(value))
    index = int(name.rsplit("_", 1)[1])
    if value != int(value) or not 1 <= value <= block_size:
        raise ValueError(f"{name} must be an integer in 1..{block_size}, got {value}")
    known = current.lengths if current and current.lengths and index > 0 else ()
    lengths = [*known, *(1 for _ in range(index + 1 - len(known)))]
    lengths[index] = int(value)
    return Forced(lengths=tuple(lengths))
