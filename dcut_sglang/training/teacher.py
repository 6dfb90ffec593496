"""The target's own distribution at every place of a text, from the features that are stored.

A greedy text tells which token the target preferred, but not by how much. On open text, where
several tokens are nearly as likely, the whole distribution teaches a drafter more per token. It
need not be stored: what the target makes of its deepest stored hidden state is a few layers away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Teacher:
    """Runs the target's layers behind the deepest one that is stored."""

    def __init__(self, target: PreTrainedModel, deepest_layer_id: int) -> None:
        self._model = target.model
        self._layers = target.model.layers[deepest_layer_id + 1 :]
        self._hidden_size = int(target.config.hidden_size)

    @torch.no_grad()
    def hidden(self, features: Tensor) -> Tensor:
        """Returns the last layer's normed output, [B, S, hidden]: what the head reads.

        features: float [B, S, feature_size], padded at the end; the deepest layer comes last.
        """
        hidden = features[..., -self._hidden_size :]
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        # Boolean, since transformers' default attention takes that beside any dtype.
        attends = positions[0, :, None] >= positions[0]
        rotation = self._model.rotary_emb(hidden, position_ids=positions)
        for layer in self._layers:
            hidden = layer(
                hidden,
                attention_mask=attends[None, None],
                position_ids=positions,
                position_embeddings=rotation,
            )
        normed: Tensor = self._model.norm(hidden)
        return normed
