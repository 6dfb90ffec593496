"""An EAGLE-3 draft head as a torch module, in SGLang's `LlamaForCausalLMEagle3` format.

EAGLE-3 (arXiv 2503.01840) drafts one token per forward. Row p of the head reads the embedding of
token p + 1 and a state of position p, and predicts token p + 2. As long as the target has run over
position p, that state is a fusion of three of the target's hidden states; behind it, it is the
head's own output of row p - 1, which is what training has to get it used to. Embeddings are the
target's; the output layer knows the `draft_vocab_size` most frequent tokens only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dcut_sglang.training.drafter import GatedMLP, KeyValue, apply_rope
from dcut_sglang.training.files import replace_atomically, write_text


@dataclass(frozen=True)
class Eagle3Config:
    """Architecture of a head.

    `hidden_size` and `vocab_size` are the target's. `target_layer_ids` are ascending, 0-based, and
    mean the hidden state AFTER that target layer, as SGLang's `eagle_aux_hidden_state_layer_ids`
    do; the last layer is excluded, because SGLang captures a state as the input of the layer that
    follows. `num_unroll` is how many drafts in a row the head is trained for.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    num_unroll: int = 6
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    target_fingerprint: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        ids, last = self.target_layer_ids, self.num_target_layers - 2
        if len(ids) != 3 or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > last:
            raise ValueError(f"target_layer_ids must be three ascending of 0..{last}, got {ids}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must lie in 1..{self.vocab_size}, got {self.draft_vocab_size}"
            )
        if self.num_unroll < 1:
            raise ValueError(f"num_unroll must be at least 1, got {self.num_unroll}")

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "num_target_layers": self.num_target_layers,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.target_layer_ids),
                "num_unroll": self.num_unroll,
                "target_fingerprint": self.target_fingerprint,
            },
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Eagle3Config:
        """Reads what `to_json` returns."""
        eagle = data["eagle_config"]
        return cls(
            hidden_size=data["hidden_size"],
            num_heads=data["num_attention_heads"],
            num_kv_heads=data["num_key_value_heads"],
            head_dim=data["head_dim"],
            ffn_size=data["intermediate_size"],
            vocab_size=data["vocab_size"],
            draft_vocab_size=data["draft_vocab_size"],
            target_layer_ids=tuple(eagle["eagle_aux_hidden_state_layer_ids"]),
            num_target_layers=data["num_target_layers"],
            num_unroll=eagle["num_unroll"],
            rope_theta=data["rope_theta"],
            rms_norm_eps=data["rms_norm_eps"],
            max_position_embeddings=data["max_position_embeddings"],
            target_fingerprint=eagle.get("target_fingerprint"),
        )


class ChainAttention(nn.Module):
    """Attention of a row to the rows that the target has run over and to drafts in front of it."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * hidden, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=False)

    def key_value(self, x: Tensor, positions: Tensor) -> KeyValue:
        """x: [..., 2 * hidden], positions: [...]; returns two [..., kv_heads, head_dim]."""
        shape = (*x.shape[:-1], self.config.num_kv_heads, self.config.head_dim)
        key = apply_rope(self.k_proj(x).view(shape), positions, self.config.rope_theta)
        return key, self.v_proj(x).view(shape)

    def forward(
        self, x: Tensor, positions: Tensor, context: KeyValue, seen: Tensor, chain: KeyValue
    ) -> Tensor:
        """One row of each of N chains per sequence.

        x: [B, N, 2 * hidden]; context: two [B, S, kv_heads, head_dim]; seen: bool [B, N, S];
        chain: the chain's own earlier rows, two [B, N, j, kv_heads, head_dim], j may be 0.
        Returns [B, N, hidden].
        """
        c = self.config
        query = self.q_proj(x).unflatten(-1, (c.num_heads, c.head_dim))
        query = apply_rope(query, positions, c.rope_theta) * c.head_dim**-0.5
        query = query.unflatten(2, (c.num_kv_heads, -1))  # query heads by the KV head they share
        to_context = torch.einsum("bnkgd,bskd->bnkgs", query, context[0])
        to_context = to_context.masked_fill(~seen[:, :, None, None], -math.inf)
        to_chain = torch.einsum("bnkgd,bnjkd->bnkgj", query, chain[0])
        shares = torch.cat([to_context, to_chain], dim=-1).softmax(-1)
        num_context = to_context.shape[-1]
        out = torch.einsum("bnkgs,bskd->bnkgd", shares[..., :num_context], context[1])
        out = out + torch.einsum("bnkgj,bnjkd->bnkgd", shares[..., num_context:], chain[1])
        return self.o_proj(out.flatten(2))


class Eagle3Layer(nn.Module):
    """The head's one layer; embedding and state are normed apart and read side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = ChainAttention(config)
        self.mlp = GatedMLP(hidden, config.ffn_size)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def inputs(self, embeds: Tensor, states: Tensor) -> Tensor:
        """[..., hidden] each; returns [..., 2 * hidden]."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(states)], dim=-1)

    def finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """Adds attention and MLP to the state: [..., hidden]."""
        x = states + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """The whole head; parameter names are those of the checkpoint.

    `lm_head` and the embeddings come from the target and stay frozen. `draft_token_ids` (int64
    [draft_vocab_size], ascending) are the target's ids of the tokens that it can draft.
    """

    draft_token_ids: Tensor

    def __init__(self, config: Eagle3Config, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(False)
        if draft_token_ids is None:
            draft_token_ids = torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_token_ids", draft_token_ids.clone())
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=scale / math.sqrt(parameter.shape[1]))

    @property
    def layer(self) -> Eagle3Layer:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def context(self, features: Tensor, next_embeds: Tensor) -> tuple[Tensor, KeyValue]:
        """States, keys and values of the rows that the target has run over.

        features: [B, S, 3 * hidden], the chosen layers concatenated in ascending order;
        next_embeds: [B, S, hidden], embedding of the token behind each position.
        """
        states = self.fc(features)
        positions = torch.arange(states.shape[1], device=states.device)
        x = self.layer.inputs(next_embeds, states)
        return states, self.layer.self_attn.key_value(x, positions)

    def chains(self, context: tuple[Tensor, KeyValue], last: Tensor) -> Chains:
        """Starts chains behind rows `last` (int64 [B, N]) of each sequence's context."""
        return Chains(self, context, last)


class Chains:
    """N chains of drafts per sequence, a row at a time."""

    def __init__(self, head: Eagle3Head, context: tuple[Tensor, KeyValue], last: Tensor) -> None:
        states, self._context = context
        self._head, self._position = head, last
        rows = torch.arange(states.shape[1], device=states.device)
        self._seen = rows <= last[:, :, None]
        self._states = states.gather(1, last[:, :, None].expand(-1, -1, states.shape[-1]))
        empty = self._context[0].new_zeros((*last.shape, 0, *self._context[0].shape[2:]))
        self._chain: KeyValue = (empty, empty)
        self._is_first = True

    def step(self, embeds: Tensor) -> Tensor:
        """Reads each chain's newest token (its embedding, [B, N, hidden]) and goes a row on.

        Returns [B, N, hidden], normed, ready for `lm_head`.
        """
        layer = self._head.layer
        x = layer.inputs(embeds, self._states)
        if not self._is_first:  # the first row's own key and value are part of the context
            own = layer.self_attn.key_value(x, self._position)
            key, value = (
                torch.cat([old, new[:, :, None]], dim=2)
                for old, new in zip(self._chain, own, strict=True)
            )
            self._chain = (key, value)
        attended = layer.self_attn(x, self._position, self._context, self._seen, self._chain)
        self._states = layer.finish(self._states, attended)
        self._position, self._is_first = self._position + 1, False
        hidden: Tensor = self._head.norm(self._states)
        return hidden


def save(head: Eagle3Head, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes config.json and model.safetensors, each complete or not at all."""
    state = {
        name: parameter.detach().to(dtype).contiguous()
        for name, parameter in head.named_parameters()
    }
    ids = head.draft_token_ids
    # SGLang's format: the target's id minus the draft's, and which target ids can be drafted.
    state["d2t"] = ids - torch.arange(len(ids))
    state["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    data = head.config.to_json() | {"dtype": str(dtype).removeprefix("torch.")}
    replace_atomically(
        folder / "model.safetensors", lambda temp: save_file(state, temp, {"format": "pt"})
    )
    write_text(folder / "config.json", json.dumps(data, indent=1) + "\n")


def load(folder: Path) -> Eagle3Head:
    """Reads a checkpoint as float32; missing or unexpected weights raise."""
    config = Eagle3Config.from_json(json.loads((folder / "config.json").read_text()))
    state = load_file(folder / "model.safetensors")
    ids = state.pop("d2t") + torch.arange(config.draft_vocab_size)
    del state["t2d"]
    head = Eagle3Head(config)
    head.load_state_dict({k: v.float() for k, v in state.items()} | {"draft_token_ids": ids})
    return head
