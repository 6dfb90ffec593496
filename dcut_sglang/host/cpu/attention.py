"""SGLang attention backend for CPUs: prefill, decode, and uniform or ragged verify.

SGLang's own torch backend cannot run a TARGET_VERIFY forward. This one turns every forward
into the CSR description of ``dcut_sglang.varlen`` and runs it; layers that differ in
causality, window or pool get a plan of their own, once per forward. The description is made when
the first layer asks: SGLang announces a verify twice, as it is prepared and as it is run.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from dcut_sglang.host.cpu.activate import BACKEND_NAME
from dcut_sglang.varlen import VarlenAttention


class TorchVarlenAttnBackend(TorchNativeAttnBackend):
    """Variable-length attention in torch; KV writes and pools are the parent's."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._announced: ForwardBatch | None = None
        self._csr: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._tree_mask: torch.Tensor | None = None
        self._plans: dict[tuple[bool, int, bool], VarlenAttention] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._plans, self._csr, self._tree_mask = {}, None, None
        self._announced = None if forward_batch.forward_mode.is_idle() else forward_batch

    def describe(
        self,
        forward_batch: ForwardBatch,
        q_lens: torch.Tensor,
        kv_lens: torch.Tensor,
        tree_mask: torch.Tensor | None = None,
    ) -> None:
        """Prepare a forward of ``q_lens`` rows per request over ``kv_lens`` entries: int64 [bs].

        tree_mask: bool [bs, n, n] where the rows are a tree of drafts.
        """
        self._plans, self._tree_mask, self._announced = {}, tree_mask, None
        self._csr = (
            _indptr(q_lens),
            _indptr(kv_lens),
            _kv_indices(
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices[: forward_batch.batch_size],
                kv_lens,
            ),
        )

    def _plan_for(self, layer: RadixAttention) -> VarlenAttention:
        if (announced := self._announced) is not None:
            self.describe(announced, *_query_and_kv_lens(announced), _tree_mask(announced))
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        window_left = layer.sliding_window_size
        window_left = -1 if window_left is None or window_left < 0 else int(window_left)
        in_window_pool = window_left >= 0 and self.use_sliding_window_kv_pool
        key = (causal, window_left, in_window_pool)
        plan = self._plans.get(key)
        if plan is None:
            assert self._csr is not None, "init_forward_metadata was not called"
            qo_indptr, kv_indptr, kv_indices = self._csr
            if in_window_pool:
                kv_indices = self.token_to_kv_pool.translate_loc_from_full_to_swa(kv_indices)
            plan = VarlenAttention()
            plan.plan(
                qo_indptr,
                kv_indptr,
                kv_indices,
                causal=causal,
                window_left=window_left,
                tree_mask=self._tree_mask,
            )
            self._plans[key] = plan
        return plan

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        if layer.is_cross_attention:
            raise NotImplementedError(f"{BACKEND_NAME} does not serve cross attention")
        if layer.logit_cap:
            raise NotImplementedError(f"{BACKEND_NAME} does not serve soft-capped attention logits")
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        out = self._plan_for(layer).run(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            sm_scale=layer.scaling,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)


def _query_and_kv_lens(forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [bs] each. In TARGET_VERIFY, ``seq_lens`` is the committed prefix without the block."""
    bs, mode = forward_batch.batch_size, forward_batch.forward_mode
    seq_lens = forward_batch.seq_lens[:bs].to(torch.int64)
    if mode.is_target_verify():
        layout = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
        if layout is None:
            q_lens = torch.full_like(seq_lens, int(forward_batch.spec_info.draft_token_num))
        else:
            q_lens = layout.verify_lens[:bs].to(torch.int64)
        return q_lens, seq_lens + q_lens
    if mode.is_decode():
        return torch.ones_like(seq_lens), seq_lens
    return forward_batch.extend_seq_lens[:bs].to(torch.int64), seq_lens


def _tree_mask(forward_batch: ForwardBatch) -> torch.Tensor | None:
    """Which drafts of its block a verified row sees, bool [bs, n, n]; None for chains."""
    spec_info = forward_batch.spec_info
    # DFLASH's verify inputs have no ``tree_topk``; 1 is a chain, which causal attention serves.
    if not forward_batch.forward_mode.is_target_verify() or getattr(spec_info, "tree_topk", 1) == 1:
        return None
    n = int(spec_info.draft_token_num)
    return spec_info.custom_mask.view(forward_batch.batch_size, n, n)


def _indptr(lens: torch.Tensor) -> torch.Tensor:
    """CSR offsets of ``lens``: int64 [bs + 1]."""
    out = lens.new_zeros(lens.numel() + 1)
    torch.cumsum(lens, 0, out=out[1:])
    return out


def _kv_indices(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, kv_lens: torch.Tensor
) -> torch.Tensor:
    """Token slots of every request, packed in request order: int64 [sum(kv_lens)]."""
    columns = torch.arange(int(kv_lens.max()), device=kv_lens.device)
    table = req_to_token[req_pool_indices.to(torch.int64), : columns.numel()]
    return table[columns < kv_lens[:, None]].to(torch.int64)
