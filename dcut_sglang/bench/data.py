"""What the requests ask: the drafter's held-out prompts, or a local copy of a public data set."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dcut_sglang.bench.arms import ModelPair
from dcut_sglang.bench.held_out import GROUPS, RESPONSES, held_out_prompts, of_group
from dcut_sglang.bench.server import REPO_ROOT
from dcut_sglang.bench.waves import Prompt

TINY_PROMPTS = REPO_ROOT / "models" / "tiny" / "prompts.json"
_TINY_KINDS = {"easy": ("records", "story", "code"), "hard": ("mixed", "noise")}


class DataError(ValueError):
    """A data set that cannot be used, with what was expected."""


@dataclass(frozen=True)
class DataSet:
    """Prompts as token ids in the model's chat template.

    Attributes:
        name: ``easy``, ``hard``, ``mixed``, or the file's name without its ending.
        sha256: of the file it came from, 16 digits.
    """

    name: str
    prompts: tuple[Prompt, ...]
    sha256: str

    def requests(self, count: int, seed: int) -> list[Prompt]:
        """``count`` prompts in an order that the seed decides, each once before any again."""
        order = list(self.prompts)
        random.Random(seed).shuffle(order)
        return [order[i % len(order)] for i in range(count)]


def load_data(name: str, pair: ModelPair) -> DataSet:
    """The held-out prompts of one group, or a file.

    Args:
        name: one of ``GROUPS``, or the path of a JSON or JSONL file; see ``read_prompts``.

    Raises:
        DataError: neither, or a file whose records hold no prompt.
    """
    if name not in GROUPS:
        path = Path(name).expanduser()
        prompts = tuple(
            Prompt(path.stem, ids=chat_ids(pair.target, text)) for text in read_prompts(path)
        )
        return DataSet(path.stem, prompts, _hash(path))
    if pair.name == "tiny":
        entries = json.loads(TINY_PROMPTS.read_text())
        kinds = _TINY_KINDS.get(name)
        prompts = tuple(
            Prompt(entry["kind"], ids=chat_ids(pair.target, entry["prompt"]))
            for entry in entries
            if kinds is None or entry["kind"] in kinds
        )
        return DataSet(name, prompts, _hash(TINY_PROMPTS))
    return DataSet(name, tuple(of_group(held_out_prompts(), name)), _hash(RESPONSES))


@cache
def _tokenizer(target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def chat_ids(target: Path, text: str) -> tuple[int, ...]:
    """Token ids of one user message in the model's chat template."""
    encoded = _tokenizer(target).apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
    )
    return tuple(int(i) for i in encoded["input_ids"])


def text_of(target: Path, ids: Sequence[int]) -> str:
    """The text that a server tokenizes to these ids, special tokens and all; without the one at
    the beginning that tokenizers of some models add by themselves."""
    tokenizer = _tokenizer(target)
    adds_first = tokenizer.encode("")[:1] == [ids[0]]
    text: str = tokenizer.decode(
        list(ids[1:] if adds_first else ids),
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return text


def _first_turn(turns: Any) -> Any:
    """The first message of a conversation that is the user's."""
    if isinstance(turns, str):
        return turns
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, str):
            return turn
        if isinstance(turn, dict) and turn.get("from", turn.get("role")) in ("human", "user"):
            return turn.get("value", turn.get("content"))
    return None


# Where a record keeps its prompt: the first of these fields that it has.
FIELDS: dict[str, Callable[[Any], Any]] = {
    "conversations": _first_turn,  # ShareGPT
    "messages": _first_turn,  # chat requests
    "turns": _first_turn,  # MT-Bench
    "question": _first_turn,  # GSM8K
    "problem": _first_turn,  # MATH-500
    "prompt": _first_turn,  # HumanEval, MBPP (sanitized)
    "text": _first_turn,  # MBPP
}


def read_prompts(path: Path) -> list[str]:
    """The prompts of a local file: GSM8K, MATH-500, HumanEval, MBPP, MT-Bench, ShareGPT or alike.

    Conversations give their first user turn. Records of one file may differ.

    Args:
        path: a JSON list of objects, or one object per line.

    Raises:
        DataError: no such file, not JSON, or a record without a prompt.
    """
    if not path.is_file():
        raise DataError(
            f"--data takes {', '.join(GROUPS)} or the path of a JSON or JSONL file; "
            f"there is no file {path}"
        )
    prompts = []
    for number, record in enumerate(_records(path), start=1):
        names = [name for name in FIELDS if isinstance(record, dict) and name in record]
        text = FIELDS[names[0]](record[names[0]]) if names else None
        if not isinstance(text, str) or not text.strip():
            found = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f"{path}, record {number}: no prompt found; expected one of the fields "
                f"{', '.join(FIELDS)}, holding a text or a conversation with a user's turn; "
                f"got {found}"
            )
        prompts.append(text)
    if not prompts:
        raise DataError(f"{path} holds no records")
    return prompts


def _records(path: Path) -> list[Any]:
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text file in UTF-8: {error}") from error
    try:
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError:
        pass
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path} is neither a JSON list nor JSON lines: line {number}: {error}"
                ) from error
    return records


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
