"""Builtin DFLASH on a CPU: three device assumptions undone, and one weight packed."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from dcut_sglang.host.cpu.linear import packed_linear


def adapt_draft_model(model: Any) -> None:
    """Make a loaded ``DFlashDraftModel`` runnable on a CPU, in place.

    Two things assume CUDA in SGLang 0.5.23: a bf16 draft takes a Triton kernel for
    q/k-norm + rope (models/dflash.py, ``use_table_qk_norm_rope``), and
    model_runner.py casts the draft's ``input_embeds`` to bf16 whatever the draft's dtype is.
    The projection of the target's features, a plain ``torch.nn.Linear``, gets packed weights as
    SGLang's own layers do (linear.py): it runs over few rows in every step.
    """
    dtype = next(model.parameters()).dtype
    for layer in model.layers:
        layer.self_attn.use_table_qk_norm_rope = False

    fc: Any = model.fc
    if isinstance(model.fc, torch.nn.Linear):
        fc.forward = lambda x: packed_linear(x, fc.weight, fc.bias)

    forward = model.forward

    def forward_in_own_dtype(
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if input_embeds is not None:
            input_embeds = input_embeds.to(dtype)
        return forward(input_ids, positions, forward_batch, input_embeds=input_embeds, **kwargs)

    model.forward = forward_in_own_dtype


class CpuDFlashWorker(DFlashWorkerV2):
    """``DFlashWorkerV2`` on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adapt_draft_model(self.draft_model)

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        # The decode branch calls seq_lens.record_stream(), which CPU tensors reject; the
        # CPU has one stream, so there is nothing to record.
        batch.seq_lens.record_stream = lambda stream: None
        return super().forward_batch_generation(batch, *args, **kwargs)
