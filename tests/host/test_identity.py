"""Greedy output equals plain decoding, whatever is verified and however requests come and go."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from harness import BLOCK_SIZE, Case, assert_same_ids, ids_of, prompts, run

from dcut_sglang.bench.server import Server

Reference = Callable[[list[Case]], list[list[int]]]

AUTO = {"dcut_force_ratio": -1}
CHOICES = {
    "auto": AUTO,
    "ratio 0.25": {"dcut_force_ratio": 0.25},
    "ratio 0.5": {"dcut_force_ratio": 0.5},
    "ratio 0.75": {"dcut_force_ratio": 0.75},
    "full": {"dcut_force_ratio": 1.0},
    "plain": {"dcut_force_plain": 1},
    "random lengths": {"dcut_force_random": 7},
    "fixed lengths": {"dcut_verify_len_0": 1, "dcut_verify_len_1": 16, "dcut_verify_len_2": 2},
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("concurrency", [1, 8])
def test_ids_equal_plain_decoding(
    dcut: Server, reference: Reference, choice: dict[str, float], concurrency: int
) -> None:
    cases = [Case(prompt, 64) for prompt in prompts()[:24]]
    expected = reference(cases)
    dcut.set_state(**choice, dcut_reset_metrics=1)
    found = ids_of(run(dcut, cases, concurrency))
    assert_same_ids(cases, expected, found)

    counters = dcut.dcut()
    assert counters["steps"] > 0
    assert counters["rows_verified"] == counters["rows_decided"]
    if choice == CHOICES["plain"]:
        assert counters["plain_share"] == 1 and counters["drafts_proposed"] == 0
    if choice == CHOICES["full"]:
        assert counters["rows_decided"] == BLOCK_SIZE * counters["request_steps"]
        assert counters["accept_length"] > 2  # the tiny drafter is worth something


def test_ids_with_pages_and_without_overlap(dcut_paged: Server, reference: Reference) -> None:
    cases = [Case(prompt, 64) for prompt in prompts()[:24]]
    for choice in (CHOICES["random lengths"], CHOICES["ratio 0.25"], CHOICES["plain"]):
        dcut_paged.set_state(**choice)
        assert_same_ids(cases, reference(cases), ids_of(run(dcut_paged, cases, 8)))


def test_every_length_up_to_a_block_and_eos_inside_one(
    each_dcut: Server, reference: Reference
) -> None:
    cases = [Case(prompts()[n], n) for n in range(1, BLOCK_SIZE + 1)]
    # Texts that end by themselves, so that EOS falls inside accepted runs.
    ending = [Case(prompt, 120) for prompt in prompts()[:16]]
    expected = reference(cases + ending)
    assert any(len(ids) < 120 for ids in expected[len(cases) :]), "no text ended by itself"
    each_dcut.set_state(**AUTO)
    answers = run(each_dcut, cases + ending, 8)
    assert_same_ids(cases + ending, expected, ids_of(answers))
    for case, answer in zip(cases, answers, strict=False):
        assert answer["meta_info"]["completion_tokens"] <= case.max_new_tokens


def test_more_requests_than_slots_joining_and_leaving(
    each_dcut: Server, reference: Reference
) -> None:
    """33 requests of all lengths on 16 slots: the batch changes at nearly every step."""
    draw = random.Random(3)
    cases = [Case(draw.choice(prompts()), draw.randint(1, 70)) for _ in range(33)]
    expected = reference(cases)
    for choice in (CHOICES["random lengths"], CHOICES["ratio 0.25"]):
        each_dcut.set_state(**choice)
        assert_same_ids(cases, expected, ids_of(run(each_dcut, cases, 33)))


def test_context_limit_in_the_middle_of_a_block(each_dcut: Server, reference: Reference) -> None:
    """Requests that run into the context limit end where plain decoding ends."""
    cases = [Case(prompt, 4000, ignore_eos=True) for prompt in prompts()[:4]]
    # max_new_tokens beyond the context is refused at the door; ask for what just fits.
    limits = []
    for case in cases:
        refused = each_dcut.generate(**case.body())
        assert refused.status_code == 400, refused.text
        probe = each_dcut.generate(**Case(case.prompt, 1).body()).json()
        limits.append(192 - probe["meta_info"]["prompt_tokens"] - 1)
    cases = [
        Case(case.prompt, limit, ignore_eos=True) for case, limit in zip(cases, limits, strict=True)
    ]
    for choice in (CHOICES["full"], CHOICES["random lengths"], CHOICES["plain"]):
        each_dcut.set_state(**choice)
        assert_same_ids(cases, reference(cases), ids_of(run(each_dcut, cases, 4)))
    assert each_dcut.alive
