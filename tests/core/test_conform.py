"""The conformance suite itself: what it asks, and that it sees every kind of difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dcut_sglang.conform.case import Case, all_cases
from dcut_sglang.conform.client import (
    Answer,
    ConformError,
    Output,
    _generate_stream,
    _openai_stream,
)
from dcut_sglang.conform.compare import compare
from dcut_sglang.conform.run import CHOICES, run_conformance

OUTPUT = Output(
    ids=[5, 6, 7],
    text="abc",
    finish={"type": "length", "length": 3},
    counts={"completion_tokens": 3},
    logprobs={"output_token_logprobs": [[(-0.5, 5)], [(-1.0, 6)], [(-2.0, 7)]]},
)
CASES = (
    Case("one: a", "/generate", {"text": "a", "sampling_params": {}}),
    Case("one: b", "/generate", {"text": "b", "sampling_params": {}}),
)


def test_the_cases_cover_what_is_promised() -> None:
    cases = all_cases()
    assert len(cases) >= 100 and len({case.name for case in cases}) == len(cases)
    groups = {case.group for case in cases}
    assert {"sampling", "grammar", "stops", "streaming", "openai chat"} <= groups
    for case in cases:
        params = case.body.get("sampling_params", case.body)
        greedy = params["temperature"] == 0 or params.get("top_k") == 1
        assert greedy or "sampling_seed" in params or "seed" in params, f"{case.name}: no seed"


@pytest.mark.parametrize(
    ("changed", "phrase"),
    [
        ({"ids": [5, 9, 7]}, "token id at token 1: expected 6, found 9"),
        ({"ids": [5, 6]}, "number of tokens: expected 3, found 2"),
        ({"text": "abd"}, "text"),
        ({"finish": {"type": "stop", "matched": 7}}, "finish reason"),
        ({"counts": {"completion_tokens": 4}}, "token counts"),
        ({"logprobs": {}}, "log-probability fields"),
        (
            {"logprobs": {"output_token_logprobs": [[(-0.5, 5)], [(-1.1, 6)], [(-2.0, 7)]]}},
            "output_token_logprobs[1]",
        ),
        ({"logprobs": {"output_token_logprobs": [[(-0.5, 5)]]}}, "output_token_logprobs[1]"),
    ],
)
def test_each_kind_of_difference_is_named(changed: dict[str, Any], phrase: str) -> None:
    want, got = Answer(200, [OUTPUT]), Answer(200, [replace(OUTPUT, **changed)])
    assert compare(want, want, 1e-3) is None
    assert phrase in str(compare(want, got, 1e-3))


def test_status_and_form_differ_too() -> None:
    want = Answer(200, [OUTPUT])
    assert "500 oops" in str(compare(want, Answer(500, message="oops"), 1e-3))
    assert "takes back" in str(compare(want, replace(want, broken="takes back"), 1e-3))
    assert compare(Answer(400, message="a"), Answer(400, message="b"), 1e-3) is None


def test_top_logprobs_may_change_order_within_the_tolerance() -> None:
    def top(*pairs: tuple[float, int]) -> Answer:
        return Answer(200, [replace(OUTPUT, logprobs={"output_top_logprobs": [list(pairs)]})])

    want = top((-0.5, 1), (-0.7001, 2), (-0.7002, 3))
    assert compare(want, top((-0.5, 1), (-0.7001, 3), (-0.7002, 2)), 1e-3) is None
    assert compare(want, top((-0.5, 1), (-0.7001, 2), (-0.7003, 9)), 1e-3) is None
    assert compare(want, top((-0.5, 1), (-0.6, 2), (-0.7, 3)), 1e-3) is not None
    assert compare(want, top((-0.5, 9), (-0.7001, 2), (-0.7002, 3)), 1e-3) is not None


def test_streams_are_put_together() -> None:
    def event(text: str, finish: Any = None) -> dict[str, Any]:
        meta = {"finish_reason": finish, "prompt_tokens": 1, "completion_tokens": 2}
        return {"text": text, "output_ids": [1], "meta_info": meta}

    whole = _generate_stream([event("a"), event("ab\ufffd"), event("abé", "stop")])
    assert whole.outputs[0].text == "abé" and not whole.broken
    assert "takes back" in _generate_stream([event("abc"), event("ax")]).broken
    assert "no event" in _generate_stream([]).broken

    def delta(content: str, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
        return {"choices": [choice]}

    joined = _openai_stream([delta("x"), delta("y"), delta("", "stop")])
    assert joined.outputs[0].text == "xy" and not joined.broken
    assert "without a finish" in _openai_stream([delta("x")]).broken


class FakeServer:
    """Answers from a function; DCUT when ``knobs`` is a list."""

    url = "http://fake"

    def __init__(self, answer: Callable[[Case, dict[str, float]], Answer], dcut: bool) -> None:
        self.answer, self.is_dcut = answer, dcut
        self.forced: list[dict[str, float]] = []

    def send(self, case: Case) -> Answer:
        return self.answer(case, self.forced[-1] if self.forced else {})

    def model(self) -> str:
        return "m"

    def server_info(self) -> dict[str, Any]:
        return {"internal_states": [{"dcut": {}} if self.is_dcut else {}]}

    def dcut(self) -> dict[str, Any]:
        return {"version": "0", "block_size": 16}

    def force(self, knobs: dict[str, float]) -> None:
        self.forced.append(knobs)


def run(
    dcut: Callable[[Case, dict[str, float]], Answer],
    plain: Callable[[Case, dict[str, float]], Answer] = lambda case, knobs: Answer(200, [OUTPUT]),
) -> tuple[dict[str, object], str]:
    shown: list[str] = []
    server: Any = FakeServer(dcut, dcut=True)
    reference: Any = FakeServer(plain, dcut=False)
    summary = run_conformance(server, reference, CASES, show=shown.append)
    assert server.forced == [*CHOICES.values(), CHOICES["auto"]]
    return summary, "\n".join(shown)


def test_all_equal() -> None:
    summary, _ = run(lambda case, knobs: Answer(200, [OUTPUT]))
    assert summary == {"ok": True, "cases": 2, "equal": 2, "refused": 0, "differences": 0}


def test_one_choice_that_differs_is_found() -> None:
    def answer(case: Case, knobs: dict[str, float]) -> Answer:
        wrong = knobs == CHOICES["0.25"] and case is CASES[1]
        return Answer(200, [replace(OUTPUT, ids=[5, 6, 8]) if wrong else OUTPUT])

    summary, shown = run(answer)
    assert not summary["ok"] and summary["differences"] == 1 and summary["equal"] == 1
    assert "0.25, mixed: token id at token 2: expected 7, found 8" in shown


@pytest.mark.parametrize(("margin", "equal"), [(1e-5, 2), (0.2, 0)])
def test_a_tie_is_reported_and_counts_as_equal(margin: float, equal: int) -> None:
    def plain(case: Case, knobs: dict[str, float]) -> Answer:
        if not case.body.get("top_logprobs_num"):
            return Answer(200, [OUTPUT])
        tops = {"output_top_logprobs": [[(-0.5, 5), (-3.0, 1)]] * 2 + [[(-1, 7), (-1 - margin, 8)]]}
        return Answer(200, [replace(OUTPUT, logprobs=tops)])

    summary, shown = run(lambda case, knobs: Answer(200, [replace(OUTPUT, ids=[5, 6, 8])]), plain)
    assert summary["equal"] == equal and f"top-2 margin {margin:.1e}" in shown


def test_refusals_are_listed_and_cost_the_ok() -> None:
    summary, shown = run(lambda case, knobs: Answer(400, message="not yet"))
    assert summary == {"ok": False, "cases": 2, "equal": 0, "refused": 2, "differences": 0}
    assert "refused: one: a; one: b\n  not yet" in shown


def test_a_plain_server_that_differs_from_itself_is_not_held_against_dcut() -> None:
    calls = iter(range(100))

    def plain(case: Case, knobs: dict[str, float]) -> Answer:
        return Answer(200, [replace(OUTPUT, ids=[next(calls)])])

    summary, shown = run(lambda case, knobs: Answer(200, [OUTPUT]), plain)
    assert not summary["ok"] and summary["differences"] == 0 and "differs from itself" in shown


def test_two_dcut_servers_are_refused() -> None:
    server: Any = FakeServer(lambda case, knobs: Answer(200, [OUTPUT]), dcut=True)
    with pytest.raises(ConformError, match="compared with itself"):
        run_conformance(server, server, CASES, show=lambda line: None)
