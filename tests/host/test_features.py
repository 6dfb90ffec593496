"""Every request feature with pruning on: the same answers as without speculation."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
import torch
from features import BLANKS, GREEDY, PROCESSORS, Body, answer, assert_same_answers, greedy_bodies
from features import with_margins as margins
from harness import Case, _target, prompts

from dcut_sglang.bench.server import Server

CHOICES: dict[str, dict[str, float]] = {
    "ratio 0.25": {"dcut_force_ratio": 0.25},
    "ratio 0.5": {"dcut_force_ratio": 0.5},
    "full": {"dcut_force_ratio": 1.0},
    "random lengths": {"dcut_force_random": 7},
    "plain": {"dcut_force_plain": 1},
    "auto": {"dcut_force_ratio": -1},
}
EACH_CHOICE = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)


@pytest.fixture(scope="module")
def expected(plain: Server) -> list[Body]:
    """Plain decoding's answers, one request at a time."""
    return answer(plain, margins(greedy_bodies()), 1)


@EACH_CHOICE
def test_a_batch_of_all_features_equals_plain_decoding(
    dcut: Server, expected: list[Body], choice: dict[str, float]
) -> None:
    dcut.set_state(**choice, dcut_reset_metrics=1)
    found = answer(dcut, greedy_bodies(), len(expected))
    assert assert_same_answers(greedy_bodies(), expected, found) <= 1
    if choice == CHOICES["full"]:
        assert dcut.dcut()["accept_length"] > 1.3  # several tokens a step, with all of that on


def test_one_request_at_a_time_and_without_overlap(
    dcut: Server, dcut_paged: Server, expected: list[Body]
) -> None:
    for server, concurrency in ((dcut, 1), (dcut_paged, 16)):
        server.set_state(dcut_force_random=3)
        found = answer(server, greedy_bodies(), concurrency)
        assert assert_same_answers(greedy_bodies(), expected, found) <= 1


def test_features_changed_something(plain: Server, expected: list[Body]) -> None:
    """Each of the compared answers differs from the one without its feature."""
    bare = [
        {"text": body["text"], "sampling_params": {"temperature": 0, "max_new_tokens": 48}}
        for body in greedy_bodies()
    ]
    names = [*GREEDY, *PROCESSORS]
    for name, without, want in zip(names, answer(plain, bare, 8), expected, strict=True):
        same = without["output_ids"] == want["output_ids"]
        assert same == (name in ("nothing", "min_new_tokens")), name


def test_min_new_tokens_at_every_offset(dcut: Server, plain: Server) -> None:
    """Texts that end by themselves, made to go on for a few more tokens."""
    dcut.set_state(dcut_force_random=4)
    ends = [
        (p, a["meta_info"]["completion_tokens"])
        for p, a in zip(
            prompts()[:24],
            answer(plain, [Case(p, 110).body() for p in prompts()[:24]], 8),
            strict=True,
        )
        if a["meta_info"]["finish_reason"]["type"] == "stop"
    ]
    assert len(ends) >= 3
    bodies: list[Body] = [
        {
            "text": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": length + 20,
                "min_new_tokens": length + extra,
            },
        }
        for (prompt, length), extra in zip(itertools.cycle(ends[:4]), range(-1, 15), strict=False)
    ]
    want = answer(plain, margins(bodies), 8)
    assert_same_answers(bodies, want, answer(dcut, bodies, 16))
    for body, got in zip(bodies, want, strict=True):
        assert len(got["output_ids"]) >= body["sampling_params"]["min_new_tokens"]


@torch.inference_mode()
def brute_force(text: str, params: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Greedy ids and their margins by transformers, penalties from the emitted ids alone."""
    model, tokenizer = _target()
    ids = tokenizer(text)["input_ids"]
    out: list[int] = []
    gaps: list[float] = []
    while len(out) < params["max_new_tokens"]:
        logits = model(torch.tensor([ids + out])).logits[0, -1].double()
        counts = torch.bincount(torch.tensor(out, dtype=torch.int64), minlength=len(logits))
        logits -= params["frequency_penalty"] * counts + params["presence_penalty"] * (counts > 0)
        factor = torch.where(counts > 0, params["repetition_penalty"], 1.0)
        logits = torch.where(logits < 0, logits * factor, logits / factor)
        top = logits.topk(2)
        gaps.append(float(top.values[0] - top.values[1]))
        out.append(int(top.indices[0]))
        if out[-1] == model.config.eos_token_id:
            break
    return out, gaps


def test_three_penalties_together_against_brute_force(each_dcut: Server) -> None:
    params = {
        "temperature": 0,
        "max_new_tokens": 40,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
    }
    bodies = [{"text": p, "sampling_params": params} for p in prompts()[:6]]
    wanted = [brute_force(p, params) for p in prompts()[:6]]
    for choice in (CHOICES["random lengths"], CHOICES["full"]):
        each_dcut.set_state(**choice)
        for (ids, gaps), got in zip(wanted, answer(each_dcut, bodies, 6), strict=True):
            pairs = enumerate(zip(ids, got["output_ids"], strict=False))
            first = next((i for i, (a, b) in pairs if a != b), None)
            if first is None:
                assert got["output_ids"] == ids
            else:
                assert gaps[first] < 1e-4, (first, gaps[first])


LOGPROB_FIELDS = tuple(
    f"{side}_{kind}"
    for side in ("input", "output")
    for kind in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
)


def assert_close_logprobs(want: Body, got: Body) -> float:
    """Same shape, same tokens (but for ties) and values within 1e-4; the largest difference."""
    worst = 0.0
    for name in LOGPROB_FIELDS:
        rows, found = want["meta_info"].get(name, []), got["meta_info"].get(name, [])
        assert len(rows) == len(found), name
        for row, other in zip(rows, found, strict=True):
            if row is None or other is None or "token_logprobs" in name:
                row, other = [row or [None, None]], [other or [None, None]]
            assert len(row) == len(other), name
            for (value, token, *_), (found_value, found_token, *_) in zip(row, other, strict=True):
                if value is None or found_value is None:
                    assert value is found_value and token == found_token
                    continue
                # The least float stands for an impossible token.
                gap = 0.0 if value == found_value else abs(value - found_value)
                worst = max(worst, gap)
                assert gap <= 1e-4 and (token == found_token or "top" in name), (name, row, other)
    return worst


@functools.cache
def logprob_bodies() -> list[Body]:
    bodies: list[Body] = []
    for i, body in enumerate(greedy_bodies()):
        bodies.append(
            {
                **body,
                "return_logprob": True,
                "top_logprobs_num": i % 4,
                "logprob_start_len": (-1, 0, 5, 20)[i % 4],
                **({"token_ids_logprob": [5, 40, 202, 17][: 1 + i % 4]} if i % 3 == 0 else {}),
            }
        )
        if i % 4 == 1:
            bodies.append(body)  # one that asks for none in the same batch
    return bodies


@pytest.mark.parametrize("name", ["ratio 0.25", "random lengths", "full"])
def test_logprobs_equal_plain_decoding(dcut: Server, plain: Server, name: str) -> None:
    bodies = logprob_bodies()
    wanted = logprobs_of_plain(plain)
    dcut.set_state(**CHOICES[name])
    for body, want, got in zip(bodies, wanted, answer(dcut, bodies, 16), strict=True):
        if got["output_ids"] != want["output_ids"]:
            assert_same_answers([body], [want], [got])
            continue
        count = len(got["meta_info"].get("output_token_logprobs", []))
        assert count == (len(got["output_ids"]) if body.get("return_logprob") else 0)
        assert_close_logprobs(want, got)


@functools.cache
def logprobs_of_plain(plain: Server) -> list[Body]:
    return answer(plain, logprob_bodies(), 1)


def test_openai_logprobs_and_json_schema(dcut: Server, plain: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": prompts()[0]}],
        "temperature": 0,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 2,
        "frequency_penalty": 0.4,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema},
        },
    }
    dcut.set_state(dcut_force_ratio=0.5)
    answers = []
    for server in (plain, dcut):
        url = f"{server.url}/v1/chat/completions"
        got = server.session.post(url, json=body, timeout=120)
        assert got.status_code == 200, got.text
        answers.append(got.json()["choices"][0])
    want, got = answers
    assert got["message"]["content"] == want["message"]["content"]
    pairs = zip(got["logprobs"]["content"], want["logprobs"]["content"], strict=True)
    assert all(abs(a["logprob"] - b["logprob"]) < 1e-4 for a, b in pairs)


def test_grammars_are_kept_to_the_end(dcut: Server) -> None:
    """With the cut at, before and after an illegal draft: every text is complete and legal."""
    for choice in CHOICES.values():
        dcut.set_state(**choice)
        bodies: list[Body] = [
            {
                "text": prompts()[i],
                "sampling_params": {
                    "temperature": (0, 0.9)[i % 2],
                    "max_new_tokens": 120,
                    "json_schema": json.dumps(
                        {
                            "type": "object",
                            "properties": {
                                "kind": {"enum": ["red", "green"]},
                                "on": {"type": "boolean"},
                            },
                            "required": ["kind", "on"],
                            "additionalProperties": False,
                        }
                    ),
                    "logit_bias": dict.fromkeys(BLANKS, -100.0),
                },
            }
            for i in range(8)
        ]
        for got in answer(dcut, bodies, 8):
            value = json.loads(got["text"])
            assert value["kind"] in ("red", "green") and isinstance(value["on"], bool)
            assert got["meta_info"]["finish_reason"]["type"] == "stop"
