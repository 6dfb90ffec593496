"""The drafter's KV after plain steps, whose rows are written late: the same drafts follow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from harness import Case, prompts, recorded

from dcut_sglang.bench.server import Server
from dcut_sglang.host.draft_kv import superseded


def test_drafts_after_plain_steps_are_those_without_them(dcut_paged: Server, logs: Path) -> None:
    """Confidences depend on all of the drafter's KV. One run drafts at every token, alone; in the
    others most passes are plain or draft for some of the requests."""
    # Requests of different lengths, so that batches shrink and are joined in between.
    cases = [Case(prompt, 24 + 8 * (i % 4)) for i, prompt in enumerate(prompts()[:16])]
    path = logs / "steps.trace"
    whole = recorded(dcut_paged, path, {"dcut_verify_len_0": 1}, cases, 1)
    mixed = [
        step
        for seed in (7, 8, 9)
        for step in recorded(dcut_paged, path, {"dcut_force_random": seed}, cases, 4).steps
    ]
    order = list(dict.fromkeys(int(r) for step in whole.steps for r in step.requests))
    assert len(order) == 16
    # Texts are greedy, so a request is known by its prompt's length and its first confidences.
    known = {}
    for step in whole.steps:
        assert step.confidence is not None
        place = order.index(int(step.requests[0]))
        known[place, int(step.contexts[0])] = step.confidence[0]
    starts = {place: min(c for p, c in known if p == place) for place in range(16)}
    names = list(dict.fromkeys(int(r) for step in mixed for r in step.requests))
    first = {}
    for step in mixed:
        for i, request in enumerate(step.requests.tolist()):
            first.setdefault(request, int(step.contexts[i]))
    plain_before: dict[int, int] = dict.fromkeys(names, 0)
    compared = after_plain = 0
    for step in mixed:
        for i, request in enumerate(step.requests.tolist()):
            if step.confidence is None or not step.confidence[i].any():
                plain_before[request] += 1
                continue
            found, depth = step.confidence[i], int(np.count_nonzero(step.confidence[i]))
            if step.draft_block_size == whole.block_size:
                context = int(step.contexts[i])
                near = [
                    float(np.abs(found - known[place, context])[:depth].max())
                    for place in range(16)
                    if starts[place] == first[request] and (place, context) in known
                ]
                assert min(near) < 1e-3, (request, context, near)
                compared += 1
                after_plain += plain_before[request] > 0
            plain_before[request] = 0
    assert compared > 50 and after_plain > 20


def test_only_the_last_row_of_a_slot_is_written() -> None:
    slots = torch.tensor([5, 7, 5, 9, 7, 5])
    assert superseded(slots).tolist() == [True, True, True, False, False, False]
    assert not superseded(torch.tensor([4, 3, 2])).any()
