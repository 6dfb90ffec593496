"""What an evaluation of a drafter reports: accept lengths, calibration, and bars to reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcut_sglang.training.drafter import Drafter
from dcut_sglang.training.evaluate import Walk, drafter_proposer, walk
from dcut_sglang.training.ngram import NgramModel, ngram_proposer
from dcut_sglang.training.prompts import CODE_KINDS
from dcut_sglang.training.responses import Response

MIN_CODE = 4.5
MIN_NGRAM_RATIO = 1.2
MIN_CHAT = 1.6
MIN_D8_SHARE = 0.95
SHORT_BLOCK = 8


@dataclass(frozen=True)
class Decile:
    """Pairs (step, k) whose survival, the product of k confidences, falls into one tenth."""

    count: int
    predicted: float
    seen: float


@dataclass(frozen=True)
class Report:
    """Accept lengths are accepted drafts + 1, means over whole steps.

    by_kind, ngram_by_kind: on unseen prompts, by kind; by_split: kind-wise means of the code kinds
    and of the others on each held-out split; reach[k-1]: share of whole steps of the code kinds on
    unseen prompts that accept at least k drafts; d8_share: accept length at D = 8 as a share of
    the mean of min(L, 8) at D = 16; ece: mean distance of predicted and seen survival.
    """

    by_kind: dict[str, float]
    ngram_by_kind: dict[str, float]
    by_split: dict[str, dict[str, float]]
    code: float
    ngram: float
    chat: float
    d8_share: float
    ece: float
    reach: list[float]
    deciles: list[Decile]
    num_steps: int

    @property
    def ok(self) -> bool:
        return (
            self.code >= MIN_CODE
            and self.code >= MIN_NGRAM_RATIO * self.ngram
            and self.chat >= MIN_CHAT
            and self.d8_share >= MIN_D8_SHARE
        )

    def summary(self) -> dict[str, Any]:
        """Returns the one-line result."""
        return {
            "ok": self.ok,
            "code": round(self.code, 3),
            "by_kind": {kind: round(value, 2) for kind, value in self.by_kind.items()},
            "ngram": round(self.ngram, 3),
            "chat": round(self.chat, 3),
            "d8_share": round(self.d8_share, 4),
            "ece": round(self.ece, 4),
        }


def reliability(result: Walk) -> tuple[list[Decile], float]:
    """Compares survival with what was accepted, over whole steps: (deciles, ece)."""
    whole = result.is_whole
    survival = result.confidence[whole].cumprod(1)
    drafts = torch.arange(1, survival.shape[1] + 1)
    seen = (result.accepts[whole, None] >= drafts).float()
    tenth = (survival * 10).long().clamp(max=9)
    deciles = []
    for index in range(10):
        chosen = tenth == index
        count = int(chosen.sum())
        predicted = survival[chosen].mean().item() if count else 0.0
        deciles.append(Decile(count, predicted, seen[chosen].mean().item() if count else 0.0))
    total = sum(decile.count for decile in deciles)
    gaps = sum(decile.count * abs(decile.predicted - decile.seen) for decile in deciles)
    return deciles, gaps / max(total, 1)


def kind_means(result: Walk, kinds: Sequence[str]) -> dict[str, float]:
    """Returns accept length by kind; `kinds` names each request's."""
    return {
        kind: result.accept_length([i for i, k in enumerate(kinds) if k == kind])
        for kind in dict.fromkeys(kinds)
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def split_means(by_kind: dict[str, float]) -> dict[str, float]:
    """Returns the means over the code kinds and over the others, of those that are there."""
    code = [value for kind, value in by_kind.items() if kind in CODE_KINDS]
    other = [value for kind, value in by_kind.items() if kind not in CODE_KINDS]
    return {name: _mean(values) for name, values in (("code", code), ("other", other)) if values}


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    embed: torch.Tensor,
    head: torch.Tensor,
    held_out: Sequence[Response],
    kinds: Sequence[str],
    splits: Sequence[str],
    ngram: NgramModel,
    is_quick: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> Report:
    """Replays the held-out responses with the drafter and with the n-gram model.

    A quick one leaves out what costs most: the other splits, D = 8 and calibration are missing.
    """
    largest = max(drafter.config.block_sizes)

    def replay(split: str, block_size: int, is_lazy: bool = True) -> tuple[Walk, list[str]]:
        rows = [i for i, s in enumerate(splits) if s == split]
        responses = [held_out[i] for i in rows]
        propose = drafter_proposer(drafter, embed, head, responses, block_size, is_lazy)
        return walk(responses, propose, block_size), [kinds[i] for i in rows]

    main, main_kinds = replay("prompt", largest, is_lazy=is_quick)
    log(f"evaluation: accept length {main.accept_length():.3f} at D = {largest}")
    responses = [r for r, split in zip(held_out, splits, strict=True) if split == "prompt"]
    base = walk(responses, ngram_proposer(ngram, responses, largest), largest)
    by_kind, ngram_by_kind = kind_means(main, main_kinds), kind_means(base, main_kinds)
    by_split = {"prompt": split_means(by_kind)}
    d8_share = ece = float("nan")
    deciles: list[Decile] = []
    if not is_quick:
        for split in dict.fromkeys(s for s in splits if s != "prompt"):
            by_split[split] = split_means(kind_means(*replay(split, largest)))
        short, _ = replay("prompt", SHORT_BLOCK)
        log(f"evaluation: accept length {short.accept_length():.3f} at D = {SHORT_BLOCK}")
        capped = (main.accepts[main.is_whole] + 1).clamp(max=SHORT_BLOCK).float().mean().item()
        d8_share = short.accept_length() / capped
        deciles, ece = reliability(main)
    code_rows = torch.tensor([kind in CODE_KINDS for kind in main_kinds])
    code_steps = main.accepts[main.is_whole & code_rows[main.request]]
    return Report(
        by_kind=by_kind,
        ngram_by_kind=ngram_by_kind,
        by_split=by_split,
        code=split_means(by_kind).get("code", float("nan")),
        ngram=split_means(ngram_by_kind).get("code", float("nan")),
        chat=by_kind.get("chat", float("nan")),
        d8_share=d8_share,
        ece=ece,
        reach=[(code_steps >= k).float().mean().item() for k in range(1, largest)],
        deciles=deciles,
        num_steps=len(main.accepts),
    )
