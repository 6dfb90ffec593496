"""Synthetic text whose difficulty differs between requests and along a line.

A small fixed world (word lists, a colour for each item, one long syllable cycle) is shared by all
seeds; a seed only decides which documents are drawn from it. A document is a prompt and the text
that follows it. Prompts of the two splits never coincide: a hash of the prompt decides the split.

Easy for a drafter: `records`, `code`. Easy with a hard spot per line: `table`, `log`. Between:
`count`. Alternating: `mixed`. Open (several continuations are likely, but a greedy target settles
on one): `story`. Hard: `noise`, where the next syllable is a function of the two before it, so
that a target which knows the function is certain, while a drafter that must name fifteen at once
would have to apply it fifteen times.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

KINDS = ("records", "count", "table", "code", "log", "mixed", "story", "noise")
SPLITS = ("train", "heldout")

NAMES = ("ann", "bob", "carl", "dora", "emil", "fay", "gus", "hana", "ivan", "june")
ROLES = ("admin", "guest", "owner", "clerk")
ZONES = ("north", "south", "east", "west")
ITEMS = (
    *("apple", "bread", "candle", "drum", "engine", "flute", "glove", "hammer"),
    *("inkpot", "jacket", "kettle", "lamp", "mirror", "needle", "orange", "pencil"),
)
COLORS = ("red", "blue", "green", "black")
PAGES = ("home", "cart", "help", "news", "shop", "user")
ADJECTIVES = ("old", "small", "quiet", "clever")
ANIMALS = ("cat", "dog", "fox", "owl", "hen", "crow")
VERBS = ("sees", "meets", "follows", "likes")
SYLLABLES = tuple(c + v for c in "bdfgklmnprst" for v in "ao")


def _random_cycle(num_symbols: int, seed: int) -> tuple[int, ...]:
    """Returns symbols of a cycle in which each ordered pair occurs exactly once.

    It is an Eulerian circuit of the complete directed graph with loops (Hierholzer's method, edges
    in random order): two symbols determine the next one, and the cycle does not repeat before
    num_symbols ** 2 symbols, so a greedy target cannot fall into a short loop.
    """
    rng = random.Random(seed)
    edges = [rng.sample(range(num_symbols), num_symbols) for _ in range(num_symbols)]
    stack, cycle = [0], []
    while stack:
        if edges[stack[-1]]:
            stack.append(edges[stack[-1]].pop())
        else:
            cycle.append(stack.pop())
    return tuple(reversed(cycle[1:]))


NOISE_CYCLE = _random_cycle(len(SYLLABLES), seed=1)
COLOR_OF_ITEM = {item: COLORS[(7 * i + i // 4) % len(COLORS)] for i, item in enumerate(ITEMS)}


@dataclass(frozen=True)
class Document:
    """A prompt and the text that follows it; `ends` says whether an end-of-text token follows."""

    kind: str
    prompt: str
    text: str
    ends: bool


class _Noise:
    """A walk along NOISE_CYCLE from a random place."""

    def __init__(self, rng: random.Random) -> None:
        self._index = rng.randrange(len(NOISE_CYCLE))

    def take(self, num_syllables: int) -> str:
        """Returns the next syllables, joined by blanks."""
        first, self._index = self._index, self._index + num_syllables
        cycle = (NOISE_CYCLE[i % len(NOISE_CYCLE)] for i in range(first, self._index))
        return " ".join(SYLLABLES[symbol] for symbol in cycle)


def _split_lines(kind: str, head: str, lines: list[str], shown: int, ends: bool) -> Document:
    return Document(kind, head + "".join(lines[:shown]), "".join(lines[shown:]), ends)


def _records(rng: random.Random, num_lines: int) -> Document:
    first, turn = rng.randrange(100), rng.randrange(len(NAMES))
    role, zone = rng.choice(ROLES), rng.choice(ZONES)
    lines = [
        f"record {(first + i) % 100:02d} : name={NAMES[(turn + i) % len(NAMES)]} "
        f"role={role} zone={zone} state=ok ;\n"
        for i in range(num_lines)
    ]
    return _split_lines("records", f"records of {zone}\n", lines, rng.randint(1, 3), False)


def _count(rng: random.Random, num_lines: int) -> Document:
    first = rng.randrange(80)
    last = min(first + rng.randint(16, 50), 99)
    numbers = [f" {i:02d}" for i in range(first, last + 1)] + [" done"]
    return _split_lines("count", f"count {first:02d} to {last:02d} :", numbers, 1, True)


def _table(rng: random.Random, num_lines: int) -> Document:
    first, quantity = rng.randrange(len(ITEMS) - 7), rng.randrange(60)
    noise = _Noise(rng)
    rows = [
        f"{item} | {COLOR_OF_ITEM[item]} | {quantity + i:02d} | {noise.take(2)} |\n"
        for i, item in enumerate(ITEMS[first:])
    ]
    return _split_lines(
        "table", "item | color | number | tag |\n", [*rows, "total\n"], rng.randint(1, 3), True
    )


def _code(rng: random.Random, num_lines: int) -> Document:
    fields = rng.sample(ITEMS, rng.randint(3, 5))
    methods = [
        f"def get_{field}(self):\n    return self.{field}\n\n"
        f"def set_{field}(self, value):\n    self.{field} = value\n\n"
        for field in fields
    ]
    head = f"# fields : {' '.join(fields)}\n\n"
    return _split_lines("code", head, [*methods, "# end\n"], rng.randint(0, 1), True)


def _log(rng: random.Random, num_lines: int) -> Document:
    first, turn, noise = rng.randrange(100), rng.randrange(len(PAGES)), _Noise(rng)
    lines = [
        f"{(first + i) % 100:02d} GET /{PAGES[(turn + i) % len(PAGES)]} 200 id {noise.take(2)} ok\n"
        for i in range(num_lines)
    ]
    return _split_lines("log", "", lines, rng.randint(2, 4), False)


def _mixed(rng: random.Random, num_lines: int) -> Document:
    first, noise = rng.randrange(100), _Noise(rng)
    role, zone = rng.choice(ROLES), rng.choice(ZONES)
    lines = [
        f"part {(first + i) % 100:02d} : role={role} zone={zone} state=ok ;\n"
        f"data {noise.take(10)} ;\n"
        for i in range(num_lines)
    ]
    return _split_lines("mixed", f"mixed of {zone}\n", lines, 1, False)


def _story(rng: random.Random, num_lines: int) -> Document:
    def pick(words: tuple[str, ...]) -> str:
        # Halving weights: a favourite exists, yet sampling has real alternatives.
        return rng.choices(words, [2.0**-i for i in range(len(words))])[0]

    hero = rng.choice(ANIMALS)
    others = tuple(animal for animal in ANIMALS if animal != hero)
    sentences = [
        f"the {rng.choice(ADJECTIVES)} {hero} {pick(VERBS)} "
        f"the {pick(ADJECTIVES)} {pick(others)} .\n"
        for _ in range(rng.randint(5, 10))
    ]
    return _split_lines("story", f"story of the {hero}\n", sentences, 1, True)


def _noise(rng: random.Random, num_lines: int) -> Document:
    noise = _Noise(rng)
    return Document("noise", f"noise : {noise.take(4)}", f" {noise.take(16 * num_lines)}", False)


_MAKERS: dict[str, Callable[[random.Random, int], Document]] = {
    "records": _records,
    "count": _count,
    "table": _table,
    "code": _code,
    "log": _log,
    "mixed": _mixed,
    "story": _story,
    "noise": _noise,
}


def split_of(prompt: str) -> str:
    """Returns the split to which this prompt belongs; one in eight is held out."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return SPLITS[digest[0] % 8 == 0]


def documents(
    seed: int, split: str, weights: dict[str, float] | None = None, num_lines: int = 24
) -> Iterator[Document]:
    """Yields an endless, reproducible stream of documents of one split.

    `weights` maps a kind to its relative frequency (all kinds equally often by default).
    `num_lines` is the length of the kinds that do not end by themselves.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {SPLITS}")
    weights = weights or dict.fromkeys(KINDS, 1.0)
    if unknown := sorted(set(weights) - set(KINDS)):
        raise ValueError(f"unknown kinds {unknown}; expected some of {KINDS}")
    rng = random.Random(f"{seed}/{split}")
    kinds, shares = list(weights), list(weights.values())
    while True:
        document = _MAKERS[rng.choices(kinds, shares)[0]](rng, num_lines)
        if split_of(document.prompt) == split:
            yield document
