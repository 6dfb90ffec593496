"""Draft one block per request, with the drafter's confidence in each draft.

The forward is DFLASH's (srt/speculative/dflash_worker_v2.py): anchor + masks through the draft
model in TARGET_VERIFY mode, drafts read off the target's head. What DCUT adds is the
probability of each draft, from the same logits.
"""

from __future__ import annotations

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
from dcut_sglang.host.ranks import Ranks
from dcut_sglang.host.window import BlockWindow, select_requests

# Rows of logits computed at a time: bounds memory at large batches. On a CPU, the GEMM of 64
# rows costs half as much again per row as that of 256.
_HEAD_CHUNK_ROWS = 256
# exp() of less than this is denormal in float32, which some CPUs compute 20 times slower, and
# adds nothing to a sum that holds a 1.
_MIN_LOG_RATIO = -80.0


@dataclass(frozen=True)
class DraftBlock:
    """What the drafter proposes in one step.

    Attributes:
        tokens: int64 [bs, D], the anchor in column 0, the drafts behind it.
        confidence: float32 [bs, D-1], probability that the drafter gives each of its drafts; 0
            for requests that were not drafted for.
        num_drafted: requests that were drafted for.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor
    num_drafted: int


def draft_blocks(
    worker: Any, batch: Any, window: BlockWindow, places: torch.Tensor, timer: StepTimer
) -> DraftBlock:
    """Run the drafter over the blocks of the requests at ``places``. No host sync.

    Args:
        places: int64 [n] on the host, ascending; empty: nothing runs.
    """
    bs, depth = window.bs, window.block_size - 1
    tokens = torch.zeros_like(window.positions)
    tokens[:, 0] = window.anchors
    confidence = torch.zeros((bs, depth), dtype=torch.float32, device=tokens.device)
    num_drafted = places.numel()
    if num_drafted == 0:
        return DraftBlock(tokens, confidence, 0)
    if num_drafted < bs:
        window = select_requests(worker, window, places)
    hidden = _draft_forward(worker, batch, window)
    hidden = hidden.view(num_drafted, depth + 1, -1)[:, 1:].reshape(num_drafted * depth, -1)
    head = unwrap_lora_layer(worker.target_worker.model_runner.model.lm_head)
    shard = getattr(head, "shard_indices", None)
    drafts, probability = greedy_with_confidence(
        hidden,
        head.weight[: shard.num_org_elements if shard is not None else None],
        timer,
        ranks=worker.ranks,
        first_token=shard.org_vocab_start_index if shard is not None else 0,
    )
    on_device = places.to(tokens.device)
    tokens[on_device, 1:] = drafts.view(num_drafted, depth)
    confidence[on_device] = probability.view(num_drafted, depth)
    return DraftBlock(tokens, confidence, num_drafted)


def greedy_with_confidence(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    timer: StepTimer,
    *,
    ranks: Ranks,
    first_token: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Most likely token of each row, and its softmax probability.

    ``max`` gives both value and index (on a CPU, ``argmax`` of bf16 logits alone is four times
    slower), and the probability of the maximum is 1 / sum(exp(logits - max)).

    Args:
        hidden: [rows, hidden], draft hidden states.
        head_weight: [shard of the vocabulary, hidden], this rank's part of the target's head.
        timer: receives the confidence's share of the time, as a phase of its own.
        ranks: hold the other shards.
        first_token: token id of the shard's first row.

    Returns:
        int64 [rows] and float32 [rows]. No host sync.
    """
    tops, tokens, totals = [], [], []
    for chunk in hidden.to(head_weight.dtype).split(_HEAD_CHUNK_ROWS):
        logits = torch.matmul(chunk, head_weight.t()).float()
        top, token = logits.max(dim=-1)
        tops.append(top)
        tokens.append(token + first_token)
        with timer.apart("confidence"):
            log_ratio = logits.sub_(top[:, None]).clamp_(min=_MIN_LOG_RATIO)
            totals.append(log_ratio.exp_().sum(dim=-1))
    token, total = ranks.best_of_shards(torch.cat(tops), torch.cat(tokens), torch.cat(totals))
    return token, total.reciprocal()


def _draft_forward(worker: Any, batch: Any, window: BlockWindow) -> torch.Tensor:
    """Draft model over the dense window: hidden states [bs * D, hidden]."""
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
    return out.logits_output.hidden_states
