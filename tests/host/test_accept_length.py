"""A checkpoint accepts in the server what the trainer's own evaluation says it accepts."""

from __future__ import annotations

import pytest
from harness import BLOCK_SIZE, DRAFTER, TARGET, Case, ids_of, prompts, run

from dcut_sglang.bench.server import Server
from dcut_sglang.training.drafter import load
from dcut_sglang.training.evaluate import drafter_proposer, walk
from dcut_sglang.training.responses import responses_of_texts
from dcut_sglang.training.target import embedding_and_head, load_target, load_tokenizer

NUM_TOKENS = 64


def test_server_and_trainer_agree(plain: Server, dcut_paged: Server) -> None:
    """Without overlap scheduling, which adds a step behind a request's end, the same steps run."""
    cases = [Case(prompt, NUM_TOKENS, ignore_eos=True) for prompt in prompts()[:16]]
    dcut_paged.set_state(dcut_force_ratio=1.0, dcut_reset_metrics=1)
    run(dcut_paged, cases, 4)
    counters = dcut_paged.dcut()

    # A block further, so that every step of the server lies inside the text.
    longer = [Case(c.prompt, NUM_TOKENS + BLOCK_SIZE, ignore_eos=True) for c in cases]
    target, tokenizer = load_target(TARGET), load_tokenizer(TARGET)
    inputs = [tokenizer(case.prompt)["input_ids"] for case in longer]
    texts = [a + b for a, b in zip(inputs, ids_of(run(plain, longer, 1)), strict=True)]
    drafter = load(DRAFTER)
    responses, own_share = responses_of_texts(
        target,
        texts,
        [len(ids) for ids in inputs],
        [False] * len(texts),
        drafter.config.target_layer_ids,
        log=lambda _: None,
    )
    assert own_share > 0.99
    embed, head = embedding_and_head(target)
    steps = walk(
        responses, drafter_proposer(drafter, embed, head, responses, BLOCK_SIZE), BLOCK_SIZE
    )
    # A request goes on while it has emitted less than what it asked for, one token by its prefill.
    met = steps.offset + 1 < NUM_TOKENS
    assert counters["request_steps"] == pytest.approx(int(met.sum()), rel=0.02)
    expected = float(steps.accepts[met].float().mean()) + 1
    assert counters["accept_length"] == pytest.approx(expected, rel=0.02)
