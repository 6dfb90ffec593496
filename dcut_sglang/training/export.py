"""Shipping a trained drafter: weights, the text it was made from, and its card."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from dcut_sglang.bench.rows import cpu_info
from dcut_sglang.training.card import model_card
from dcut_sglang.training.drafter import load, save
from dcut_sglang.training.files import write_text
from dcut_sglang.training.report import Report
from dcut_sglang.training.store import Texts


def weights_digest(folder: Path) -> str:
    """Returns 16 hex digits of a checkpoint's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


def export(
    trained: Path,
    out: Path,
    report: Report,
    texts: Texts,
    facts: dict[str, Any],
    curve: str,
    target_name: str,
) -> None:
    """Writes a model folder; the weights come last but one and the card last.

    `facts`: the settings of the training run; `curve`: its learning curve, JSON lines.
    """
    drafter = load(trained)
    config = drafter.config
    texts.save(out / "training/responses.npz")
    write_text(out / "training/curve.jsonl", curve)
    settings = {key: value for key, value in facts.items() if key != "responses"}
    write_text(out / "training/settings.json", json.dumps(settings, indent=1) + "\n")
    save(drafter, out, torch.bfloat16)
    num_params = sum(parameter.numel() for parameter in drafter.parameters())
    card = model_card(
        report,
        config.target_layer_ids,
        target_name=target_name,
        num_layers=config.num_layers,
        num_params=num_params / 1e6,
        size_mb=2 * num_params / 1e6,
        d=max(config.block_sizes),
        shortest=min(config.block_sizes),
        num_train=facts["num_responses"],
        num_tokens=facts["num_tokens"],
        init=facts["init"] or "layers of the target",
        num_steps=facts["num_done"],
        cpu_minutes=facts.get("cpu_s", 0) / 60,
        machine=cpu_info().get("model name", "an unknown CPU"),
        num_prompt=sum(split == "prompt" for split in texts.split),
    )
    write_text(out / "README.md", card)
