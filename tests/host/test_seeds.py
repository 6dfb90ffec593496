"""Seeded requests emit plain decoding's tokens, whoever else is served."""

from __future__ import annotations

import random

from features import Body, answer, assert_same_answers, greedy_bodies, with_margins
from harness import prompts

from dcut_sglang.bench.server import Server

KINDS: tuple[Body, ...] = (
    {"temperature": 0.8},
    {"temperature": 1.3},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "top_k": 12},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.7},
    {"temperature": 0.9, "frequency_penalty": 0.5},
    {"temperature": 1.2, "regex": "[a-z ]{80}"},
    {"temperature": 1.0, "top_p": 0.9, "min_new_tokens": 20},
)


def seeded_bodies() -> list[Body]:
    """Two seeds for each kind; the second goes without a seed, which means 42 to SGLang."""
    return [
        {
            "text": prompts()[i],
            "sampling_params": {
                "max_new_tokens": 40,
                **KINDS[i % len(KINDS)],
                **({"sampling_seed": 1000 + i} if i < len(KINDS) else {}),
            },
        }
        for i in range(2 * len(KINDS))
    ]


def assert_all_but_one_equal(bodies: list[Body], wanted: list[Body], found: list[Body]) -> None:
    """A draw may change hands where two of a row's values tie to rounding: one in a batch may
    part, and where is printed."""
    equal = 0
    for body, want, got in zip(bodies, wanted, found, strict=True):
        if want["output_ids"] == got["output_ids"]:
            equal += 1
            continue
        pairs = enumerate(zip(want["output_ids"], got["output_ids"], strict=False))
        print(body["sampling_params"], next(i for i, (a, b) in pairs if a != b))
    assert equal >= len(bodies) - 1


def test_seeded_requests_equal_plain_decoding(plain: Server, dcut_paged: Server) -> None:
    """Alone on the plain server; here in one batch with greedy requests of every feature."""
    bodies = seeded_bodies()
    wanted = answer(plain, bodies, 1)
    company = greedy_bodies(40)[:6]
    expected = answer(plain, company, 1)
    for choice in (
        {"dcut_force_ratio": 0.25},
        {"dcut_force_ratio": 1.0},
        {"dcut_force_random": 5},
        {"dcut_force_plain": 1},
        {"dcut_force_ratio": -1},
    ):
        dcut_paged.set_state(**choice)
        order = list(range(len(bodies) + len(company)))
        random.Random(str(choice)).shuffle(order)
        mixed = [(bodies + company)[i] for i in order]
        answers = dict(zip(order, answer(dcut_paged, mixed, 16), strict=True))
        found = [answers[i] for i in range(len(bodies))]
        assert_all_but_one_equal(bodies, wanted, found)
        for i, want in enumerate(expected):
            assert answers[len(bodies) + i]["output_ids"] == want["output_ids"]


def test_seeds_matter_and_repeat(dcut_paged: Server) -> None:
    dcut_paged.set_state(dcut_force_random=6)
    params = {"temperature": 1.5, "max_new_tokens": 30}
    one, same, other = (
        {"text": prompts()[0], "sampling_params": {**params, "sampling_seed": seed}}
        for seed in (7, 7, 8)
    )
    first, second, third = (a["output_ids"] for a in answer(dcut_paged, [one, same, other], 3))
    assert first == second != third


def test_min_p_with_seeds_is_refused(dcut_paged: Server) -> None:
    """SGLang's scheduler dies of an assertion there."""
    refused = dcut_paged.generate(
        text=prompts()[0], sampling_params={"min_p": 0.1, "max_new_tokens": 4}
    )
    assert refused.status_code == 400 and "leave out min_p" in refused.text


def test_retracted_requests_go_on_as_if_nothing_had_happened(
    plain: Server, dcut_retracting: Server
) -> None:
    """Counts, notes of processors, minimum lengths, grammars and seeds, under overlap."""
    greedy, seeded = greedy_bodies(), seeded_bodies()[:8]
    wanted = answer(plain, with_margins(greedy), 8), answer(plain, seeded, 1)
    retractions = 0
    for choice in ({"dcut_force_random": 7}, {"dcut_force_ratio": 0.25}):
        dcut_retracting.set_state(**choice)
        found = answer(dcut_retracting, greedy + seeded, 16)
        assert assert_same_answers(greedy, wanted[0], found[: len(greedy)]) <= 1
        assert_all_but_one_equal(seeded, wanted[1], found[len(greedy) :])
        retractions += sum(got["meta_info"]["num_retractions"] for got in found)
    assert retractions > 20
