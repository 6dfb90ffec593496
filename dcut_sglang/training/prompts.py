"""The fixed prompt set: templates whose slots are filled by a seed, in four splits.

`train` is what a drafter learns from. Held out are `prompt` (other fillings of the same slots),
`topic` (words that no training prompt contains) and `domain` (kinds that are not trained on). A
hash of the prompt keeps `train` and `prompt` apart for every seed. Words and prompts of the demo
are topics, so no drafter trained on this set has seen them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from dcut_sglang.training.prompt_words import OUTSIDE, TOPIC_WORDS, TRAIN_WORDS, Words

SPLITS = ("train", "prompt", "topic", "domain")
# How frequent each kind is among the training prompts. Open text is learnt slowest: half of all.
SHARES = {
    "class": 14,
    "json": 10,
    "sql": 13,
    "create table": 10,
    "function": 14,
    "c program": 7,
    "java class": 6,
    "struct": 5,
    "xml": 4,
    "table": 4,
    "note": 4,
    "chat": 12,
    "about": 30,
    "explain": 60,
}
KINDS = tuple(SHARES)
OPEN_KINDS = ("note", "chat", "about", "explain")
CODE_KINDS = tuple(kind for kind in KINDS if kind not in OPEN_KINDS)
NUM_TRAIN = 20000
NUM_PER_KIND = {"prompt": 10, "topic": 4}


@dataclass(frozen=True)
class Prompt:
    """One user message."""

    kind: str
    split: str
    text: str


_SHORT_QUESTIONS = (
    "What is {}?",
    "Explain what {} is in simple terms.",
    "List five facts about {}.",
    "Why is {} important?",
    "Write a short introduction to {}.",
)
_LONG_QUESTIONS = (
    "Tell me about {}.",
    "Describe {} in a few sentences.",
    "What is the history of {}?",
    "How does {} affect our lives?",
    "Write a paragraph about {}.",
    "Explain {} to a child.",
    "What should everyone know about {}?",
    "Summarize what is known about {}.",
    "Give an overview of {}.",
    "What are the benefits of {}?",
    "Name three interesting things about {}.",
    "Write a short article about {}.",
)
_QUESTIONS = _SHORT_QUESTIONS + _LONG_QUESTIONS


def _three(rng: random.Random, words: Words) -> str:
    first, second, third = rng.sample(words.attributes, 3)
    return f"{first}, {second} and {third}"


def _class(rng: random.Random, words: Words) -> str:
    return (
        f"Write a Python class {rng.choice(words.things)} with the attributes {_three(rng, words)}."
    )


def _java_class(rng: random.Random, words: Words) -> str:
    return (
        f"Write a Java class {rng.choice(words.things)} with the attributes {_three(rng, words)}."
    )


def _struct(rng: random.Random, words: Words) -> str:
    thing = rng.choice(words.things).lower()
    return f"Write a C struct for a {thing} with the fields {_three(rng, words)}."


def _person(rng: random.Random, words: Words) -> str:
    name, city = rng.choice(words.names), rng.choice(words.cities)
    return f"for a person with the name {name}, the age {rng.randint(18, 80)} and the city {city}."


def _json(rng: random.Random, words: Words) -> str:
    if rng.random() < 0.7:
        return f"Write a JSON object {_person(rng, words)}"
    thing, color = rng.choice(words.things).lower(), rng.choice(("red", "blue", "green", "black"))
    return (
        f"Write a JSON object for a product with the name {thing}, "
        f"the price {rng.randint(2, 200)} and the color {color}."
    )


def _xml(rng: random.Random, words: Words) -> str:
    return f"Write an XML document {_person(rng, words)}"


def _c_program(rng: random.Random, words: Words) -> str:
    if rng.random() < 0.6:
        return f'Write a C program that prints "Hello, {_full_name(rng, words)}!".'
    verb = rng.choice(("adds", "multiplies", "subtracts"))
    first, second = rng.randint(2, 99), rng.randint(2, 99)
    return f"Write a C program that {verb} {first} and {second} and prints the result."


def _full_name(rng: random.Random, words: Words) -> str:
    return f"{rng.choice(words.names)} {rng.choice(words.cities)}"


def _sql(rng: random.Random, words: Words) -> str:
    table, value = rng.choice(words.things).lower() + "s", rng.randint(1, 200)
    relation = rng.choice(("greater than", "less than", "equal to"))
    first, second, third = rng.sample(words.attributes, 3)
    return (
        f"Write an SQL query that selects {first} and {second} from the table {table} "
        f"where {third} is {relation} {value}."
    )


def _create_table(rng: random.Random, words: Words) -> str:
    table = rng.choice(words.things).lower() + "s"
    first, second = rng.sample(words.attributes, 2)
    return (
        f"Write an SQL statement that creates a table {table} "
        f"with the columns id, {first} and {second}."
    )


def _table(rng: random.Random, words: Words) -> str:
    return f"Write a markdown table with the columns {_three(rng, words)} and three rows."


def _function(rng: random.Random, words: Words) -> str:
    language = rng.choice(("Python", "JavaScript", "Java", "C", "C++"))
    task = rng.choice(words.tasks).format(n=rng.randint(2, 30))
    return f"Write a {language} function that {task}."


def _note(rng: random.Random, words: Words) -> str:
    name, thing = rng.choice(words.names), rng.choice(words.things).lower()
    form = rng.choice(
        (
            "Write a thank you note to {name} for the {thing}.",
            "Write a short email that invites {name} to a meeting about the {thing}.",
            "Write a polite email to {name} that confirms the order of a {thing}.",
        )
    )
    return form.format(name=name, thing=thing)


def _chat(rng: random.Random, words: Words) -> str:
    if rng.random() < 0.35:
        form = rng.choice(("Give me three tips for {}.", "What are the steps for {}?"))
        return form.format(rng.choice(words.activities))
    return rng.choice(_SHORT_QUESTIONS).format(rng.choice(words.subjects))


def _about(rng: random.Random, words: Words) -> str:
    return rng.choice(_LONG_QUESTIONS).format(rng.choice(words.subjects))


def _explain(rng: random.Random, words: Words) -> str:
    return rng.choice(_QUESTIONS).format(rng.choice(words.more_subjects or words.subjects))


_MAKERS: dict[str, Callable[[random.Random, Words], str]] = {
    "class": _class,
    "json": _json,
    "sql": _sql,
    "create table": _create_table,
    "function": _function,
    "c program": _c_program,
    "java class": _java_class,
    "struct": _struct,
    "xml": _xml,
    "table": _table,
    "note": _note,
    "chat": _chat,
    "about": _about,
    "explain": _explain,
}


def is_held_out(text: str) -> bool:
    """Whether the prompt's hash reserves it for the split `prompt`; one in eight."""
    return hashlib.sha256(text.encode()).digest()[0] % 8 == 0


def _fillings(kind: str, rng: random.Random, words: Words) -> Iterator[str]:
    """Yields different prompts of one kind; ends when new ones have become rare."""
    seen: set[str] = set()
    misses = 0
    while misses < 2000:
        text = _MAKERS[kind](rng, words)
        misses += 1
        if text not in seen:
            seen.add(text)
            misses = 0
            yield text


def prompt_set(
    seed: int = 0,
    num_train: int = NUM_TRAIN,
    exclude: Collection[str] = (),
    seen: Collection[str] = (),
) -> list[Prompt]:
    """Returns all splits, held-out prompts first; the same for the same arguments anywhere.

    Kinds are interleaved according to SHARES, so that any first part of the training prompts is as
    varied as the whole (a kind that runs out of prompts leaves room to the others). `exclude`:
    texts that must not appear anywhere. `seen`: texts that must not be held out, because the
    checkpoint that training starts from knows them.
    """
    banned = set(exclude)
    known = set(seen)
    chosen: list[Prompt] = []
    for split, count in NUM_PER_KIND.items():
        words = TOPIC_WORDS if split == "topic" else TRAIN_WORDS
        for kind in KINDS:
            texts = (
                text
                for text in _fillings(kind, random.Random(f"{seed}/{split}/{kind}"), words)
                if text not in banned
                and text not in known
                and (split == "topic" or is_held_out(text))
            )
            # Tables have no topic words: their hashes keep both held-out splits from training.
            new = [t for t, _ in zip(texts, range(count), strict=False)]
            banned |= set(new)
            chosen += [Prompt(kind, split, text) for text in new]
    chosen += [Prompt("domain", "domain", text) for text in OUTSIDE if text not in banned | known]
    rng = random.Random(f"{seed}/train")
    streams = {
        kind: _fillings(kind, random.Random(f"{seed}/train/{kind}"), TRAIN_WORDS) for kind in KINDS
    }
    shares = dict(SHARES)
    train: list[Prompt] = []
    while len(train) < num_train and shares:
        kind = rng.choices(list(shares), list(shares.values()))[0]
        text = next(
            (t for t in streams[kind] if t not in banned and not is_held_out(t)),
            None,
        )
        if text is None:
            del shares[kind]
        else:
            train.append(Prompt(kind, "train", text))
    return chosen + train
