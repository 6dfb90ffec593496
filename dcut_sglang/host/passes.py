"""Several passes of the target in one plain step, where nothing has to happen between them.

What a decode step costs beside its forward (scheduling, results, streams) is spent once per step,
so that two passes in one step cost less than two steps. Between passes nobody joins, stops or is
told its tokens, as in a step that accepts drafts: tokens behind a request's end are dropped.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_schedule

from dcut_sglang.host.choice import can_choose_alone


def most_passes(batch: Any, block_size: int) -> int:
    """Passes that a plain step of this batch may make, at most as many as a block has tokens.

    One where the next token depends on what the scheduler does with this one (grammars, counted
    tokens, log-probabilities), and under overlap scheduling, which hides what would be saved.
    No request is run past the length that it may have.
    """
    if not get_schedule().disable_overlap_schedule or not can_choose_alone(batch):
        return 1
    left = min(req.sampling_params.max_new_tokens - len(req.output_ids) for req in batch.reqs)
    return max(1, min(block_size, left))


def count_passes(reqs: list[Any], num_more: int) -> None:
    """Let SGLang's statistics of each request say what ``num_more`` further plain steps would.

    It counts a verify per step (``_resolve_spec_v2_tokens``), of which a client reads its accept
    length.
    """
    for req in reqs:
        req.spec_verify_ct += num_more
        req.spec_num_cap_tokens += num_more
        for _ in range(num_more):
            req.update_spec_correct_drafts_histogram(0)
            req.update_spec_cap_lens_histogram(1)
