"""Requests that DCUT does not serve, refused at the door.

Each is a feature of plain decoding that the verify path would ignore or get wrong without a
word, or one that SGLang's scheduler dies of. A refusal is an HTTP 400 with a sentence,
streaming or not; other requests go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestRefusal:
    """A request feature that is refused: how it shows, and what to do."""

    asked_for: Callable[[Any], bool]
    sentence: str


# ``r`` is SGLang's TokenizedGenerateReqInput. Its sampling parameters are normalized:
# temperature 0 has become top_k 1.
REFUSALS = (
    RequestRefusal(
        lambda r: r.sampling_params.min_p > 0
        and r.sampling_params.top_k > 1
        and get_exec().deterministic.enable_deterministic_inference,
        "SGLang does not draw with min_p on a server with seeds: leave out min_p, or start "
        "without --enable-deterministic-inference",
    ),
    RequestRefusal(
        lambda r: (r.sampling_params.beam_width or 1) > 1,
        "DCUT does not serve beam search: leave out beam_width",
    ),
    RequestRefusal(
        lambda r: getattr(r.sampling_params, "watermark", None) is not None,
        "DCUT does not watermark: leave out watermark",
    ),
    RequestRefusal(
        lambda r: bool(r.return_sampling_mask),
        "DCUT does not return sampling masks: leave out return_sampling_mask",
    ),
    RequestRefusal(
        lambda r: bool(r.return_hidden_states),
        "DCUT does not return hidden states: leave out return_hidden_states",
    ),
)


def sentence_for(request: Any) -> str | None:
    """Why this request is refused, all reasons in one text; None when it is served."""
    sentences = [refusal.sentence for refusal in REFUSALS if refusal.asked_for(request)]
    return ". ".join(sentences) + "." if sentences else None


def refuse_unserved(tokenized: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on ``TokenizerManager._create_tokenized_object``.

    Raises:
        ValueError: the refusal, which SGLang answers with HTTP 400 (in a stream that has begun,
            with an error event; see ``refuse_stream``).
    """
    from dcut_sglang.host.hooks import dcut_active

    if dcut_active() and hasattr(tokenized, "return_logprob"):
        sentence = sentence_for(tokenized)
        if sentence is not None:
            raise ValueError(sentence)


async def refuse_stream(serve: Callable[..., Any], obj: Any, request: Any) -> Any:
    """AROUND hook on ``http_server.serve_generate_request``.

    /generate starts to stream, with status 200, before it looks at the request. The OpenAI
    routes look first.
    """
    from sglang.srt.entrypoints import http_server

    from dcut_sglang.host.hooks import dcut_active

    if obj.stream and dcut_active():
        manager = http_server._global_state.tokenizer_manager
        for params in _as_list(obj.sampling_params or {}):
            try:
                parsed = SamplingParams(**{**(manager.preferred_sampling_params or {}), **params})
                parsed.normalize(manager.tokenizer)
            except (TypeError, ValueError):
                continue  # malformed: SGLang's own answer says how
            sentence = sentence_for(_StreamRequest(parsed, obj))
            if sentence is not None:
                return http_server._create_error_response(ValueError(sentence))
    return await serve(obj, request)


class _StreamRequest:
    """The fields that ``REFUSALS`` reads, of a request that is not tokenized yet."""

    def __init__(self, sampling_params: SamplingParams, obj: Any) -> None:
        self.sampling_params = sampling_params
        self.return_hidden_states = _any(obj.return_hidden_states)
        self.return_sampling_mask = _any(obj.return_sampling_mask)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _any(value: Any) -> bool:
    return any(map(bool, _as_list(value)))
