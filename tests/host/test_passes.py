"""Plain steps of several passes: fewer steps, the same answers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq
from features import Body, answer, assert_same_answers
from features import with_margins as margins
from harness import BLOCK_SIZE, prompts

from dcut_sglang.bench.server import Server
from dcut_sglang.host.passes import Arrivals

NUM_TOKENS = 39


def body(**params: Any) -> Body:
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    return {"text": prompts()[0], "sampling_params": sampling}


def counted(server: Server, asked: Body) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer when every step is plain, and the counters of its steps."""
    server.set_state(dcut_force_plain=1, dcut_reset_metrics=1)
    (found,) = answer(server, [asked], 1)
    return found, server.dcut()


def test_a_plain_step_emits_several_tokens(dcut_paged: Server, plain: Server) -> None:
    found, counters = counted(dcut_paged, body())
    # One token by the prefill, and none beyond the request's end.
    assert counters["scheduler_steps"] == -(-(NUM_TOKENS - 1) // BLOCK_SIZE)
    (want,) = answer(plain, margins([body()]), 1)
    assert assert_same_answers([body()], [want], [found]) == 0
    # Every pass counts as the plain step that it stands for.
    meta = found["meta_info"]
    assert meta["spec_verify_ct"] == NUM_TOKENS - 1 == counters["steps"] == counters["plain_steps"]
    assert meta["spec_num_correct_drafts"] == 0 and meta["spec_accept_length"] <= 1.1
    assert counters["tokens_emitted"] == counters["rows_verified"] == NUM_TOKENS - 1
    assert counters["selected_steps"] == 0 and counters["first_plain_step"] == 1


def test_nobody_is_run_past_its_end(dcut_paged: Server) -> None:
    dcut_paged.set_state(dcut_force_plain=1, dcut_reset_metrics=1)
    bodies = [body(max_new_tokens=n) for n in (7, 18, 33)]
    found = answer(dcut_paged, bodies, len(bodies))
    counters = dcut_paged.dcut()
    assert [len(a["output_ids"]) for a in found] == [7, 18, 33]
    assert counters["request_steps"] == sum(a["meta_info"]["spec_verify_ct"] for a in found)
    assert counters["tokens_emitted"] == 7 + 18 + 33 - 3


def test_arrivals_are_seen_until_they_are_read() -> None:
    arrivals = Arrivals()
    assert not arrivals.can_be_seen and not arrivals.are_waiting()
    arrivals.watch(object())  # SGLang has other channels than sockets
    assert not arrivals.can_be_seen
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as end,
        context.socket(zmq.PUSH) as other,
    ):
        other.connect(f"tcp://127.0.0.1:{end.bind_to_random_port('tcp://127.0.0.1')}")
        arrivals.watch(end)
        assert arrivals.can_be_seen and not arrivals.are_waiting()
        other.send(b"a request")
        deadline = time.monotonic() + 10
        while not arrivals.are_waiting():
            assert time.monotonic() < deadline
        assert arrivals.are_waiting()  # looking takes nothing away
        assert end.recv() == b"a request" and not arrivals.are_waiting()


def test_a_message_ends_the_step(dcut_paged: Server) -> None:
    """Whoever comes does not wait for more than the pass that runs."""
    num_tokens = 140
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(counted, dcut_paged, body(max_new_tokens=num_tokens))
        while not running.done():
            dcut_paged.dcut()
        found, counters = running.result()
    assert found["meta_info"]["spec_verify_ct"] == num_tokens - 1 == counters["steps"]
    assert counters["scheduler_steps"] > -(-counters["steps"] // BLOCK_SIZE)


@pytest.mark.parametrize(
    "params",
    [{"frequency_penalty": 0.5}, {"min_new_tokens": 20}, {"regex": "[a-z ]{60}"}],
    ids=str,
)
def test_one_pass_where_the_next_choice_needs_more(
    dcut_paged: Server, params: dict[str, Any]
) -> None:
    _, counters = counted(dcut_paged, body(**params))
    assert counters["scheduler_steps"] == counters["steps"] > 1


def test_one_pass_under_overlap(dcut: Server) -> None:
    _, counters = counted(dcut, body())
    assert counters["scheduler_steps"] == counters["steps"] >= NUM_TOKENS - 1


def test_draws_are_those_of_plain_decoding(dcut_paged: Server, plain: Server) -> None:
    """Seeds are keyed by position, and the bias applies in every pass."""
    dcut_paged.set_state(dcut_force_plain=1)
    bodies = [
        body(temperature=0.9, sampling_seed=seed, logit_bias={"40": 1.5}, top_p=0.9)
        for seed in range(6)
    ]
    want, found = answer(plain, bodies, 1), answer(dcut_paged, bodies, len(bodies))
    assert [a["output_ids"] for a in found] == [a["output_ids"] for a in want]
