"""The drafter that a training run starts from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcut_sglang.training.drafter import Drafter, DrafterConfig, load
from dcut_sglang.training.target import check_fingerprint, layer_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def drafter_config(
    target: PreTrainedModel,
    num_layers: int,
    block_sizes: tuple[int, ...],
    target_layer_ids: tuple[int, ...],
    mask_token_id: int,
    target_fingerprint: dict[str, Any],
) -> DrafterConfig:
    """Returns a drafter whose layers have the target's own shapes."""
    return DrafterConfig(
        **layer_shape(target),
        num_layers=num_layers,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        block_sizes=block_sizes,
        target_fingerprint=target_fingerprint,
    )


@torch.no_grad()
def from_target(config: DrafterConfig, target: PreTrainedModel) -> Drafter:
    """Returns a new drafter that starts near the target's own end.

    Its layers copy the target layers in front of the last one; the fusion leans on the latest
    feature. Both learn faster than random weights.
    """
    drafter = Drafter(config)
    weights = target.model.state_dict()
    own = drafter.state_dict()
    for index in range(config.num_layers):
        source = max(config.num_target_layers - 1 - config.num_layers + index, 0)
        for name in own:
            prefix = f"layers.{index}."
            twin = f"layers.{source}.{name.removeprefix(prefix)}"
            if name.startswith(prefix) and twin in weights:
                own[name].copy_(weights[twin])
    hidden = config.hidden_size
    drafter.fc.weight.mul_(0.2)
    drafter.fc.weight[:, -hidden:] += 0.5 * torch.eye(hidden)
    drafter.norm.weight.copy_(0.1 * weights["norm.weight"])
    return drafter


@torch.no_grad()
def from_checkpoint(config: DrafterConfig, folder: Path) -> Drafter:
    """Returns a trained drafter, with layers added where `config` asks for more.

    An added layer is a copy of the one below it, except that it adds nothing yet. The tokens that
    the drafter has learnt already stay in its vocabulary.

    Raises ValueError if the checkpoint is for another target or of another shape.
    """
    old = load(folder)
    if old.config.target_fingerprint is not None and config.target_fingerprint is not None:
        check_fingerprint(config.target_fingerprint, old.config.target_fingerprint, str(folder))
    # The tokens that this run's texts add are known when it ends.
    may_differ = (
        *("num_layers", "block_sizes", "max_position_embeddings"),
        *("target_fingerprint", "draft_vocabulary"),
    )
    for name, value in vars(config).items():
        if name not in may_differ and value != getattr(old.config, name):
            raise ValueError(
                f"{folder} has {name} = {getattr(old.config, name)}, this run wants {value}"
            )
    num_old = old.config.num_layers
    if num_old > config.num_layers:
        raise ValueError(f"{folder} has {num_old} layers, this run wants {config.num_layers}")
    drafter = Drafter(replace(config, draft_vocabulary=old.config.draft_vocabulary))
    weights = old.state_dict()
    for name, own in drafter.state_dict().items():
        if name in weights:
            own.copy_(weights[name])
            continue
        _, _, rest = name.split(".", 2)
        own.copy_(weights[f"layers.{num_old - 1}.{rest}"])
        if rest.startswith(("self_attn.o_proj", "mlp.down_proj")):
            own.zero_()
    return drafter
