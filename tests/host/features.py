"""Requests that use every feature at once, and their comparison with plain decoding."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import TARGET, TIE_MARGIN, prompts
from logit_processors import CountsItsCalls, ForbidsRepeats

from dcut_sglang.bench.server import Server

Body = dict[str, Any]

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "size": {"type": "integer", "maximum": 99},
            "kind": {"enum": ["red", "green"]},
        },
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    }
)
# Tokens that the tiny target would write into JSON for ever.
BLANKS = tuple(
    str(token)
    for piece, token in json.loads((TARGET / "tokenizer.json").read_text())["model"][
        "vocab"
    ].items()
    if not piece.strip("ĠĊĉč ")
)
TAG = json.dumps(
    {
        "type": "structural_tag",
        "structures": [
            {"begin": " na", "schema": {"type": "integer", "maximum": 999}, "end": " ;"},
        ],
        "triggers": [" na"],
    }
)
# Sampling parameters on top of greedy decoding. The repetition penalty does not commute with the
# other two, and which comes first in plain decoding without overlap is not defined
# (docs/upstream/penalty-order.md): their combination is compared in another way.
GREEDY: dict[str, Body] = {
    "nothing": {},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.3},
    "encouraged repetition": {"frequency_penalty": -0.4},
    "two penalties and bias": {
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "logit_bias": {"202": -3.0, "40": 2.0},
    },
    "min_new_tokens": {"min_new_tokens": 40},
    "min_new_tokens and penalty": {"min_new_tokens": 33, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"40": 8.0, "202": -100.0}},
    "json_schema": {"json_schema": SCHEMA, "logit_bias": dict.fromkeys(BLANKS, -100.0)},
    "regex": {"regex": "(ab|cd){3,9}[0-9]+x"},
    "ebnf": {"ebnf": 'root ::= "self" ("." name)+ "()"\nname ::= [a-z]+'},
    "structural_tag": {"structural_tag": TAG},
    "grammar and penalty": {"regex": "[a-z ]{60}", "frequency_penalty": 1.0, "min_new_tokens": 5},
    "stop ids": {"stop_token_ids": list(range(300, 480)), "min_new_tokens": 9},
}
PROCESSORS: dict[str, Body] = {
    "no repeats": {"custom_logit_processor": ForbidsRepeats.to_str(), "custom_params": {"last": 3}},
    "counts its calls": {
        "custom_logit_processor": CountsItsCalls.to_str(),
        "custom_params": {"every": 5, "token": 40},
    },
}


def greedy_bodies(max_new_tokens: int = 48) -> list[Body]:
    """One request for each greedy feature and processor, each with a prompt of its own."""
    bodies = []
    for i, params in enumerate([*GREEDY.values(), *PROCESSORS.values()]):
        params = dict(params)
        processor = params.pop("custom_logit_processor", None)
        body: Body = {
            "text": prompts()[i],
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **params},
        }
        if processor is not None:
            body["custom_logit_processor"] = processor
        bodies.append(body)
    return bodies


def answer(server: Server, bodies: list[Body], concurrency: int) -> list[Body]:
    """Answers in order; at most ``concurrency`` requests at a time."""

    def one(body: Body) -> Body:
        got = server.generate(**body)
        assert got.status_code == 200, f"{body}: {got.text}"
        return got.json()

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, bodies))


def with_margins(bodies: list[Body]) -> list[Body]:
    """The same requests, with the two likeliest tokens of every place."""
    return [{**body, "return_logprob": True, "top_logprobs_num": 2} for body in bodies]


def assert_same_answers(bodies: list[Body], expected: list[Body], found: list[Body]) -> int:
    """Ids, text and finish reason are equal, or first differ where two tokens tie.

    Args:
        expected: answers to ``with_margins(bodies)``.

    Returns:
        the number of ties.
    """
    ties = 0
    for body, want, got in zip(bodies, expected, found, strict=True):
        if got["output_ids"] == want["output_ids"]:
            assert got["text"] == want["text"]
            for name in ("finish_reason", "completion_tokens"):
                assert got["meta_info"][name] == want["meta_info"][name], body
            continue
        pairs = enumerate(zip(want["output_ids"], got["output_ids"], strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        assert first is not None, (body, want["output_ids"], got["output_ids"])
        (best, *_), (second, *_) = want["meta_info"]["output_top_logprobs"][first]
        assert best - second <= TIE_MARGIN, (
            f"{body}: token {first} differs, margin {best - second:.2e}\n"
            f"{want['output_ids']}\n{got['output_ids']}"
        )
        ties += 1
    return ties
