"""The life of requests, long and odd: aborted, retracted, preempted, chunked, cut at a limit."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import DRAFTER, Case, assert_same_ids, ids_of, prompts, run

from dcut_sglang.bench.server import Server
from dcut_sglang.conform.client import Client
from dcut_sglang.conform.fuzz import Fuzzer, draw_requests
from dcut_sglang.conform.pair import SMALL_ARGS, tiny_pair

RANDOM = {"dcut_force_random": 3}
CHOICES: tuple[dict[str, float], ...] = (
    RANDOM,
    {"dcut_force_ratio": -1},
    {"dcut_force_ratio": 1.0},
)


@pytest.fixture(scope="module")
def pair(logs: Path) -> Iterator[tuple[Server, Server]]:
    """DCUT and plain decoding with pages of 64, a small pool, prefill chunks of 256, priorities.

    The drafter is the tiny pair's with a sliding window in its first layer.
    """
    folder = logs / "sliding-drafter"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(DRAFTER / "model.safetensors")
    config = json.loads((DRAFTER / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 48}
    config["layer_types"] = ["sliding_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    with tiny_pair(logs / "life", (*SMALL_ARGS, "--page-size", "64"), folder) as servers:
        yield servers


@pytest.fixture(scope="module")
def small(pair: tuple[Server, Server]) -> Server:
    return pair[0]


@pytest.fixture(scope="module")
def small_plain(pair: tuple[Server, Server]) -> Server:
    return pair[1]


@pytest.fixture(autouse=True)
def pools_come_back(small: Server) -> Iterator[None]:
    client = Client(small.url)
    before = client.free_slots()
    yield
    assert client.free_slots() == before
    assert small.alive


def long_text(num_lines: int, start: int) -> str:
    lines = (f"record {start + i} : name=bob role=owner zone=west state=ok ;" for i in range(999))
    return "records of west\n" + "\n".join([next(lines) for _ in range(num_lines)]) + "\n"


def test_retraction_and_resumption(small: Server, small_plain: Server) -> None:
    """32 texts that do not end by themselves want 128 pages, the pool has 48.

    Without ignore_eos, SGLang admits requests in the hope that they end early.
    """
    endless = [p for p in prompts() if p.startswith(("record", "noise", "mixed"))][:16]
    cases = [Case(p, n) for p in endless for n in (150, 190)]
    expected = ids_of(run(small_plain, cases, 8))
    for choice in CHOICES:
        small.set_state(**choice)
        before = small.log.read_text().count("Retract requests")
        assert_same_ids(cases, expected, ids_of(run(small, cases, 32)))
        assert small.log.read_text().count("Retract requests") > before, "nothing was retracted"


def test_sixty_four_drain_unevenly_to_one(small: Server, small_plain: Server) -> None:
    draw = random.Random(5)
    lengths = sorted(draw.randint(1, 30) for _ in range(63)) + [200]
    cases = [
        Case(prompts()[i % len(prompts())], length, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]
    expected = ids_of(run(small_plain, cases, 8))
    for choice in CHOICES:
        small.set_state(**choice)
        assert_same_ids(cases, expected, ids_of(run(small, cases, 64)))


def test_long_prompts_in_chunks_beside_decoding(small: Server, small_plain: Server) -> None:
    """1,000 to 1,800 tokens in chunks of 256, while others decode and share their prefix."""
    cases = [Case(long_text(lines, 10), 24) for lines in (50, 70, 90)]
    cases += [Case(p, 90, ignore_eos=True) for p in prompts()[:12]]
    expected = ids_of(run(small_plain, cases, 1))
    small.set_state(**RANDOM)
    assert_same_ids(cases, expected, ids_of(run(small, cases, len(cases))))


def test_radix_hits_across_requests(small: Server, small_plain: Server) -> None:
    """A second turn finds what the first one generated, in the drafter's cache as well."""
    small.set_state(dcut_force_ratio=1.0, dcut_reset_metrics=1)
    first = Case(prompts()[0], 150, ignore_eos=True)
    (answer,) = run(small, [first], 1)
    turns = [Case(first.prompt + answer["text"] + extra, 40) for extra in ("", "rec", "zone=e")]
    expected = ids_of(run(small_plain, turns, 1))
    found = run(small, turns, 1)
    assert_same_ids(turns, expected, ids_of(found))
    assert small.dcut()["accept_length"] > 1.5
    for hit in found:
        assert hit["meta_info"]["cached_tokens"] >= 128


def test_abort_at_any_moment(small: Server, small_plain: Server) -> None:
    """Aborted while queued, in prefill and in mid-block; the others do not notice."""
    small.set_state(**RANDOM)
    stay = [Case(p, 60, ignore_eos=True) for p in prompts()[:8]]
    expected = ids_of(run(small_plain, stay, 8))
    client, draw = Client(small.url, 64), random.Random(1)

    def leave(index: int) -> dict[str, Any]:
        body = Case(prompts()[index], 700, ignore_eos=True).body()
        if index % 3 == 0:
            body["text"] = long_text(60, index)
        rid = f"abort-{index}"
        threading.Timer(draw.choice([0, 0.02, 0.1, 0.3, 1]), client.abort, [rid]).start()
        # An abort that overtakes its request finds nothing: send it again.
        threading.Timer(4, client.abort, [rid]).start()
        return small.generate(rid=rid, **body).json()

    with ThreadPoolExecutor(32) as pool:
        left = [pool.submit(leave, index) for index in range(24)]
        assert_same_ids(stay, expected, ids_of(run(small, stay, 8)))
        answers = [job.result() for job in left]
    for answer in answers:
        assert "abort" in json.dumps(answer).lower()


def test_priority_preempts_and_both_are_right(small: Server, small_plain: Server) -> None:
    low = [Case(p, 150, ignore_eos=True) for p in prompts()[:40]]
    high = [Case(p, 40, ignore_eos=True) for p in prompts()[40:48]]
    expected = ids_of(run(small_plain, [*low, *high], 8))
    small.set_state(**RANDOM)

    def send(case: Case, priority: int) -> tuple[float, list[int]]:
        answer = small.generate(priority=priority, **case.body())
        assert answer.status_code == 200, answer.text
        return time.monotonic(), answer.json()["output_ids"]

    with ThreadPoolExecutor(48) as pool:
        slow = [pool.submit(send, case, 0) for case in low]
        time.sleep(0.5)
        fast = [pool.submit(send, case, 100) for case in high]
        slow_done, fast_done = [j.result() for j in slow], [j.result() for j in fast]
    assert_same_ids([*low, *high], expected, [ids for _, ids in (*slow_done, *fast_done)])
    assert max(at for at, _ in fast_done) < max(at for at, _ in slow_done)


def test_several_outputs_of_a_long_prompt(small: Server, small_plain: Server) -> None:
    small.set_state(**RANDOM)
    body = Case(long_text(20, 40), 50).body()
    body["sampling_params"]["n"] = 5
    expected, found = small_plain.generate(**body).json(), small.generate(**body).json()
    assert len(found) == 5
    assert [one["output_ids"] for one in found] == [one["output_ids"] for one in expected]


def test_to_the_context_limit_with_large_pages(small: Server, small_plain: Server) -> None:
    """The context (2048) ends inside a block and inside a page."""
    text = long_text(95, 10)
    count = small.generate(**Case(text, 1).body()).json()["meta_info"]["prompt_tokens"]
    case = Case(text, 2048 - count - 1, ignore_eos=True)
    expected = ids_of(run(small_plain, [case], 1))
    for choice in CHOICES:
        small.set_state(**choice)
        assert_same_ids([case], expected, ids_of(run(small, [case], 1)))


def test_hidden_states_are_refused_at_the_door(small: Server) -> None:
    answer = small.generate(**Case(prompts()[0], 4).body(), return_hidden_states=True)
    assert answer.status_code == 400 and "hidden" in answer.text


def test_random_requests(small: Server, small_plain: Server) -> None:
    """A slice of `make fuzz`."""
    seed = 7
    result = Fuzzer(Client(small.url, 64), Client(small_plain.url)).run(
        draw_requests(seed, 60), seed
    )
    print(result)
    assert not result.failures, f"seed {seed}: " + "\n".join(result.failures)
    assert result.equal + result.ties > 30 and result.refused == result.invalid == 0
