"""Counters, pools and the run-time switch of a real server."""

from __future__ import annotations

import time

import pytest
from harness import BLOCK_SIZE, Case, prompts, run

from dcut_sglang import __version__
from dcut_sglang.bench.server import Server, ServerError


def drained(server: Server) -> dict[str, int]:
    """Free slots once the server is idle and its prefix cache flushed."""
    deadline = time.monotonic() + 30
    while server.session.post(f"{server.url}/flush_cache", timeout=30).status_code != 200:
        assert time.monotonic() < deadline, "the server did not become idle"
        time.sleep(0.2)
    state = server.dcut()
    return {name: state[name] for name in ("kv_slots_free", "request_slots_free")}


def test_pools_are_back_after_a_drain(each_dcut: Server) -> None:
    before = drained(each_dcut)
    # The cost probe has left every slot free.
    assert before["kv_slots_free"] == each_dcut.internal_state()["memory_usage"]["token_capacity"]
    assert before["request_slots_free"] == 16
    for knobs in ({"dcut_force_random": 11}, {"dcut_force_ratio": 1.0}, {"dcut_force_plain": 1}):
        each_dcut.set_state(**knobs)
        run(each_dcut, [Case(p, 40) for p in prompts()[:20]], 20)
        assert drained(each_dcut) == before
    assert "leak" not in each_dcut.log.read_text()


def test_counters_agree_with_what_requests_report(dcut_paged: Server) -> None:
    """Without overlap no step is launched for a request that has already ended."""
    dcut_paged.set_state(dcut_verify_len_0=3, dcut_verify_len_1=16, dcut_reset_metrics=1)
    cases = [Case(p, 30) for p in prompts()[:12]]
    answers = [answer["meta_info"] for answer in run(dcut_paged, cases, 6)]
    counters = dcut_paged.dcut()
    verify_steps = sum(a["spec_verify_ct"] for a in answers)
    accepted = sum(a["spec_num_correct_drafts"] for a in answers)
    assert counters["request_steps"] == verify_steps
    assert counters["drafts_accepted"] == accepted
    assert counters["tokens_emitted"] == verify_steps + accepted
    assert counters["rows_decided"] == counters["rows_verified"]
    assert counters["rows_decided"] == counters["drafts_kept"] + counters["request_steps"]
    assert counters["drafts_proposed"] == (BLOCK_SIZE - 1) * counters["request_steps"]
    # The prefill emits one token; the last step of a request may overshoot its end.
    for answer in answers:
        emitted = 1 + answer["spec_verify_ct"] + answer["spec_num_correct_drafts"]
        assert answer["completion_tokens"] <= emitted < answer["completion_tokens"] + BLOCK_SIZE
    for phase in ("draft", "decide", "verify", "commit"):
        assert counters[f"{phase}_ms"] > 0


def test_overlap_counts_at_most_one_more_step_per_request(dcut: Server) -> None:
    dcut.set_state(dcut_force_ratio=0.5, dcut_reset_metrics=1)
    answers = [a["meta_info"] for a in run(dcut, [Case(p, 30) for p in prompts()[:12]], 6)]
    verify_steps = sum(a["spec_verify_ct"] for a in answers)
    assert 0 <= dcut.dcut()["request_steps"] - verify_steps <= len(answers)


def test_server_info_describes_dcut(dcut: Server) -> None:
    dcut.set_state(dcut_force_ratio=0.25, dcut_reset_metrics=1)
    run(dcut, [Case(prompts()[0], 20)], 1)
    state = dcut.dcut()
    assert state["version"] == __version__ and state["active"] is True
    assert state["block_size"] == BLOCK_SIZE and state["forced"] == "ratio 0.25"
    assert sum(state["keep_ratio_counts"].values()) == state["steps"] > 0


@pytest.mark.parametrize(
    "knobs",
    [
        {"dcut_force_ratio": 1.5},
        {"dcut_force_plain": 3},
        {"dcut_force_random": -2},
        {"dcut_verify_len_0": 17},
        {"dcut_no_such_knob": 1},
    ],
)
def test_bad_knobs_are_rejected_and_nothing_changes(dcut: Server, knobs: dict[str, float]) -> None:
    dcut.set_state(dcut_force_ratio=0.5)
    with pytest.raises(ServerError):
        dcut.set_state(**knobs)
    assert dcut.dcut()["forced"] == "ratio 0.5"
