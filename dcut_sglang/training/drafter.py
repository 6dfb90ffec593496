"""The DFlash drafter as a torch module, in the checkpoint format of SGLang's `DFlashDraftModel`.

A block is the last known token (the anchor) and D-1 mask tokens, embedded by the target. Inside
the block attention is not causal; in front of it every layer attends to keys and values that it
projects from a fusion of the target's hidden states at the known tokens. The drafter has neither
embedding nor head: the target's are shared and frozen.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dcut_sglang.token_set import decode_tokens, encode_tokens
from dcut_sglang.training.blocks import block_mask

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DrafterConfig:
    """Architecture of a drafter.

    `hidden_size` and `vocab_size` are the target's. `target_layer_ids` are ascending, 0-based, and
    mean the hidden state AFTER that target layer; the last layer is excluded, because SGLang
    captures a state as the input of the layer that follows. `block_sizes` are the block lengths
    (anchor included) for which the drafter is trained; the largest is the checkpoint's own.
    `target_fingerprint` tells the target from others (`training.target.fingerprint`).
    `draft_vocabulary`: the tokens worth drafting, those of the training texts, ascending; empty:
    all.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    num_layers: int
    vocab_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    block_sizes: tuple[int, ...] = (4, 8, 16)
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    target_fingerprint: dict[str, Any] | None = None
    draft_vocabulary: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)):
            raise ValueError(f"target_layer_ids must be ascending and not empty, got {ids}")
        if ids[0] < 0 or ids[-1] > self.num_target_layers - 2:
            raise ValueError(
                f"target_layer_ids must lie in 0..{self.num_target_layers - 2} "
                f"for {self.num_target_layers} target layers, got {ids}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id must lie in 0..{self.vocab_size - 1}, got {self.mask_token_id}"
            )
        if not self.block_sizes or min(self.block_sizes) < 2:
            raise ValueError(f"block_sizes must be at least 2 each, got {self.block_sizes}")

    @property
    def feature_size(self) -> int:
        """Width of the concatenated target hidden states."""
        return len(self.target_layer_ids) * self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of config.json."""
        data: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": ["full_attention"] * self.num_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_layers,
            "block_size": max(self.block_sizes),
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_sizes": sorted(self.block_sizes),
            },
            "use_cache": True,
        }
        if self.target_fingerprint is not None:
            data["dflash_config"]["target_fingerprint"] = self.target_fingerprint
        if self.draft_vocabulary:
            data["dflash_config"]["draft_vocabulary"] = encode_tokens(
                self.draft_vocabulary, self.vocab_size
            )
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DrafterConfig:
        """Reads the contents of a config.json; a missing `block_sizes` means `block_size` alone."""
        dflash = data["dflash_config"]
        rope = data.get("rope_parameters") or {}
        vocabulary = dflash.get("draft_vocabulary")
        return cls(
            hidden_size=data["hidden_size"],
            num_heads=data["num_attention_heads"],
            num_kv_heads=data["num_key_value_heads"],
            head_dim=data["head_dim"],
            ffn_size=data["intermediate_size"],
            num_layers=data["num_hidden_layers"],
            vocab_size=data["vocab_size"],
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            num_target_layers=data["num_target_layers"],
            block_sizes=tuple(dflash.get("block_sizes", [data["block_size"]])),
            rope_theta=rope.get("rope_theta", data.get("rope_theta", 10000.0)),
            rms_norm_eps=data["rms_norm_eps"],
            max_position_embeddings=data["max_position_embeddings"],
            target_fingerprint=dflash.get("target_fingerprint"),
            draft_vocabulary=tuple(decode_tokens(vocabulary, data["vocab_size"]).tolist())
            if vocabulary
            else (),
        )


def apply_rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotates the two halves of each head (the "neox" layout).

    x: [..., heads, head_dim]; positions: integer [...], absolute. Returns the shape of x.
    """
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=torch.float32, device=x.device)
    angles = positions[..., None, None].float() * theta ** (-steps / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class BlockAttention(nn.Module):
    """Attention of block tokens to the context and to their own block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden, head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)

    def key_value(self, x: Tensor, positions: Tensor) -> KeyValue:
        """x: [B, T, hidden], positions: [B, T] or [T]; returns two [B, T, kv_heads, head_dim]."""
        shape = (*x.shape[:-1], self.config.num_kv_heads, self.config.head_dim)
        key = self.k_norm(self.k_proj(x).view(shape))
        key = apply_rope(key, positions, self.config.rope_theta)
        return key, self.v_proj(x).view(shape)

    def forward(self, x: Tensor, positions: Tensor, context: KeyValue, mask: Tensor) -> Tensor:
        """x: [B, T, hidden]; mask: bool [B, T, S + T], true where attended; returns x's shape."""
        query = self.q_norm(self.q_proj(x).unflatten(-1, (self.config.num_heads, -1)))
        query = apply_rope(query, positions, self.config.rope_theta).transpose(1, 2)
        group = self.config.num_heads // self.config.num_kv_heads
        key, value = (
            torch.cat(pair, dim=1).transpose(1, 2).repeat_interleave(group, dim=1)
            for pair in zip(context, self.key_value(x, positions), strict=True)
        )
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class GatedMLP(nn.Module):
    """SiLU-gated feed-forward layer."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden]; returns the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """Pre-norm layer: attention, then MLP, each added to the residual."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.ffn_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, context: KeyValue, mask: Tensor) -> Tensor:
        """Arguments as for BlockAttention.forward."""
        x = x + self.self_attn(self.input_layernorm(x), positions, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The whole drafter; parameter names are those of the checkpoint."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 1 / math.sqrt(2 * config.num_layers) if is_output else 1.0
                nn.init.normal_(parameter, std=scale / math.sqrt(parameter.shape[1]))

    def context(self, features: Tensor) -> list[KeyValue]:
        """Projects target hidden states at positions 0..S-1 into each layer's keys and values.

        features: [B, S, feature_size], the chosen layers concatenated in ascending order.
        """
        fused = self.hidden_norm(self.fc(features))
        positions = torch.arange(fused.shape[1], device=fused.device)
        return [
            cast(DrafterLayer, layer).self_attn.key_value(fused, positions) for layer in self.layers
        ]

    def forward(self, embeds: Tensor, anchors: Tensor, context: list[KeyValue]) -> Tensor:
        """Runs N independent blocks per sequence.

        embeds: [B, N, D, hidden], target embeddings of the blocks; anchors: integer [B, N], the
        absolute position of each block's first token. A block sees the context in front of its
        anchor and itself. Returns [B, N, D, hidden], normed, ready for the target's head.
        """
        batch, num_blocks, block_size, _ = embeds.shape
        mask = block_mask(anchors, block_size, context[0][0].shape[1])
        positions = anchors[:, :, None] + torch.arange(block_size, device=anchors.device)
        x, positions = embeds.flatten(1, 2), positions.flatten(1, 2)
        for layer, key_value in zip(self.layers, context, strict=True):
            x = layer(x, positions, key_value, mask)
        return self.norm(x).view(batch, num_blocks, block_size, -1)


def save(drafter: Drafter, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes config.json and model.safetensors; a killed run leaves no half-written file."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to(dtype).contiguous() for k, v in drafter.state_dict().items()}
    data = drafter.config.to_json() | {"dtype": str(dtype).removeprefix("torch.")}
    config_temp, weights_temp = folder / ".config.json.tmp", folder / ".model.safetensors.tmp"
    save_file(state, weights_temp, metadata={"format": "pt"})
    config_temp.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(weights_temp, folder / "model.safetensors")
    os.replace(config_temp, folder / "config.json")


def load(folder: Path) -> Drafter:
    """Reads a checkpoint as float32; missing or unexpected weights raise."""
    drafter = Drafter(DrafterConfig.from_json(json.loads((folder / "config.json").read_text())))
    state = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    drafter.load_state_dict(state)
    return drafter
