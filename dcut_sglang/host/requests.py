"""Requests that DCUT does not serve correctly yet, refused at the door.

Each is a feature of plain decoding that the verify path would ignore or get wrong without a
word. A refusal is an HTTP 400 with a sentence, streaming or not; other requests go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RequestRefusal:
    """A request feature that is refused: how it shows, and what to do."""

    asked_for: Callable[[Any], bool]
    sentence: str


# ``r`` is SGLang's TokenizedGenerateReqInput. Its sampling parameters are normalized:
# temperature 0 has become top_k 1.
REFUSALS = (
    RequestRefusal(
        lambda r: r.sampling_params.top_k != 1,
        "DCUT decodes greedily for now: send temperature 0 (or top_k 1)",
    ),
    RequestRefusal(
        lambda r: r.sampling_params.frequency_penalty != 0
        or r.sampling_params.presence_penalty != 0
        or r.sampling_params.repetition_penalty != 1,
        "DCUT does not apply frequency_penalty, presence_penalty or repetition_penalty yet: "
        "leave them out",
    ),
    RequestRefusal(
        lambda r: r.sampling_params.min_new_tokens > 0,
        "DCUT does not honour min_new_tokens yet: leave it out",
    ),
    RequestRefusal(
        lambda r: any(
            getattr(r.sampling_params, name)
            for name in ("json_schema", "regex", "ebnf", "structural_tag")
        ),
        "DCUT does not serve grammars (json_schema, regex, ebnf, structural_tag) yet: "
        "leave them out",
    ),
    RequestRefusal(
        lambda r: bool(r.return_logprob),
        "DCUT does not return log-probabilities yet: leave out return_logprob or logprobs",
    ),
    RequestRefusal(
        lambda r: bool(r.custom_logit_processor),
        "DCUT does not run custom logit processors yet: leave out custom_logit_processor",
    ),
    RequestRefusal(
        lambda r: bool(r.sampling_params.custom_params),
        "DCUT does not honour custom_params (a thinking budget, for example) yet: leave them out",
    ),
    RequestRefusal(
        lambda r: (r.sampling_params.beam_width or 1) > 1,
        "DCUT does not serve beam search: leave out beam_width",
    ),
    RequestRefusal(
        lambda r: bool(r.return_hidden_states),
        "DCUT does not return hidden states: leave out return_hidden_states",
    ),
    RequestRefusal(
        lambda r: bool(r.return_sampling_mask),
        "DCUT does not return sampling masks: leave out return_sampling_mask",
    ),
)


def refuse_unserved(tokenized: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on ``TokenizerManager._create_tokenized_object``.

    Raises:
        ValueError: the sentences of all refusals, which SGLang answers with HTTP 400.
    """
    from dcut_sglang.host.hooks import dcut_active

    if not dcut_active() or not hasattr(tokenized, "return_logprob"):
        return
    sentences = [refusal.sentence for refusal in REFUSALS if refusal.asked_for(tokenized)]
    if sentences:
        raise ValueError(". ".join(sentences) + ".")
