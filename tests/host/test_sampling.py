"""What the server samples has the target's own probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import _target, prompts
from toy_target import filtered

from dcut_sglang.bench.server import Server

# The second and third token come from verified blocks.
LENGTH = 3
REQUESTS = 1000  # of each kind
KINDS: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 2.0},
    "filtered": {"temperature": 2.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}
# Each costs a minute: the ratios are compared on the toy target (test_draw, test_distribution).
CHOICES: dict[str, dict[str, float]] = {"random lengths": {"dcut_force_random": 9}}
LEVEL = 1e-4 / (len(KINDS) * len(CHOICES))


@torch.inference_mode()
def row_of_target(kind: dict[str, Any]) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """The target's probabilities behind the prompt and some tokens, computed once for each."""
    model, tokenizer = _target()
    prompt = tokenizer(prompts()[2])["input_ids"]
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def row(text: tuple[int, ...]) -> torch.Tensor:
        if text not in known:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1]
            known[text] = filtered(logits, **{"top_k": logits.numel(), **kind})
        return known[text]

    return row


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_texts_have_the_targets_probabilities(dcut: Server, choice: dict[str, float]) -> None:
    dcut.set_state(**choice, dcut_reset_metrics=1)
    body = {
        "text": [prompts()[2]] * (REQUESTS * len(KINDS)),
        "sampling_params": [
            {**kind, "max_new_tokens": LENGTH, "ignore_eos": True}
            for _ in range(REQUESTS)
            for kind in KINDS.values()
        ],
    }
    answers = dcut.generate(**body).json()
    assert dcut.dcut()["drafts_accepted"] > 50
    for k, (name, kind) in enumerate(KINDS.items()):
        texts = [tuple(a["output_ids"]) for a in answers[k :: len(KINDS)]]
        row = row_of_target(kind)
        # Probabilities of the texts' beginnings: those that are expected five times get a bin.
        frontier = {(): 1.0}
        bins: dict[tuple[int, ...], float] = {}
        for _ in range(LENGTH):
            longer = {
                (*text, int(t)): p * float(row(text)[t])
                for text, p in frontier.items()
                for t in (row(text) * p * REQUESTS >= 5).nonzero()
            }
            for text, p in frontier.items():
                inside = sum(q for other, q in longer.items() if other[:-1] == text)
                bins[text] = p - inside
            frontier = longer
        bins.update(frontier)
        counts = Counter(
            next(text[:n] for n in range(LENGTH, -1, -1) if text[:n] in bins) for text in texts
        )
        for text in set(texts):
            probability = math.prod(float(row(text[:n])[text[n]]) for n in range(LENGTH))
            assert probability > 0, (name, text)
        kept = [text for text, p in bins.items() if p * REQUESTS >= 5]
        rest = (
            sum(counts[t] for t in bins if t not in kept),
            sum(p for t, p in bins.items() if t not in kept) * REQUESTS,
        )
        pairs = [(counts[t], bins[t] * REQUESTS) for t in kept] + [rest]
        statistic = sum((c - e) ** 2 / e for c, e in pairs if e > 1e-9)
        freedom = torch.tensor((len(pairs) - 1) / 2).double()
        tail = float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double()))
        print(f"{name}: {len(pairs)} bins, chi-square {statistic:.1f}, tail {tail:.3f}")
        assert len(pairs) > 8 and tail > LEVEL, (name, tail)
