"""The held-out prompts of a shipped drafter, as token ids, by how well the drafter knows them."""

from __future__ import annotations

from pathlib import Path

from dcut_sglang.bench.server import REPO_ROOT
from dcut_sglang.bench.waves import Prompt
from dcut_sglang.training.store import Texts

RESPONSES = REPO_ROOT / "models" / "smollm2-135m-dflash" / "training" / "responses.npz"
# Kinds that the drafter predicts well, and those it does not: free text, and all that lies
# outside of its training templates.
EASY_KINDS = ("c program", "json", "class", "java class")
HARD_KINDS = ("chat", "about", "explain", "note", "domain")
GROUPS = ("easy", "hard", "mixed")


def held_out_prompts(path: Path = RESPONSES) -> list[Prompt]:
    """Prompts of the splits that no drafter was trained on, kinds interleaved.

    Raises:
        OSError, ValueError: the file is missing or not a training run's texts.
    """
    texts = Texts.load(path)
    by_kind: dict[str, list[Prompt]] = {}
    columns = (texts.split, texts.kind, texts.token_ids, texts.num_prompt_tokens)
    for split, kind, ids, length in zip(*columns, strict=True):
        if split != "train":
            prompt = Prompt(kind, ids=tuple(int(i) for i in ids[:length]))
            by_kind.setdefault(kind, []).append(prompt)
    longest = max(map(len, by_kind.values()))
    return [p for i in range(longest) for k in sorted(by_kind) for p in by_kind[k][i : i + 1]]


def of_group(prompts: list[Prompt], group: str) -> list[Prompt]:
    """The easy, the hard or all of the prompts."""
    kinds = {"easy": EASY_KINDS, "hard": HARD_KINDS, "mixed": None}[group]
    return [p for p in prompts if kinds is None or p.kind in kinds]
