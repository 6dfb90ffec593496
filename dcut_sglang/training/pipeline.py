"""The first stages of training a drafter: prompts, then the target's responses to them."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcut_sglang.training.files import write_text
from dcut_sglang.training.generate import decode
from dcut_sglang.training.prompts import Prompt
from dcut_sglang.training.responses import Response, responses_of_texts
from dcut_sglang.training.store import ResponseStore, Texts, texts_of
from dcut_sglang.training.target import check_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Log = Callable[[str], None]
_PROGRESS_S = 10.0
_RESTORE_ROWS = 256
# Texts decoded elsewhere differ from this machine's greedy choice by rounding alone.
MIN_OWN_SHARE = 0.98


@dataclass(frozen=True)
class RunSettings:
    """What all stages of one run must agree on; saved in the work folder and with the weights."""

    fingerprint: dict[str, Any]
    seed: int
    num_train: int
    max_new_tokens: int
    target_layer_ids: tuple[int, ...]

    def bind(self, folder: Path) -> None:
        """Saves the settings, or raises ValueError if the folder belongs to other ones."""
        path = folder / "run.json"
        mine = json.loads(json.dumps(asdict(self)))
        if not path.exists():
            write_text(path, json.dumps(mine, indent=1) + "\n")
            return
        theirs = json.loads(path.read_text())
        check_fingerprint(mine["fingerprint"], theirs["fingerprint"], f"the run in {folder}")
        for name in (field.name for field in fields(self) if field.name != "fingerprint"):
            if theirs.get(name) != mine[name]:
                raise ValueError(
                    f"the run in {folder} has {name} = {theirs.get(name)}, got {mine[name]}; "
                    f"keep the setting or choose another work folder"
                )


def fix_prompts(folder: Path, make: Callable[[], list[Prompt]]) -> list[Prompt]:
    """Returns the prompts of this run: those saved by an earlier part of it, or new ones."""
    path = folder / "prompts.json"
    if not path.exists():
        write_text(path, json.dumps([asdict(p) for p in make()], indent=0) + "\n")
    return [Prompt(**entry) for entry in json.loads(path.read_text())]


def generate_responses(
    target: PreTrainedModel,
    prompts: list[list[int]],
    settings: RunSettings,
    store: ResponseStore,
    eos_token_id: int,
    num_rows: int,
    dtype: str,
    deadline_s: float | None,
    log: Log,
) -> None:
    """Decodes every prompt that the store lacks, in order, until done or out of time.

    dtype: in which the target decodes, "float32" or "bfloat16".
    """
    done = store.indices() & set(range(len(prompts)))
    missing = [index for index in range(len(prompts)) if index not in done]
    log(f"responses: {len(done)} of {len(prompts)} on disk")
    if not missing:
        return
    if target.dtype != getattr(torch, dtype):
        target = copy.deepcopy(target).to(getattr(torch, dtype))
    begin = last = time.monotonic()
    num_new = num_tokens = 0
    stream = decode(
        target,
        [prompts[index] for index in missing],
        settings.target_layer_ids,
        settings.max_new_tokens,
        eos_token_id,
        num_rows,
        deadline_s,
    )
    for place, response in stream:
        store.add(missing[place], response)
        num_new += 1
        num_tokens += len(response.token_ids) - response.num_prompt_tokens
        now = time.monotonic()
        if now - last > _PROGRESS_S:
            last = now
            rate = num_tokens / (now - begin)
            left_s = (len(missing) - num_new) * (now - begin) / num_new
            if deadline_s is not None:
                left_s = min(left_s, deadline_s - now)
            log(
                f"responses: {len(done) + num_new} of {len(prompts)}, {num_tokens} new tokens, "
                f"{rate:.0f} tokens/s, {left_s / 60:.1f} min left"
            )
    store.flush()
    log(f"responses: {len(done) + num_new} of {len(prompts)} on disk, {num_tokens} new tokens")


def restore_responses(
    target: PreTrainedModel,
    texts: Texts,
    prompts: list[list[int]],
    settings: RunSettings,
    store: ResponseStore,
    dtype: str,
    log: Log,
) -> None:
    """Computes features for texts of an earlier run, where they answer prompts of this one.

    dtype: of the matrix products, "float32" or "bfloat16".
    """
    wanted = {tuple(prompt): index for index, prompt in enumerate(prompts)}
    for index in store.indices() & set(wanted.values()):
        del wanted[tuple(prompts[index])]
    rows = [
        (wanted[prompt], row)
        for row, (ids, length) in enumerate(
            zip(texts.token_ids, texts.num_prompt_tokens, strict=True)
        )
        if (prompt := tuple(ids[:length])) in wanted
    ]
    for start in range(0, len(rows), _RESTORE_ROWS):
        chunk = rows[start : start + _RESTORE_ROWS]
        responses, share = responses_of_texts(
            target,
            [texts.token_ids[row] for _, row in chunk],
            [texts.num_prompt_tokens[row] for _, row in chunk],
            [texts.ends[row] for _, row in chunk],
            settings.target_layer_ids,
            dtype=dtype,
            log=lambda _: None,
        )
        if share < MIN_OWN_SHARE:
            raise ValueError(
                f"only {share:.1%} of the restored texts' tokens are this target's greedy choice; "
                f"they were made by another target: generate them again"
            )
        for (index, _), response in zip(chunk, responses, strict=True):
            store.add(index, response)
        log(f"restored: {start + len(chunk)} of {len(rows)} responses")
    store.flush()


def collect_texts(store: ResponseStore, prompts: list[Prompt]) -> tuple[list[Response], Texts]:
    """Returns the stored responses in prompt order, and the same without features."""
    found = store.load()
    chosen = [prompts[index] for index in found]
    responses = list(found.values())
    texts = texts_of(responses, [p.kind for p in chosen], [p.split for p in chosen])
    return responses, texts
