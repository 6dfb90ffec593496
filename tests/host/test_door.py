"""Requests that are not served are refused; the others go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness import Case, prompts

from dcut_sglang.bench.server import Server

GREEDY = {"temperature": 0, "max_new_tokens": 8}
REFUSED: dict[str, dict[str, Any]] = {
    "beam_width": {"sampling_params": {"beam_width": 2, "max_new_tokens": 8}},
    "return_sampling_mask": {"sampling_params": GREEDY, "return_sampling_mask": True},
    "return_hidden_states": {"sampling_params": GREEDY, "return_hidden_states": True},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_unserved_request_gets_400(dcut: Server, body: dict[str, Any], stream: bool) -> None:
    answer = dcut.generate(text=prompts()[0], stream=stream, **body)
    assert answer.status_code == 400, answer.text
    # Hidden states need an option, which DCUT refuses at start-up; SGLang may say so first.
    assert "leave out" in answer.text or "not configured to return hidden states" in answer.text


def test_other_requests_go_on_while_one_is_refused(dcut: Server) -> None:
    dcut.set_state(dcut_force_ratio=0.5)
    with ThreadPoolExecutor(5) as pool:
        served = [pool.submit(dcut.generate, **Case(p, 60).body()) for p in prompts()[:4]]
        refused = pool.submit(dcut.generate, text=prompts()[4], **REFUSED["beam_width"])
        assert refused.result().status_code == 400
        assert [f.result().status_code for f in served] == [200] * 4


SERVED: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {"40": 8.0, "41": -100.0}},
    "stop string": {"stop": ["e"]},
    "stop token": {"stop_token_ids": list(range(60, 120))},
    "stop regex": {"stop_regex": "[aeiou] "},
    "no_stop_trim": {"stop": ["e"], "no_stop_trim": True},
    "ignore_eos": {"ignore_eos": True},
    "n": {"n": 2},
    "special tokens": {"skip_special_tokens": False},
}


@pytest.mark.parametrize("params", SERVED.values(), ids=SERVED)
def test_served_parameters_equal_plain_decoding(
    dcut: Server, plain: Server, params: dict[str, Any]
) -> None:
    """Text, ids and finish reason, with parameters that act on logits or on length."""
    dcut.set_state(dcut_force_random=2)
    for prompt in prompts()[:6]:
        body = {
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 48, **params},
        }
        expected, found = (server.generate(**body).json() for server in (plain, dcut))
        if not isinstance(expected, list):
            expected, found = [expected], [found]
        for want, got in zip(expected, found, strict=True):
            assert got["output_ids"] == want["output_ids"]
            assert got["text"] == want["text"]
            assert got["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]
