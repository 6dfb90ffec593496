"""SGLang's other speculative algorithms on a CPU: greedy ids of plain decoding, and real drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import COMMON_ARGS, STRICT, TARGET, Case, assert_same_ids, ids_of, prompts, run

from dcut_sglang.bench.server import Server
from dcut_sglang.host.cpu import rivals
from dcut_sglang.training.eagle3 import save
from dcut_sglang.training.eagle3_fit import (
    Eagle3Fitter,
    head_config,
    head_from_target,
    head_proposer,
)
from dcut_sglang.training.evaluate import walk
from dcut_sglang.training.fit import FitConfig
from dcut_sglang.training.responses import collect_responses, responses_of_texts
from dcut_sglang.training.target import embedding_and_head, fingerprint, load_target, load_tokenizer

NUM_DRAFTS, NUM_TOKENS = 3, 48
CHAIN = (
    *("--speculative-eagle-topk", "1", "--speculative-num-steps", str(NUM_DRAFTS)),
    *("--speculative-num-draft-tokens", str(NUM_DRAFTS + 1)),
)
CASES = [Case(prompt, NUM_TOKENS, ignore_eos=True) for prompt in prompts()[:12]]
# Compiling NGRAM's trie takes a minute of a core, once per machine.
START_S = 900
Reference = Callable[[list[Case]], list[list[int]]]


def steps_when_equal(args: tuple[str, ...], log: Path, reference: Reference) -> int:
    """Serves the cases, compares their ids, and returns the verify steps of all of them."""
    server = Server(TARGET, (*COMMON_ARGS, "--speculative-algorithm", *args), log=log, env=STRICT)
    server.start(START_S)
    try:
        answers = run(server, CASES, 4)
        # The same prompts again, one at a time: from the radix cache, and in batches of one.
        again = run(server, CASES[:3], 1)
    finally:
        server.stop()
    assert_same_ids(CASES, reference(CASES), ids_of(answers))
    assert_same_ids(CASES[:3], reference(CASES[:3]), ids_of(again))
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


def test_ngram(logs: Path, reference: Reference) -> None:
    reason = rivals.runs_on_cpu("NGRAM")
    if reason is not None:
        pytest.skip(reason)
    args = ("NGRAM", "--speculative-num-draft-tokens", "8")
    num_steps = steps_when_equal(args, logs / "ngram.log", reference)
    # Its trie learns from what is decoded, and the tiny target's text repeats itself.
    assert num_steps < 0.9 * NUM_TOKENS * len(CASES)


def test_standalone(logs: Path, reference: Reference) -> None:
    """A draft model that is the target itself is nearly always right.

    Not always: SGLang gives a draft model the text without its first token, as EAGLE heads need it.
    """
    args = ("STANDALONE", "--speculative-draft-model-path", str(TARGET), *CHAIN)
    num_steps = steps_when_equal(args, logs / "standalone.log", reference)
    at_least = -(-(NUM_TOKENS - 1) // (NUM_DRAFTS + 1)) * len(CASES)
    assert at_least <= num_steps <= 1.25 * at_least


def test_eagle3_accepts_what_its_trainer_says(
    logs: Path, tmp_path: Path, plain: Server, reference: Reference
) -> None:
    torch.manual_seed(0)
    target, tokenizer = load_target(TARGET), load_tokenizer(TARGET)
    config = head_config(target, (0, 1, 2), 500, NUM_DRAFTS, fingerprint(target))
    head = head_from_target(config, target, torch.arange(76, 576))
    embed, _ = embedding_and_head(target)
    learnt = [tokenizer(prompt)["input_ids"] for prompt in prompts()[12:44]]
    texts = collect_responses(target, learnt, (0, 1, 2), 96, tokenizer.eos_token_id)
    fitter = Eagle3Fitter(head, embed, texts, FitConfig(num_steps=60, num_block_tokens=48))
    for _ in range(60):
        fitter.step()
    save(head, tmp_path)
    args = ("EAGLE3", "--speculative-draft-model-path", str(tmp_path), *CHAIN)
    num_steps = steps_when_equal(args, logs / "eagle3.log", reference)

    # A step further, so that every step of the server lies inside the text.
    longer = [Case(c.prompt, NUM_TOKENS + NUM_DRAFTS + 1, ignore_eos=True) for c in CASES]
    inputs = [tokenizer(case.prompt)["input_ids"] for case in longer]
    ids = [a + b for a, b in zip(inputs, ids_of(run(plain, longer, 1)), strict=True)]
    lengths = [len(prompt) for prompt in inputs]
    responses, _ = responses_of_texts(
        target, ids, lengths, [False] * len(ids), (0, 1, 2), log=lambda _: None
    )
    steps = walk(responses, head_proposer(head, embed, responses, NUM_DRAFTS), NUM_DRAFTS + 1)
    met = steps.offset + 1 < NUM_TOKENS
    assert num_steps == pytest.approx(int(met.sum()), rel=0.03)
    assert steps.accepts[met].float().mean() > 0.5  # a head that guesses would show nothing


def test_what_does_not_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for algorithm in ("DFLASH", "DCUT", "STANDALONE", "EAGLE3"):
        assert rivals.runs_on_cpu(algorithm) is None
    assert "UNO has not been tried" in str(rivals.runs_on_cpu("UNO"))
    monkeypatch.setattr(rivals.shutil, "which", lambda tool: None)
    assert "finds no g++ and no ninja" in str(rivals.runs_on_cpu("NGRAM"))
