"""Draft one block per request, with the drafter's confidence in each draft.

The forward is DFLASH's (srt/speculative/dflash_worker_v2.py): anchor + masks through the draft
model in TARGET_VERIFY mode, drafts read off the target's head. What DCUT adds is the
probability of each draft, from the same logits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from dcut_sglang.host.metrics import StepTimer
from dcut_sglang.host.window import BlockWindow, part_of
from dcut_sglang.plan import Plan
from dcut_sglang.stages import Computed, compute_in_stages, nothing_computed
from dcut_sglang.value import Float32Array, IntArray


@dataclass(frozen=True)
class DraftBlock:
    """What the drafter proposes in one step.

    Attributes:
        tokens: int64 [bs, D], the anchor in column 0, the drafts behind it; 0 where none was
            computed.
        confidence: float32 [bs, D-1] on the host, probability that the drafter gives each of its
            drafts; 0 where none was computed.
        survival: float32 [bs, D-1] on the host, estimated probability that the target accepts
            everything up to each draft; 0 where none was computed.
        computed: depth of each request that was drafted for, and rows of the head's stages.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor
    survival: torch.Tensor
    computed: Computed

    @property
    def num_drafted(self) -> int:
        """Requests that were drafted for."""
        return len(self.computed.depth)

    @property
    def num_drafts(self) -> int:
        """Drafts that have a token and a confidence."""
        return int(self.computed.depth.sum())


def draft_blocks(
    worker: Any,
    batch: Any,
    window: BlockWindow,
    plan: Plan,
    timer: StepTimer,
) -> DraftBlock:
    """Run the drafter over the blocks of the planned requests, and the head as deep as it pays.

    The confidences of every stage go to the host, where the plan calibrates them and decides
    whether another stage follows: one sync per stage.
    """
    bs, depth, drafted = window.bs, window.block_size - 1, plan.drafted
    if not len(drafted):
        return no_drafts(window)
    tokens = _anchors_alone(window)
    confidence = torch.zeros((bs, depth), dtype=torch.float32)
    survival = torch.zeros((bs, depth), dtype=torch.float32)
    if len(drafted) < bs or plan.block_size < window.block_size:
        window = part_of(worker, window, torch.from_numpy(drafted), plan.block_size)
    hidden = draft_hidden(worker, batch, window)

    def head(places: IntArray, lo: int, hi: int) -> Float32Array:
        shape = (len(places), hi - lo)
        with timer.apart("head"):
            rows = torch.from_numpy(places).to(hidden.device)
            found, probability = worker.draft_head(hidden[rows, lo:hi].flatten(0, 1), timer)
            at = torch.from_numpy(drafted[places])
            tokens[at.to(tokens.device), 1 + lo : 1 + hi] = found.view(shape)
            confidence[at, lo:hi] = probability.view(shape).cpu()
        return plan.calibrate(confidence[at, lo:hi].numpy(), lo)

    computed = compute_in_stages(plan.stages, len(drafted), depth, head)
    survival[torch.from_numpy(drafted)] = torch.from_numpy(computed.survival)
    return DraftBlock(tokens, confidence, survival, computed)


def no_drafts(window: BlockWindow) -> DraftBlock:
    """The block of a step that drafts for nobody."""
    empty, computed = _nothing(window.bs, window.block_size - 1)
    return DraftBlock(_anchors_alone(window), empty, empty, computed)


@functools.cache
def _nothing(bs: int, depth: int) -> tuple[torch.Tensor, Computed]:
    return torch.zeros((bs, depth), dtype=torch.float32), nothing_computed(depth)


def _anchors_alone(window: BlockWindow) -> torch.Tensor:
    tokens = torch.zeros_like(window.positions)
    tokens[:, 0] = window.anchors
    return tokens


def draft_hidden(worker: Any, batch: Any, window: BlockWindow) -> torch.Tensor:
    """Draft model over the dense window [bs, d]: hidden states of the drafts [bs, d-1, hidden]."""
    bs, block_size, device = window.bs, window.block_size, window.positions.device
    block_ids = torch.full_like(window.positions, worker.mask_token_id)
    block_ids[:, 0] = window.anchors
    embedding = unwrap_lora_layer(worker.target_worker.model_runner.model.get_input_embeddings())
    input_embeds = embedding(block_ids) * worker.noise_embed_scale

    host_lens = window.host_lens + block_size
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=bs,
        input_ids=block_ids.reshape(-1),
        req_pool_indices=window.req_pool_indices,
        seq_lens=window.prefix_lens,
        out_cache_loc=window.slots.reshape(-1),
        seq_lens_sum=int(host_lens.sum()),
        seq_lens_cpu=host_lens.to(torch.int32),
        positions=window.positions.reshape(-1),
        input_embeds=input_embeds.view(bs * block_size, -1),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=make_draft_block_spec_info(draft_token_num=block_size, device=device),
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded=(
            torch.full((), bs * block_size, dtype=torch.int32, device=device)
            if enable_num_token_non_padded()
            else None
        ),
        global_num_token_non_padded_cpu=bs * block_size,
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
    )
    window.plan.bind(forward_batch, worker.draft_model_runner.kv_index_translator)
    with torch.inference_mode(), draft_tp_context(worker.draft_parallel_layout):
        out = worker.draft_model_runner.forward(forward_batch)
    return out.logits_output.hidden_states.view(bs, block_size, -1)[:, 1:]
