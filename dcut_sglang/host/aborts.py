"""An aborted request's answer ends where the request would have, whatever its last step added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def end_where_due(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """Around ``Req.update_finish_state``, which looks at nothing else once a request is to abort.

    A step of one token cannot run over the request's end; one of several can, and its answer would
    carry tokens past the limit, a stop string or the end of the text. So the request's own end is
    looked for first, and the answer cut there; the reason remains that it was aborted.
    """
    from dcut_sglang.host.hooks import dcut_active

    reason = req.to_finish
    if reason is None or new_accepted_len < 2 or req.finished() or not dcut_active():
        original(req, new_accepted_len)
        return
    req.to_finish = None
    original(req, new_accepted_len)
    req.finished_reason = reason
