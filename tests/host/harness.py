"""Helpers of the real-server tests: prompts, requests in parallel, comparison of token ids."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dcut_sglang.bench.server import REPO_ROOT, Server
from dcut_sglang.trace import Trace, read_trace

TARGET = REPO_ROOT / "models" / "tiny" / "target"
DRAFTER = REPO_ROOT / "models" / "tiny" / "drafter"
BLOCK_SIZE = 16
# The small context makes requests reach it in the middle of a block; both memory checks on.
COMMON_ARGS = (
    *("--dtype", "float32", "--context-length", "192", "--max-running-requests", "16"),
    *("--max-total-tokens", "8192", "--enable-custom-logit-processor"),
)
# SGLang honours seeds only with this; it moves no logit on a CPU.
SEEDS = ("--enable-deterministic-inference",)
SETTINGS = {"probe_budget_s": 4, "cost_cache_dir": ""}
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
SPECULATE = (
    *("--speculative-algorithm", "DCUT"),
    *("--speculative-draft-model-path", str(DRAFTER)),
)
# Two float32 logits this close may change order between two batch shapes.
TIE_MARGIN = 1e-4


@dataclass(frozen=True)
class Case:
    """One request: a prompt and how many tokens to ask for."""

    prompt: str
    max_new_tokens: int
    ignore_eos: bool = False

    def body(self) -> dict[str, Any]:
        return {
            "text": self.prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": self.max_new_tokens,
                "ignore_eos": self.ignore_eos,
            },
        }


@cache
def prompts() -> tuple[str, ...]:
    """The held-out prompts of the tiny pair, kinds interleaved."""
    by_kind: dict[str, list[str]] = {}
    for entry in json.loads((REPO_ROOT / "models" / "tiny" / "prompts.json").read_text()):
        by_kind.setdefault(entry["kind"], []).append(entry["prompt"])
    longest = max(map(len, by_kind.values()))
    return tuple(p for i in range(longest) for k in sorted(by_kind) for p in by_kind[k][i : i + 1])


def run(server: Server, cases: list[Case], concurrency: int) -> list[dict[str, Any]]:
    """Answers in order; at most ``concurrency`` requests at a time."""

    def one(case: Case) -> dict[str, Any]:
        answer = server.generate(**case.body())
        assert answer.status_code == 200, answer.text
        return answer.json()

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, cases))


def recorded(
    server: Server, path: Path, knobs: dict[str, float], cases: list[Case], concurrency: int
) -> Trace:
    """The steps, of the trace that a server writes, of one load under forced knobs."""
    before = len(read_trace(path).steps)
    server.set_state(**knobs, dcut_reset_metrics=1)
    run(server, cases, concurrency)
    trace = read_trace(path)
    return replace(trace, steps=trace.steps[before:])


def ids_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@cache
def _target() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return (
        AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32),
        AutoTokenizer.from_pretrained(TARGET),
    )


@torch.inference_mode()
def margin(case: Case, ids: list[int], position: int, other: int) -> float:
    """Difference of the target's logits for ``ids[position]`` and ``other`` at that position."""
    model, tokenizer = _target()
    prompt_ids = tokenizer(case.prompt)["input_ids"]
    logits = model(torch.tensor([prompt_ids + ids[:position]])).logits[0, -1]
    return float((logits[ids[position]] - logits[other]).abs())


def assert_same_ids(
    cases: list[Case], expected: list[list[int]], found: list[list[int]]
) -> list[float]:
    """Every request's ids are equal, or first differ where two logits tie numerically.

    Returns:
        the margins of the ties that were met.
    """
    ties = []
    for case, want, got in zip(cases, expected, found, strict=True):
        if want == got:
            continue
        first = next(
            (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b),
            min(len(want), len(got)),
        )
        assert first < min(len(want), len(got)), (
            f"{case}: lengths {len(want)} and {len(got)}, equal up to {first}"
        )
        gap = margin(case, want, first, got[first])
        assert gap <= TIE_MARGIN, (
            f"{case}: token {first} is {got[first]}, expected {want[first]}, logit margin {gap:.2e}"
        )
        print(f"tie at token {first} of {case.prompt[:30]!r}: margin {gap:.2e}")
        ties.append(gap)
    return ties
