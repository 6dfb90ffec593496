"""Several passes of the target in one plain step, where nothing has to happen between them.

What a decode step costs beside its forward (scheduling, results, streams) is spent once per step,
so that two passes in one step cost less than two steps. Between passes nobody joins, stops or is
told its tokens, as in a step that accepts drafts: tokens behind a request's end are dropped. Once a
message waits for the scheduler (a request, an abort), the step ends behind the pass that runs: a
newcomer's place would stay empty for longer than with plain decoding, which costs more than the
step saves.
"""

from __future__ import annotations

from typing import Any

import zmq
from sglang.srt.runtime_context import get_schedule

from dcut_sglang.host.choice import can_choose_alone


class Arrivals:
    """Whether a message waits for the scheduler, which reads them between its steps."""

    def __init__(self) -> None:
        self._socket: zmq.Socket | None = None

    def watch(self, socket: Any) -> None:
        """Look at the scheduler's end of the tokenizer's messages, if it is a socket."""
        self._socket = socket if isinstance(socket, zmq.Socket) else None

    @property
    def can_be_seen(self) -> bool:
        return self._socket is not None

    def are_waiting(self) -> bool:
        """False as well where messages cannot be seen."""
        return self._socket is not None and bool(self._socket.poll(0))


def watch_arrivals(result: None, scheduler: Any) -> None:
    """AFTER hook on ``Scheduler.init_request_receiver``."""
    arrivals = getattr(scheduler.draft_worker, "arrivals", None)
    if arrivals is not None:
        arrivals.watch(scheduler.recv_from_tokenizer)


def most_passes(worker: Any, batch: Any) -> int:
    """Passes that a plain step of this batch may make, at most as many as a block has tokens.

    One where the next token depends on what the scheduler does with this one (grammars, counted
    tokens, log-probabilities), where messages cannot be seen or only by one of several ranks,
    where what happens must not depend on when they come, and under overlap scheduling, which hides
    what would be saved. No request is run past the length that it may have.
    """
    is_led_by_messages = worker.arrivals.can_be_seen and worker.ranks.size == 1
    if (
        not is_led_by_messages
        or worker.config.deterministic
        or not get_schedule().disable_overlap_schedule
        or not can_choose_alone(batch)
    ):
        return 1
    left = min(req.sampling_params.max_new_tokens - len(req.output_ids) for req in batch.reqs)
    return max(1, min(worker.block_size, left))


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
