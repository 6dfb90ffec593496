"""Where two answers to the same request differ, and whether a numerical tie explains it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from dcut_sglang.conform.case import Case
from dcut_sglang.conform.client import Answer, Client, Output


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Attributes:
        what: which part of the answer.
        expected: the plain server's.
        found: the DCUT server's.
        output: which of the request's outputs.
        position: index of the first token that differs; None when tokens agree or are unknown.
        margin: difference of the plain server's two largest log-probabilities there.
    """

    what: str
    expected: Any
    found: Any
    output: int = 0
    position: int | None = None
    margin: float | None = None

    def __str__(self) -> str:
        where = f"output {self.output}, " if self.output else ""
        at = "" if self.position is None else f" at token {self.position}"
        tie = "" if self.margin is None else f" (top-2 margin {self.margin:.1e})"
        return f"{where}{self.what}{at}: expected {self.expected!r}, found {self.found!r}{tie}"


def compare(want: Answer, got: Answer, logprob_tolerance: float) -> Difference | None:
    """The first difference between the plain server's answer and DCUT's, or None."""
    if want.status != got.status:
        return Difference("status", want.status, f"{got.status} {got.message}".strip())
    if want.status != 200:
        return None
    if got.broken and not want.broken:
        return Difference("form of the answer", "a well-formed answer", got.broken)
    if len(want.outputs) != len(got.outputs):
        return Difference("number of outputs", len(want.outputs), len(got.outputs))
    for index, (expected, found) in enumerate(zip(want.outputs, got.outputs, strict=True)):
        difference = _compare_outputs(expected, found, logprob_tolerance)
        if difference is not None:
            return replace(difference, output=index)
    return None


def _compare_outputs(want: Output, got: Output, tolerance: float) -> Difference | None:
    if want.ids != got.ids:
        return _first_token(want.ids or [], got.ids or [])
    if want.text != got.text:
        return Difference("text", want.text, got.text, position=_token_of_text(want, got))
    if want.finish != got.finish:
        return Difference("finish reason", want.finish, got.finish)
    if want.counts != got.counts:
        return Difference("token counts", want.counts, got.counts)
    if want.logprobs.keys() != got.logprobs.keys():
        return Difference("log-probability fields", sorted(want.logprobs), sorted(got.logprobs))
    for name, positions in want.logprobs.items():
        for place, (expected, found) in enumerate(zip_longest(positions, got.logprobs[name])):
            if expected is None or found is None or not _same_logprobs(expected, found, tolerance):
                return Difference(f"{name}[{place}]", expected, found)
    return None


def _first_token(want: list[int], got: list[int]) -> Difference:
    for position, (expected, found) in enumerate(zip(want, got, strict=False)):
        if expected != found:
            return Difference("token id", expected, found, position=position)
    return Difference("number of tokens", len(want), len(got))


def _token_of_text(want: Output, got: Output) -> int | None:
    """Index of the first differing token where ids are unknown but token texts are given."""
    tokens = [
        [position[0][1] for position in output.logprobs.get("tokens", [])] for output in (want, got)
    ]
    pairs = zip(*tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def _same_logprobs(
    want: list[tuple[float | None, Any]], got: list[tuple[float | None, Any]], tolerance: float
) -> bool:
    """Equal tokens with nearly equal values; among nearly equal ones, the order and the choice
    of the last may differ."""
    if len(want) != len(got):
        return False
    values = dict((token, value) for value, token in got)
    lowest = min((value for value, _ in got if value is not None), default=0.0)
    for value, token in want:
        found = values.get(token, lowest) if token in values or value is not None else None
        if value is None or found is None:
            if value is not found:
                return False
        elif not abs(value - found) <= tolerance:
            return False
    return True


def with_margin(difference: Difference, case: Case, plain: Client) -> Difference:
    """Add the tie margin of the plain server, asking it again with its two best tokens."""
    if difference.position is None or case.route != "/generate":
        return difference
    body = {**case.body, "stream": False, "return_logprob": True, "top_logprobs_num": 2}
    body.pop("token_ids_logprob", None)
    answer = plain.send(Case(case.name, case.route, body))
    if answer.status != 200:
        return difference
    tops = answer.outputs[difference.output].logprobs.get("output_top_logprobs", [])
    if difference.position >= len(tops):
        return difference
    best, second = (value for value, _ in tops[difference.position])
    assert best is not None and second is not None
    return replace(difference, margin=best - second)
