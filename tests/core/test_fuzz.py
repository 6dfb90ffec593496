"""The fuzzer itself: one seed draws everything, failures are seen, and lists shrink."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dcut_sglang.conform.case import Case
from dcut_sglang.conform.client import Answer, ConformError, Output
from dcut_sglang.conform.fuzz import Fuzzer, FuzzRequest, broken_invariants, draw_requests

COUNTERS = {
    "rows_verified": 20,
    "rows_decided": 20,
    "drafts_kept": 15,
    "request_steps": 5,
    "drafts_accepted": 9,
    "drafts_proposed": 75,
    "keep_ratio_counts": {"0.25": 5},
    "steps": 5,
}


def test_a_seed_draws_everything() -> None:
    assert draw_requests(3, 50) == draw_requests(3, 50)
    assert draw_requests(3, 50) != draw_requests(4, 50)
    requests = draw_requests(5, 500)
    params = [r.case.body["sampling_params"] for r in requests]
    for feature in ("sampling_seed", "frequency_penalty", "logit_bias", "stop", "n", "regex"):
        assert any(feature in p for p in params), feature
    assert any(r.aborted_after_s is not None for r in requests)
    assert any(r.case.body.get("stream") for r in requests)
    arrivals = [r.arrives_s for r in requests]
    assert arrivals == sorted(arrivals)
    for p in params:
        assert 0 <= p.get("min_new_tokens", 0) <= p["max_new_tokens"]
        assert p["temperature"] == 0 or "sampling_seed" in p


class FakeServer:
    """Answers ids [1, 2, 3], but [1, 2, 9] to the text ``wrong``."""

    url = "http://fake"

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.seen: set[str] = set()
        self.aborted: list[str] = []
        self.counters: dict[str, Any] = COUNTERS

    def send(self, case: Case) -> Answer:
        third = 9 if case.body["text"] == self.wrong else 3
        return Answer(200, [Output([1, 2, third], "", "length")])

    def force(self, knobs: dict[str, float]) -> None:
        self.forced = knobs

    def free_slots(self) -> dict[str, int]:
        return {"kv_slots_free": 8}

    def dcut(self) -> dict[str, Any]:
        return self.counters

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)


def request(text: str, aborted_after_s: float | None = None) -> FuzzRequest:
    body = {"text": text, "rid": text, "sampling_params": {}}
    return FuzzRequest(Case(text, "/generate", body), 0.0, aborted_after_s)


def fuzzer(server: Any) -> Fuzzer:
    plain: Any = FakeServer()
    return Fuzzer(server, plain)


def test_a_wrong_answer_fails_and_the_list_shrinks_to_it() -> None:
    requests = [request(f"r{i}") for i in range(40)]
    found = fuzzer(FakeServer(wrong="r23"))
    result = found.run(requests, seed=1)
    assert result.equal == 39
    assert len(result.failures) == 1 and result.failures[0].startswith("r23: token id at token 2")
    shrunk = found.shrink(requests, 1, attempts=60, show=lambda line: None)
    assert [r.case.name for r in shrunk] == ["r23"]


@pytest.mark.parametrize(("ids", "fails"), [([1, 2], False), ([], False), ([2], True)])
def test_an_aborted_answer_must_begin_as_the_whole_one(ids: list[int], fails: bool) -> None:
    class Aborting(FakeServer):
        def send(self, case: Case) -> Answer:
            return Answer(200, [Output(ids, "", {"type": "abort"})])

    result = fuzzer(Aborting()).run([request("a", aborted_after_s=10.0)], seed=1)
    assert bool(result.failures) == fails and result.aborted == (not fails)


def test_a_server_that_hangs_up_and_slots_that_leak_are_failures() -> None:
    class Broken(FakeServer):
        def send(self, case: Case) -> Answer:
            raise ConformError("no answer")

        def free_slots(self) -> dict[str, int]:
            self.seen.add(f"call {len(self.seen)}")
            return {"kv_slots_free": 8 - len(self.seen)}

    failures = fuzzer(Broken()).run([request("a")], seed=1).failures
    assert any("no answer" in f for f in failures) and any("free slots" in f for f in failures)


@pytest.mark.parametrize(
    ("changed", "phrase"),
    [
        ({"rows_verified": 21}, "rows_verified == rows_decided"),
        ({"request_steps": 6}, "drafts_kept + request_steps"),
        ({"drafts_accepted": 16}, "drafts_accepted <= drafts_kept"),
        ({"steps": 6}, "sum to steps"),
    ],
)
def test_counters_that_do_not_add_up(changed: dict[str, Any], phrase: str) -> None:
    assert broken_invariants(COUNTERS) == []
    assert any(phrase in line for line in broken_invariants(COUNTERS | changed))
    server = FakeServer()
    server.counters = COUNTERS | changed
    assert fuzzer(server).run([request("a")], seed=1).failures


def test_ties_count_as_right() -> None:
    class Tied(FakeServer):
        def send(self, case: Case) -> Answer:
            answer = super().send(case)
            tops = {"output_top_logprobs": [[(-1.0, 3), (-1.00001, 9)]] * 3}
            return replace(answer, outputs=[replace(answer.outputs[0], logprobs=tops)])

    plain: Any = Tied()
    plain_only_ids: Any = FakeServer(wrong="a")
    tied = Fuzzer(plain_only_ids, plain)
    tied.learn([request("a")])
    expected = tied._expected["a"]
    tied._expected["a"] = replace(expected, outputs=[replace(expected.outputs[0], logprobs={})])
    result = tied.run([request("a")], seed=1)
    assert result.ties == 1 and not result.failures
