"""Fitting a drafter to a target's greedy responses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dcut_sglang.training.blocks import block_loss, block_token_ids
from dcut_sglang.training.drafter import Drafter
from dcut_sglang.training.muon import Muon
from dcut_sglang.training.responses import Response


@dataclass(frozen=True)
class FitConfig:
    """How long and how to train.

    Each step takes `num_sequences` responses and `num_block_tokens` tokens' worth of blocks from
    each. `long_share` of the steps use the drafter's largest block; the others draw a length from
    its smallest to its largest, so that every length in between is in distribution.
    """

    num_steps: int
    num_sequences: int = 4
    num_block_tokens: int = 256
    long_share: float = 0.5
    lr: float = 2e-3
    gamma: float = 5.0
    warmup_steps: int = 20
    decay_share: float = 0.5
    seed: int = 0


class Optimizer:
    """Muon for matrices and AdamW for the rest, under one warm-up, hold and linear decay."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        lr: float,
        num_steps: int,
        warmup_steps: int,
        decay_share: float,
    ) -> None:
        self._inner = [
            Muon(matrices, lr=lr),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._parameters = [*matrices, *others]

        def scale(step: int) -> float:
            decay = (num_steps - step) / (decay_share * num_steps)
            return max(min(1.0, (step + 1) / warmup_steps, decay), 0.01)

        self._schedules = [torch.optim.lr_scheduler.LambdaLR(o, scale) for o in self._inner]

    def step(self, loss: Tensor) -> None:
        """Back-propagates, clips and updates."""
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, schedule in zip(self._inner, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)


def sample_anchors(
    responses: Sequence[Response], num_blocks: int, generator: torch.Generator
) -> Tensor:
    """Draws anchors uniformly from each response's own text: int64 [B, num_blocks]."""
    starts = torch.tensor([r.num_prompt_tokens for r in responses])
    spans = torch.tensor([len(r.token_ids) for r in responses]) - 1 - starts
    draws = torch.rand(len(responses), num_blocks, generator=generator)
    return starts[:, None] + (draws * spans[:, None]).long()


def fit(
    drafter: Drafter,
    embed: Tensor,
    head: Tensor,
    responses: Sequence[Response],
    config: FitConfig,
    log: Callable[[str], None] = print,
) -> None:
    """Trains the drafter in place; `embed` and `head` (float [vocab, hidden]) stay frozen."""
    usable = [r for r in responses if len(r.token_ids) - r.num_prompt_tokens >= 2]
    rng = random.Random(config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = Optimizer(
        [p for p in drafter.parameters() if p.dim() == 2],
        [p for p in drafter.parameters() if p.dim() != 2],
        config.lr,
        config.num_steps,
        config.warmup_steps,
        config.decay_share,
    )
    sizes = drafter.config.block_sizes
    average = 0.0
    for step in range(config.num_steps):
        is_long = rng.random() < config.long_share
        block_size = max(sizes) if is_long else rng.randint(min(sizes), max(sizes))
        batch = rng.sample(usable, min(config.num_sequences, len(usable)))
        ids = pad_sequence([r.token_ids for r in batch], batch_first=True)
        features = pad_sequence([r.features for r in batch], batch_first=True)
        anchors = sample_anchors(batch, config.num_block_tokens // block_size, generator)
        blocks = block_token_ids(ids, anchors, block_size, drafter.config.mask_token_id)
        hidden = drafter(embed[blocks], anchors, drafter.context(features))[:, :, 1:]
        places = anchors[:, :, None] + torch.arange(1, block_size)
        valid = places < torch.tensor([len(r.token_ids) for r in batch])[:, None, None]
        labels = ids.gather(1, places.clamp(max=ids.shape[1] - 1).flatten(1)).view_as(places)
        loss = block_loss(hidden @ head.T, labels, valid, config.gamma)
        optimizer.step(loss)
        average = loss.item() if step == 0 else 0.95 * average + 0.05 * loss.item()
        if step % 50 == 0 or step == config.num_steps - 1:
            log(f"drafter step {step}/{config.num_steps} loss {average:.3f} nats")
