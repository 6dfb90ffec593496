"""Bad input ends in a message a person can act on; a server that is up stays up."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import COMMON_ARGS, SETTINGS, SPECULATE, TARGET, Case, prompts

from dcut_sglang.bench.server import Server, ServerError


def test_an_empty_prompt_and_one_beyond_the_context(dcut: Server, plain: Server) -> None:
    for text in ("", "word " * 500):
        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        answer, expected = dcut.generate(**body), plain.generate(**body)
        assert answer.status_code == expected.status_code
        assert answer.status_code == 200 or len(answer.json()["error"]["message"]) > 20
    assert dcut.generate(**Case(prompts()[0], 4).body()).status_code == 200


def test_two_hundred_requests_at_once(dcut: Server) -> None:
    dcut.set_state(dcut_force_ratio=-1)
    cases = [Case(prompts()[i % len(prompts())], 1 + i % 5) for i in range(200)]
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda case: dcut.generate(**case.body()), cases))
    assert [answer.status_code for answer in answers] == [200] * 200
    for case, answer in zip(cases, answers, strict=True):
        assert 1 <= len(answer.json()["output_ids"]) <= case.max_new_tokens


def test_a_client_that_goes_away_frees_its_slots(dcut: Server) -> None:
    free = dcut.dcut()["request_slots_free"]
    body = Case(prompts()[0], 100, ignore_eos=True).body()
    stream = dcut.session.post(f"{dcut.url}/generate", json={**body, "stream": True}, stream=True)
    next(stream.iter_lines())
    stream.close()
    for _ in range(100):
        if dcut.dcut()["request_slots_free"] == free:
            return
    raise AssertionError("the aborted request still holds its slot")


def test_a_cost_table_that_cannot_be_kept_is_a_warning(dcut: Server) -> None:
    """The fixture's cache folder cannot be created."""
    assert "the cost table could not be kept" in dcut.log.read_text()


def test_a_port_in_use(dcut: Server, logs: Path) -> None:
    """The second server ends, with a message; the first goes on."""
    second = Server(TARGET, COMMON_ARGS, log=logs / "port.log", port=dcut.port)
    second.launch()
    try:
        deadline = time.monotonic() + 180
        while second.alive:
            assert time.monotonic() < deadline, second.log_tail()
            time.sleep(0.5)
    finally:
        second.stop()
    tail = second.log_tail(60).lower()
    assert str(dcut.port) in tail and ("in use" in tail or "not available" in tail), tail
    assert dcut.generate(**Case(prompts()[0], 4).body()).status_code == 200


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        ('{"format": "dcut-cost-table", "version": 1, "block', "cost.json: "),
        (None, "measured under other conditions"),
    ],
    ids=["truncated", "foreign"],
)
def test_a_cost_table_that_does_not_fit_stops_the_start(
    dcut: Server, logs: Path, tmp_path: Path, content: str | None, phrase: str
) -> None:
    table = tmp_path / "cost.json"
    if content is None:
        measured = dcut.dcut()["cost_table"]
        measured["fingerprint"]["device"] = "another machine"
        content = json.dumps(measured)
    table.write_text(content)
    settings = json.dumps({**SETTINGS, "cost_table": str(table)})
    args = (*COMMON_ARGS, *SPECULATE, "--dcut-config", settings)
    with pytest.raises(ServerError, match=phrase):
        Server(TARGET, args, log=logs / f"{table.stem}.log").start()
