"""An abort that comes in the step in which a request ends."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from dcut_sglang.host import aborts, hooks


@pytest.mark.parametrize(
    ("sampling", "output", "expected"),
    [
        ({"max_new_tokens": 3}, [5, 6, 7, 8, 9], [5, 6, 7]),
        ({"max_new_tokens": 9, "stop_token_ids": [7]}, [5, 6, 7, 8, 9], [5, 6, 7]),
        ({"max_new_tokens": 9}, [5, 6, 7, 8, 9], [5, 6, 7, 8, 9]),
    ],
)
def test_an_aborted_answer_ends_where_it_would_have(
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
    output: list[int],
    expected: list[int],
) -> None:
    """An abort in the step that runs over the request's end: found by the fuzz, 9 tokens over."""
    monkeypatch.setattr(hooks, "dcut_active", lambda: True)
    params = SamplingParams(**sampling)
    params.normalize(None)
    request = Req("r", "", [1, 2], params, vocab_size=100)
    request.output_ids.extend(output)
    request.to_finish = FINISH_ABORT()
    finish = getattr(Req.update_finish_state, "__wrapped__", Req.update_finish_state)
    aborts.end_where_due(finish, request, new_accepted_len=4)
    assert request.finished() and isinstance(request.finished_reason, FINISH_ABORT)
    assert list(request.output_ids_through_stop) == expected
