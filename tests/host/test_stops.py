"""Ends of requests at every offset of an accepted run, and streams that add up to the answer."""

from __future__ import annotations

import json

import pytest
from features import Body, answer, assert_same_answers
from features import with_margins as margins
from harness import BLOCK_SIZE, prompts

from dcut_sglang.bench.server import Server

# A server, and what it is forced to; the last one's plain steps make many passes.
CHOICES: dict[str, tuple[str, dict[str, float]]] = {
    "full": ("dcut", {"dcut_force_ratio": 1.0}),
    "random lengths": ("dcut", {"dcut_force_random": 8}),
    "plain passes": ("dcut_paged", {"dcut_force_plain": 1}),
}


@pytest.fixture(scope="module")
def bare(plain: Server) -> list[Body]:
    """Texts that the drafter predicts well, so that accepted runs are long."""
    return answer(
        plain,
        [
            {"text": p, "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
            for p in prompts()[:4]
        ],
        4,
    )


def stop_bodies(bare: list[Body]) -> list[Body]:
    """For every offset of a block: a stop at that token, as id, as string and as regex."""
    bodies: list[Body] = []
    for offset in range(2 * BLOCK_SIZE):
        text, whole = prompts()[offset % 4], bare[offset % 4]
        token = whole["output_ids"][offset + 1]
        piece = whole["text"][offset + 3 : offset + 7]
        for stop in (
            {"stop_token_ids": [token]},
            {"stop": [piece]},
            {"stop": [piece], "no_stop_trim": True},
            {"stop_regex": f"[a-z]{{{3 + offset % 4}}}[^a-z]"},
        ):
            bodies.append(
                {
                    "text": text,
                    "sampling_params": {"temperature": 0, "max_new_tokens": 40, **stop},
                }
            )
    return bodies


@pytest.fixture(scope="module")
def wanted(plain: Server, bare: list[Body]) -> list[Body]:
    """Plain decoding's answers to ``stop_bodies``."""
    answers = answer(plain, margins(stop_bodies(bare)), 16)
    reasons = [a["meta_info"]["finish_reason"] for a in answers]
    assert sum(reason["type"] == "stop" for reason in reasons) > 3 * BLOCK_SIZE
    assert {type(r["matched"]) for r in reasons if r["type"] == "stop"} == {int, str}
    return answers


@pytest.mark.parametrize("server, choice", CHOICES.values(), ids=CHOICES)
def test_stops_at_every_offset(
    request: pytest.FixtureRequest,
    bare: list[Body],
    wanted: list[Body],
    server: str,
    choice: dict[str, float],
) -> None:
    """Ids, trimmed text, finish reason with what matched, and counts equal plain decoding's."""
    bodies, dcut = stop_bodies(bare), request.getfixturevalue(server)
    dcut.set_state(**choice)
    assert assert_same_answers(bodies, wanted, answer(dcut, bodies, 16)) == 0


def test_logprobs_end_where_the_answer_ends(dcut: Server, bare: list[Body]) -> None:
    dcut.set_state(dcut_force_ratio=1.0)
    bodies = [
        {**body, "return_logprob": True, "top_logprobs_num": 1} for body in stop_bodies(bare)[:32]
    ]
    for got in answer(dcut, bodies, 16):
        meta = got["meta_info"]
        assert meta["completion_tokens"] == len(got["output_ids"])
        ids = [token for _, token, *_ in meta["output_token_logprobs"]]
        assert ids[: len(got["output_ids"])] == got["output_ids"]
        assert len(ids) == len(got["output_ids"]) == len(meta["output_top_logprobs"])


@pytest.mark.parametrize("extra", [{}, {"return_logprob": True}], ids=["text", "logprobs"])
def test_streams_add_up(dcut: Server, bare: list[Body], extra: Body) -> None:
    """Chunks of /generate (cumulative) and of the OpenAI route (pieces) end in the same text."""
    dcut.set_state(dcut_force_random=2)
    for body in stop_bodies(bare)[5:29:6]:
        [whole] = answer(dcut, [{**body, **extra}], 1)
        stream = dcut.session.post(
            f"{dcut.url}/generate", json={**body, **extra, "stream": True}, stream=True
        )
        chunks = [
            json.loads(line[6:])
            for line in stream.iter_lines()
            if line.startswith(b"data: ") and line != b"data: [DONE]"
        ]
        texts = [chunk["text"] for chunk in chunks]
        assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
        assert texts[-1] == whole["text"] and chunks[-1]["output_ids"] == whole["output_ids"]
        params = body["sampling_params"]
        stream = dcut.session.post(
            f"{dcut.url}/v1/completions",
            json={"model": "default", "prompt": body["text"], "max_tokens": 40, "stream": True}
            | {k: v for k, v in params.items() if k != "max_new_tokens"},
            stream=True,
        )
        pieces = [
            json.loads(line[6:])["choices"][0]["text"]
            for line in stream.iter_lines()
            if line.startswith(b"data: ") and line != b"data: [DONE]"
        ]
        assert "".join(pieces) == whole["text"]
