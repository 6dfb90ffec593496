"""A target as the trainer needs it: model, tokens of prompts, and what tells it from others."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# These fields of a target's config decide its hidden states' shape and meaning.
_SHAPE_FIELDS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_SAMPLED_WEIGHTS = (
    "norm.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.self_attn.q_proj.weight",
)
NUM_FEATURES = 5


def load_target(folder: Path, device: str = "cpu") -> PreTrainedModel:
    """Loads the target for inference, in the dtype in which this device is fastest."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.requires_grad_(False)
    return model.eval().to(device)  # type: ignore[arg-type]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def fingerprint(target: PreTrainedModel) -> dict[str, Any]:
    """Returns what tells this target from others, as JSON: its shape and statistics of weights.

    Each weight gives its mean size and its projection on a fixed direction, in units of its norm.
    """
    config = target.config.to_dict()
    weights = {}
    for name in _SAMPLED_WEIGHTS:
        weight = target.model.get_parameter(name).detach().double().flatten().cpu()
        direction = torch.arange(len(weight), dtype=torch.float64).cos()
        projection = weight @ direction / weight.norm()
        weights[name] = [
            float(f"{weight.abs().mean().item():.6g}"),
            round(projection.item(), 4),
        ]
    return {"shape": [config.get(name) for name in _SHAPE_FIELDS], "weights": weights}


def check_fingerprint(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Raises ValueError if something was made for another target.

    The tolerances let copies in bfloat16 or float16 pass.
    """
    same = found["shape"] == expected["shape"] and set(found["weights"]) == set(expected["weights"])
    for name, (size, projection) in expected["weights"].items() if same else ():
        other_size, other_projection = found["weights"][name]
        same &= math.isclose(size, other_size, rel_tol=1e-4)
        same &= abs(projection - other_projection) < 0.01
    if not same:
        raise ValueError(
            f"{what} was made for another target: expected {json.dumps(expected)}, "
            f"got {json.dumps(found)}; give the target it was made for, or start afresh"
        )


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Returns up to five layers, evenly spread, without the last ones that a server cannot give."""
    if num_layers - 1 <= NUM_FEATURES:
        return tuple(range(num_layers - 1))
    step = (num_layers - 4) / (NUM_FEATURES - 1)
    return tuple(sorted({int(1 + step * i + 0.5) for i in range(NUM_FEATURES)}))


def default_mask_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the tokenizer's mask token or else its last added token, which text rarely uses."""
    if tokenizer.mask_token_id is not None:
        return cast(int, tokenizer.mask_token_id)
    return int(max(tokenizer.added_tokens_decoder))


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Returns each user message as a server feeds it: in the chat template, answer begun."""
    encoded = []
    for text in texts:
        messages = [{"role": "user", "content": text}]
        found = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        encoded.append(list(cast(dict[str, list[int]], found)["input_ids"]))
    return encoded


def embedding_and_head(target: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Returns the target's embedding and output matrices, float32 [vocab, hidden]."""
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    return cast(Tensor, embed.weight).detach().float(), cast(Tensor, head.weight).detach().float()


def layer_shape(target: PreTrainedModel) -> dict[str, Any]:
    """Returns the fields of a draft model's config that it takes over from its target."""
    config = target.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "ffn_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_hidden_layers,
        "rope_theta": float(config.rope_parameters["rope_theta"]),
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
    }
