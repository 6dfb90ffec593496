"""Fitting a drafter to a target's greedy responses."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dcut_sglang.training.blocks import block_loss, block_token_ids
from dcut_sglang.training.drafter import Drafter
from dcut_sglang.training.muon import Muon
from dcut_sglang.training.responses import Response, mixed_precision
from dcut_sglang.training.teacher import Teacher
from dcut_sglang.training.vocabulary import VocabularySample, used_tokens


@dataclass(frozen=True)
class FitConfig:
    """How long and how to train.

    Each step takes `num_sequences` responses and `num_block_tokens` tokens' worth of blocks from
    each. `long_share` of the steps use the drafter's largest block; the others draw a length from
    its smallest to its largest, short ones more often, so that every length in between is in
    distribution. `open_share` of those others' responses are open text, and as much of the long
    ones' is not (see `Fitter`).
    `num_extra_tokens` replaces the full vocabulary, most of which the responses never use, by the
    tokens that do occur in them and so many random others; 0 keeps all. `dtype` is that of the
    matrix products; weights and their updates are float32. A teacher's distribution takes
    `taught_share` of a label's place, and less and less as the learning rate decays: at the end
    the drafter learns what is accepted, the target's greedy token.
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
    num_extra_tokens: int = 0
    open_share: float = 0.5
    taught_share: float = 0.0
    dtype: str = "float32"


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
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._inner = [
            Muon(matrices, lr=lr, dtype=dtype),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._parameters = [*matrices, *others]

        def scale(step: int) -> float:
            decay = (num_steps - step) / (decay_share * num_steps)
            return max(min(1.0, (step + 1) / warmup_steps, decay), 0.01)

        self._schedules = [torch.optim.lr_scheduler.LambdaLR(o, scale) for o in self._inner]

    @property
    def scale(self) -> float:
        """The learning rate of the next step over the highest one."""
        group = self._inner[0].param_groups[0]
        return float(group["lr"] / group["initial_lr"])

    def step(self, loss: Tensor) -> None:
        """Back-propagates, clips and updates."""
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, schedule in zip(self._inner, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Returns momenta and places in the schedules, for torch.save."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._inner],
            "schedules": [schedule.last_epoch for schedule in self._schedules],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned."""
        for optimizer, saved in zip(self._inner, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for schedule, place in zip(self._schedules, state["schedules"], strict=True):
            schedule.last_epoch = place


def sample_anchors(
    responses: Sequence[Response], num_blocks: int, generator: torch.Generator
) -> Tensor:
    """Draws anchors uniformly from each response's own text: int64 [B, num_blocks]."""
    starts = torch.tensor([r.num_prompt_tokens for r in responses])
    spans = torch.tensor([len(r.token_ids) for r in responses]) - 1 - starts
    draws = torch.rand(len(responses), num_blocks, generator=generator)
    return starts[:, None] + (draws * spans[:, None]).long()


class ResumableFit(ABC):
    """A training run that can be stopped between any two steps and go on elsewhere."""

    def __init__(
        self, model: nn.Module, responses: Sequence[Response], config: FitConfig, min_tokens: int
    ) -> None:
        """Takes the responses with `min_tokens` tokens or more behind their prompt."""
        self._model, self._config = model, config
        self._usable = [
            r for r in responses if len(r.token_ids) - r.num_prompt_tokens >= min_tokens
        ]
        self._rng = random.Random(config.seed)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._optimizer = Optimizer(
            [p for p in model.parameters() if p.dim() == 2],
            [p for p in model.parameters() if p.dim() != 2],
            config.lr,
            config.num_steps,
            config.warmup_steps,
            config.decay_share,
            getattr(torch, config.dtype),
        )
        self.num_done = 0
        self.average_loss = 0.0

    @abstractmethod
    def _loss(self) -> Tensor:
        """Draws a batch; returns its loss, a scalar in nats."""

    def _batch(self) -> list[Response]:
        return self._draw(self._usable, self._config.num_sequences)

    def _draw(self, responses: list[Response], count: int) -> list[Response]:
        return self._rng.sample(responses, min(count, len(responses)))

    def step(self) -> None:
        """Takes one optimizer step."""
        with mixed_precision(self._config.dtype, next(self._model.parameters()).device):
            loss = self._loss()
        self._optimizer.step(loss)
        value = loss.item()
        is_first = self.num_done == 0
        self.average_loss = value if is_first else 0.95 * self.average_loss + 0.05 * value
        self.num_done += 1

    def state(self) -> dict[str, Any]:
        """Returns all that decides the steps to come, for torch.save."""
        return {
            "drafter": self._model.state_dict(),
            "optimizer": self._optimizer.state(),
            "rng": list(self._rng.getstate()),
            "generator": self._generator.get_state(),
            "num_done": self.num_done,
            "average_loss": self.average_loss,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned; model, responses and config must be the same."""
        self._model.load_state_dict(state["drafter"])
        self._optimizer.load_state(state["optimizer"])
        version, numbers, gauss = state["rng"]
        self._rng.setstate((version, tuple(numbers), gauss))
        self._generator.set_state(state["generator"])
        self.num_done = state["num_done"]
        self.average_loss = state["average_loss"]


class Fitter(ResumableFit):
    """A run that trains a DFlash drafter.

    `embed` and `head` (float [vocab, hidden], on the drafter's device) stay frozen. `is_open`, one
    per response, marks open text: there only the first drafts can be learnt, so that many short
    blocks teach more than few long ones. Without it no response is open.
    """

    def __init__(
        self,
        drafter: Drafter,
        embed: Tensor,
        head: Tensor,
        responses: Sequence[Response],
        config: FitConfig,
        is_open: Sequence[bool] | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__(drafter, responses, config, min_tokens=2)
        marks = is_open if is_open is not None else [False] * len(responses)
        marked = {id(r) for r, mark in zip(responses, marks, strict=True) if mark}
        self._open = [r for r in self._usable if id(r) in marked]
        self._others = [r for r in self._usable if id(r) not in marked]
        self._drafter, self._embed, self._head = drafter, embed, head
        self._teacher = teacher
        self._sample = None
        if config.num_extra_tokens:
            self._sample = VocabularySample(
                used_tokens(self._usable), len(head), config.num_extra_tokens
            )

    def _draw_blocks(self) -> tuple[int, list[Response]]:
        """Draws a step's block size and responses."""
        config, sizes = self._config, self._drafter.config.block_sizes
        block_size, open_share = max(sizes), 1 - config.open_share
        if self._rng.random() >= config.long_share:
            # Uniform in the logarithm.
            block_size = round(min(sizes) * (max(sizes) / min(sizes)) ** self._rng.random())
            open_share = config.open_share
        if not (self._open and self._others):
            return block_size, self._batch()
        num_open = round(open_share * config.num_sequences)
        others = self._draw(self._others, config.num_sequences - num_open)
        return block_size, self._draw(self._open, num_open) + others

    def _loss(self) -> Tensor:
        config, device = self._config, self._embed.device
        block_size, batch = self._draw_blocks()
        ids = pad_sequence([r.token_ids for r in batch], batch_first=True)
        features = pad_sequence([r.features for r in batch], batch_first=True).to(device).float()
        anchors = sample_anchors(batch, config.num_block_tokens // block_size, self._generator)
        places = anchors[:, :, None] + torch.arange(1, block_size)
        valid = places < torch.tensor([len(r.token_ids) for r in batch])[:, None, None]
        inside = places.clamp(max=ids.shape[1] - 1)
        labels = ids.gather(1, inside.flatten(1)).view_as(places)
        blocks = block_token_ids(ids, anchors, block_size, self._drafter.config.mask_token_id)
        context = self._drafter.context(features)
        hidden = self._drafter(self._embed[blocks.to(device)], anchors.to(device), context)
        output, correction = self._head, None
        if self._sample is not None:
            chosen, correction = self._sample.draw(self._generator)
            output, correction = output[chosen.to(device)], correction.to(device)
            labels = self._sample.place_of[labels]

        def logits(states: Tensor) -> Tensor:
            return states @ output.T if correction is None else states @ output.T + correction

        taught, taught_share = None, config.taught_share * self._optimizer.scale
        if self._teacher is not None and taught_share:
            with torch.no_grad():
                # The state at a place tells the token behind it.
                states = self._teacher.hidden(features)
                rows = torch.arange(len(ids), device=device)[:, None, None]
                taught = logits(states[rows, (inside - 1).to(device)])
        # Labels behind the end of a text are not used and may be absent from the sample.
        labels = labels.where(valid, 0).to(device)
        drafts = logits(hidden[:, :, 1:])
        return block_loss(drafts, labels, valid.to(device), config.gamma, taught, taught_share)


def fit(
    drafter: Drafter,
    embed: Tensor,
    head: Tensor,
    responses: Sequence[Response],
    config: FitConfig,
    log: Callable[[str], None] = print,
) -> None:
    """Trains the drafter in place; `embed` and `head` (float [vocab, hidden]) stay frozen."""
    fitter = Fitter(drafter, embed, head, responses, config)
    for step in range(config.num_steps):
        fitter.step()
        if step % 50 == 0 or step == config.num_steps - 1:
            log(f"drafter step {step}/{config.num_steps} loss {fitter.average_loss:.3f} nats")
