"""Fitting an EAGLE-3 head, replaying it, and the head that a run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dcut_sglang.training.blocks import block_loss
from dcut_sglang.training.eagle3 import Eagle3Config, Eagle3Head
from dcut_sglang.training.evaluate import Propose
from dcut_sglang.training.fit import FitConfig, ResumableFit, sample_anchors
from dcut_sglang.training.responses import Response
from dcut_sglang.training.target import layer_shape
from dcut_sglang.training.vocabulary import VocabularySample, used_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def frequent_tokens(responses: Sequence[Response], vocab_size: int, num_tokens: int) -> Tensor:
    """Returns the most frequent tokens of these responses: int64 [num_tokens], ascending.

    Where the responses use fewer, the smallest other ids fill up: byte-pair vocabularies list
    frequent merges first.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for response in responses:
        own = response.token_ids[response.num_prompt_tokens :]
        counts.scatter_add_(0, own, torch.ones_like(own))
    return counts.argsort(descending=True, stable=True)[:num_tokens].sort().values


def head_config(
    target: PreTrainedModel,
    target_layer_ids: tuple[int, ...],
    draft_vocab_size: int,
    num_unroll: int,
    target_fingerprint: dict[str, Any],
) -> Eagle3Config:
    """Returns a head whose layer has the shapes of the target's."""
    return Eagle3Config(
        **layer_shape(target),
        draft_vocab_size=min(draft_vocab_size, target.config.vocab_size),
        target_layer_ids=target_layer_ids,
        num_unroll=num_unroll,
        target_fingerprint=target_fingerprint,
    )


@torch.no_grad()
def head_from_target(
    config: Eagle3Config, target: PreTrainedModel, draft_token_ids: Tensor
) -> Eagle3Head:
    """Returns a new head that starts near the target's own end.

    Its layer copies the one in front of the target's last, on the state's side; the fusion leans
    on the latest feature; the output layer holds the target's rows. The fusion is small: the
    layer reads it normed, but the latest feature speaks of the token that is known already, and
    at its full size would drown what the layer adds to it.
    """
    head = Eagle3Head(config, draft_token_ids)
    weights = target.model.state_dict()
    source = f"layers.{max(config.num_target_layers - 2, 0)}."
    hidden = config.hidden_size
    for name, own in head.layer.state_dict().items():
        twin = weights.get(source + name)
        if name.startswith(("self_attn.q", "self_attn.k", "self_attn.v")):
            own[:, :hidden].mul_(0.2)
            own[:, hidden:] = twin
        elif name == "hidden_norm.weight":
            own.copy_(weights[source + "input_layernorm.weight"])
        elif twin is not None and name != "input_layernorm.weight":
            own.copy_(twin)
    head.fc.weight.mul_(0.02)
    head.fc.weight[:, -hidden:] += 0.05 * torch.eye(hidden)
    head.norm.weight.copy_(0.5 * weights["norm.weight"])
    head.lm_head.weight.copy_(target.get_output_embeddings().weight[draft_token_ids])
    return head


class Eagle3Fitter(ResumableFit):
    """A run that trains a head on its own outputs, as EAGLE-3's training-time test does.

    Each step takes `num_block_tokens` rows per response, in chains of `num_unroll`: row j + 1
    of a chain reads the head's state of row j, and the true token. `embed` (float [vocab,
    hidden]) stays frozen, as does the output layer.
    """

    def __init__(
        self, head: Eagle3Head, embed: Tensor, responses: Sequence[Response], config: FitConfig
    ) -> None:
        super().__init__(head, responses, config, min_tokens=3)
        self._head, self._embed = head, embed
        ids = head.draft_token_ids
        # The drafts' number of each token of the target's; -1: cannot be drafted.
        self._draft_of = torch.full((head.config.vocab_size,), -1)
        self._draft_of[ids] = torch.arange(len(ids))
        used = self._draft_of[used_tokens(self._usable)]
        self._sample = VocabularySample(
            used[used >= 0].sort().values, len(ids), config.num_extra_tokens
        )

    def _loss(self) -> Tensor:
        config, num_unroll = self._config, self._head.config.num_unroll
        batch = self._batch()
        ids = pad_sequence([r.token_ids for r in batch], batch_first=True)
        features = pad_sequence([r.features for r in batch], batch_first=True)
        lengths = torch.tensor([len(r.token_ids) for r in batch])
        # An anchor is the last known token, so row anchor - 1 is the last with a feature.
        anchors = sample_anchors(batch, config.num_block_tokens // num_unroll, self._generator)
        embeds = self._embed[ids]
        context = self._head.context(features[:, :-1].float(), embeds[:, 1:])
        chains = self._head.chains(context, anchors - 1)
        places = anchors[:, :, None] + torch.arange(num_unroll + 1)
        inside = places < lengths[:, None, None]
        tokens = ids.gather(1, places.clamp(max=ids.shape[1] - 1).flatten(1)).view_as(places)
        inputs = self._embed[tokens]
        hidden = torch.stack([chains.step(inputs[:, :, j]) for j in range(num_unroll)], dim=2)
        chosen, correction = self._sample.draw(self._generator)
        logits = hidden @ self._head.lm_head.weight[chosen].T + correction
        labels = self._draft_of[tokens[:, :, 1:]]
        # What cannot be drafted is not learnt, nor what lies behind it: it would be rejected.
        valid = (inside[:, :, 1:] & (labels >= 0)).long().cumprod(-1).bool()
        labels = self._sample.place_of[labels.clamp(min=0)].where(valid, 0)
        return block_loss(logits, labels, valid, config.gamma)


@torch.no_grad()
def head_proposer(
    head: Eagle3Head, embed: Tensor, responses: Sequence[Response], num_drafts: int
) -> Propose:
    """Returns a `Propose` that drafts chains behind any token of the given responses."""
    ids = pad_sequence([r.token_ids for r in responses], batch_first=True)
    features = pad_sequence([r.features for r in responses], batch_first=True)
    states, (keys, values) = head.context(features[:, :-1].float(), embed[ids[:, 1:]])

    @torch.no_grad()
    def propose(requests: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        known = int(anchors.max())
        part = (requests, slice(None, known))
        context = states[part], (keys[part], values[part])
        chains = head.chains(context, anchors[:, None] - 1)
        tokens = ids[requests, anchors]
        drafts, confidence = [], []
        for _ in range(num_drafts):
            logits = head.lm_head(chains.step(embed[tokens][:, None])[:, 0])
            share, best = logits.float().softmax(-1).max(-1)
            tokens = head.draft_token_ids[best]
            drafts.append(tokens)
            confidence.append(share)
        return torch.stack(drafts, 1), torch.stack(confidence, 1)

    return propose
