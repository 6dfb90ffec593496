"""The conformance cases: what is asked of both servers, as plain data.

A case is a name and the request fields it adds to its group's. ``prompt`` names one of
``PROMPTS``; anything under ``sampling_params`` is merged, not replaced. Sampled cases carry a
seed, which SGLang honours only with ``--enable-deterministic-inference``. None has min_p: there,
SGLang 0.5.23's scheduler dies of it, with or without speculation. None has the repetition penalty
beside another: which comes first differs from process to process (docs/upstream/penalties.md).
"""

from __future__ import annotations

import json
from typing import Any

PROMPTS = {
    "records": "records of west\nrecord 16 : name=bob role=owner zone=west state=ok ;\n"
    "record 17 : name=carl role=owner zone=west state=ok ;\n",
    "count": "count 57 to 99 : 57",
    "table": "item | color | number | tag |\nengine | blue | 47 | ko ma |\n"
    "flute | red | 48 | ka no |\n",
    "code": "# fields : bread glove lamp\n\ndef get_bread(self):\n    return self.bread\n\n"
    "def set_bread(self, value):\n    self.bread = value\n\n",
    "log": "23 GET /cart 200 id bo go ok\n24 GET /help 200 id to sa ok\n",
    "mixed": "mixed of east\npart 56 : role=owner zone=east state=ok ;\n"
    "data ra go pa no no ko do ba la go ;\n",
    "story": "story of the hen\nthe old hen sees the clever cat .\n",
    "noise": "noise : ko na po lo",
    "prose": "The capital of France is",
    "unicode": "é ünï 漢字 🙂 and ",
    "one token": "x",
    "space": " ",
    "long": "record 16 : name=bob role=owner zone=west state=ok ;\n" * 36,
}
ROTATION = ("records", "count", "table", "code", "log", "mixed", "story", "noise")

_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
_TAG = json.dumps(
    {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": json.loads(_SCHEMA), "end": "</f>"}],
        "triggers": ["<f"],
    }
)
_EBNF = 'root ::= line+\nline ::= ("zone=" ("west" | "east") | "n " [0-9]+) "\\n"'
_LONG_SEED = {"temperature": 0.9, "sampling_seed": 77, "max_new_tokens": 64}


def _params(**params: Any) -> dict[str, Any]:
    return {"sampling_params": params}


# Group -> (fields that all its cases share, {case: fields}). Shared by all of /generate:
# temperature 0, max_new_tokens 24.
GENERATE: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "greedy": ({}, {name: {"prompt": name} for name in ROTATION}),
    "sampling": (
        _params(temperature=0.8, sampling_seed=1),
        {
            "temperature 0.2": _params(temperature=0.2),
            "temperature 0.8": {},
            "temperature 1": _params(temperature=1.0, sampling_seed=2),
            "temperature 1.7": _params(temperature=1.7, sampling_seed=3),
            "another seed": _params(sampling_seed=123456789),
            "seed 0": _params(sampling_seed=0),
            "top_k 1": _params(top_k=1),
            "top_k 2": _params(top_k=2, sampling_seed=4),
            "top_k 20": _params(top_k=20, sampling_seed=5),
            "top_p 0.5": _params(top_p=0.5, sampling_seed=6),
            "top_p 0.95": _params(top_p=0.95, sampling_seed=7),
            "top_k and top_p": _params(top_k=8, top_p=0.8, sampling_seed=10),
            "top_k and top_p, hot": _params(temperature=1.5, top_k=30, top_p=0.9, sampling_seed=11),
            "long": _params(**_LONG_SEED),
            "long, hard text": {"prompt": "noise", **_params(**_LONG_SEED)},
            "long, easy text": {"prompt": "records", **_params(**_LONG_SEED)},
        },
    ),
    "penalties": (
        {},
        {
            "frequency 0.5": _params(frequency_penalty=0.5),
            "frequency 2": _params(frequency_penalty=2.0),
            "frequency -0.5": _params(frequency_penalty=-0.5),
            "presence 0.7": _params(presence_penalty=0.7),
            "presence 2": _params(presence_penalty=2.0),
            "presence -1": _params(presence_penalty=-1.0),
            "repetition 1.2": _params(repetition_penalty=1.2),
            "repetition 1.8": _params(repetition_penalty=1.8),
            "repetition 0.8": _params(repetition_penalty=0.8),
            "frequency and presence": _params(frequency_penalty=0.3, presence_penalty=0.3),
            "frequency and presence, sampled": _params(
                frequency_penalty=0.3, presence_penalty=0.3, temperature=0.7, sampling_seed=12
            ),
            "repetition, sampled": _params(
                repetition_penalty=1.1, temperature=0.7, sampling_seed=29
            ),
            "long": _params(frequency_penalty=0.2, max_new_tokens=72),
        },
    ),
    "minimum length": (
        {"prompt": "story"},
        {
            "min_new_tokens 5": _params(min_new_tokens=5),
            "min_new_tokens 40": _params(min_new_tokens=40, max_new_tokens=64),
            "min = max": _params(min_new_tokens=24, max_new_tokens=24),
            "with a stop id": _params(min_new_tokens=12, stop_token_ids=list(range(200, 400))),
            "sampled": _params(
                min_new_tokens=20, max_new_tokens=40, temperature=1.0, sampling_seed=13
            ),
        },
    ),
    "logit bias": (
        {},
        {
            "one up": _params(logit_bias={"40": 6.0}),
            "one banned": _params(logit_bias={"224": -100.0}),
            "forced": _params(logit_bias={"45": 100.0}),
            "many": _params(logit_bias={str(i): 0.25 * (i % 9) - 1 for i in range(40, 240)}),
            "sampled": _params(logit_bias={"40": 2.0}, temperature=0.8, sampling_seed=14),
        },
    ),
    "grammar": (
        _params(max_new_tokens=40),
        {
            "json schema": _params(json_schema=_SCHEMA),
            "json schema, sampled": _params(json_schema=_SCHEMA, temperature=0.8, sampling_seed=15),
            "json schema, cut short": _params(json_schema=_SCHEMA, max_new_tokens=9),
            "any json object": _params(json_schema='{"type": "object"}'),
            "regex digits": _params(regex="[0-9]{3,20}"),
            "regex words": _params(regex="(ko|na|po|lo)( (ko|na|po|lo)){2,12} ;"),
            "regex like the text": {
                "prompt": "records",
                **_params(regex="(record [0-9]+ : [a-z =]+;\n)+"),
            },
            "regex date": _params(regex="20[0-9]{2}-[01][0-9]-[0-3][0-9]"),
            "regex, sampled": _params(regex="[a-z ]{10,40}", temperature=1.0, sampling_seed=16),
            "regex and min_new_tokens": _params(regex="[a-f]{1,30}", min_new_tokens=6),
            "ebnf": _params(ebnf=_EBNF),
            "ebnf, sampled": _params(ebnf=_EBNF, temperature=0.9, sampling_seed=17),
            "structural tag": _params(structural_tag=_TAG, logit_bias={}),
            "structural tag, sampled": _params(
                structural_tag=_TAG, temperature=0.8, sampling_seed=18
            ),
        },
    ),
    "log-probabilities": (
        {"return_logprob": True},
        {
            "of the output": {},
            "of the output, long": _params(max_new_tokens=72),
            "as text": {"return_text_in_logprobs": True},
            "top 1": {"top_logprobs_num": 1},
            "top 5": {"top_logprobs_num": 5},
            "of given ids": {"token_ids_logprob": [40, 50, 224]},
            "top 3 and given ids": {"top_logprobs_num": 3, "token_ids_logprob": [2, 45]},
            "of the input": {"logprob_start_len": 0},
            "of the input from 5": {"logprob_start_len": 5, "top_logprobs_num": 2},
            "one token": _params(max_new_tokens=1),
            "with a stop": {"top_logprobs_num": 2, **_params(stop=["e"])},
            "sampled": {"top_logprobs_num": 2, **_params(temperature=0.8, sampling_seed=19)},
            "penalized": _params(frequency_penalty=0.5),
            "with a grammar": _params(regex="[0-9 ]{4,20}"),
        },
    ),
    "stops": (
        {},
        {
            "string": _params(stop=["e"]),
            "two strings": _params(stop=["ok", "self"]),
            "string across tokens": _params(stop=["state=ok ;\nrecord"]),
            "string never met": _params(stop=["@@@"]),
            "string, kept": _params(stop=["e"], no_stop_trim=True),
            "regex": _params(stop_regex="[aeiou] "),
            "regex with digits": _params(stop_regex="[0-9]{2}"),
            "token ids": _params(stop_token_ids=list(range(60, 120))),
            "token ids, kept": _params(stop_token_ids=list(range(60, 120)), no_stop_trim=True),
            "the first token": _params(stop_token_ids=list(range(4, 576))),
            "end of text": {"prompt": "story", **_params(max_new_tokens=160)},
            "end of text, code": {"prompt": "code", **_params(max_new_tokens=160)},
            "ignore_eos": {"prompt": "story", **_params(max_new_tokens=120, ignore_eos=True)},
            "ignore_eos, with a stop": {"prompt": "table", **_params(ignore_eos=True, stop=["|"])},
            "special tokens shown": {
                "prompt": "story",
                **_params(max_new_tokens=160, skip_special_tokens=False),
            },
            "no spaces between": _params(spaces_between_special_tokens=False),
            "sampled": _params(stop=["a"], temperature=1.0, sampling_seed=20),
        },
    ),
    "lengths": (
        {"prompt": "records"},
        {f"max_new_tokens {n}": _params(max_new_tokens=n) for n in (1, 2, 15, 16, 17, 31, 33, 100)},
    ),
    "streaming": (
        {"stream": True},
        {
            "greedy": {},
            "long": _params(max_new_tokens=100),
            "one token": _params(max_new_tokens=1),
            "stop string": _params(stop=["e"]),
            "stop string, kept": _params(stop=["ok"], no_stop_trim=True),
            "unicode": {"prompt": "unicode"},
            "sampled": _params(temperature=0.9, sampling_seed=21),
            "penalized": _params(presence_penalty=1.0),
            "json schema": _params(json_schema=_SCHEMA),
            "log-probabilities": {"return_logprob": True, "top_logprobs_num": 2},
        },
    ),
    "several outputs": (
        {},
        {
            "n 2": _params(n=2),
            "n 4, stops": _params(n=4, stop=["e"]),
            "n 3, long": _params(n=3, max_new_tokens=64),
            "n 2, sampled": _params(n=2, temperature=0.9, sampling_seed=8),
            "three prompts": {"text": [PROMPTS["count"], PROMPTS["noise"], PROMPTS["code"]]},
        },
    ),
    "prompts": (
        {},
        {
            "one token": {"prompt": "one token"},
            "a space": {"prompt": "space"},
            "unicode": {"prompt": "unicode"},
            "prose": {"prompt": "prose"},
            "long": {"prompt": "long"},
            "long, sampled": {"prompt": "long", **_params(temperature=0.9, sampling_seed=22)},
            "one id": {"input_ids": [91]},
            "ids": {"input_ids": [1, 55, 268, 290, 468, 76, 87, 284]},
            "same as another": {"prompt": "records"},
            "refused by both: a negative length": _params(max_new_tokens=-1),
            "refused by both: longer than the context": {"text": "word " * 20000},
        },
    ),
    "together": (
        _params(max_new_tokens=48),
        {
            "sampling, penalties, bias": _params(
                temperature=0.8,
                sampling_seed=23,
                top_p=0.9,
                frequency_penalty=0.4,
                logit_bias={"40": 3.0},
            ),
            "grammar, penalties, logprobs": {
                "return_logprob": True,
                **_params(regex="[a-z =;]{8,40}", repetition_penalty=1.2),
            },
            "sampling, grammar, logprobs": {
                "return_logprob": True,
                "top_logprobs_num": 2,
                **_params(json_schema=_SCHEMA, temperature=1.0, sampling_seed=24),
            },
            "stream, penalties, stops": {
                "stream": True,
                **_params(frequency_penalty=0.6, stop=["ro", "ka"]),
            },
            "stream, sampling, min_new_tokens": {
                "stream": True,
                **_params(temperature=0.7, sampling_seed=25, min_new_tokens=10),
            },
        },
    ),
}

_CHAT = {"messages": [{"role": "user", "content": PROMPTS["count"]}]}
_COMPLETION = {"prompt": PROMPTS["table"]}
_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": json.loads(_SCHEMA)},
}
# Shared by all: temperature 0, max_tokens 24.
OPENAI: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "openai completions": (
        "/v1/completions",
        _COMPLETION,
        {
            "greedy": {},
            "stream": {"stream": True},
            "stop": {"stop": ["|"]},
            "two prompts": {"prompt": [PROMPTS["log"], PROMPTS["mixed"]]},
            "n 2": {"n": 2},
            "log-probabilities": {"logprobs": 3},
            "echo": {"echo": True},
            "seeded": {"temperature": 0.8, "seed": 26},
            "logit_bias": {"logit_bias": {"40": 6.0}},
            "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
            "regex": {"regex": "[0-9]{2,12}"},
            "stream, seeded, stop": {"stream": True, "temperature": 1.0, "seed": 27, "stop": ["a"]},
        },
    ),
    "openai chat": (
        "/v1/chat/completions",
        _CHAT,
        {
            "greedy": {},
            "stream": {"stream": True},
            "stop": {"stop": ["6"]},
            "n 2": {"n": 2},
            "log-probabilities": {"logprobs": True, "top_logprobs": 2},
            "seeded": {"temperature": 0.8, "seed": 28},
            "json schema": {"response_format": _FORMAT},
            "json object": {"response_format": {"type": "json_object"}},
            "several messages": {
                "messages": [
                    {"role": "system", "content": PROMPTS["story"]},
                    {"role": "user", "content": PROMPTS["prose"]},
                ]
            },
            "stream, log-probabilities": {"stream": True, "logprobs": True},
        },
    ),
}
