"""The D-Cut worker: DFLASH whose decode step verifies only the drafts that pay.

Prefill and idle batches are the parent's. The decode step below is the whole algorithm; each
line's details are in the file it names.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

from dcut_sglang import __version__
from dcut_sglang.accept import accept_greedy
from dcut_sglang.force import Forced
from dcut_sglang.host.device import adapt_draft_model, argmax_rows
from dcut_sglang.host.draft import DraftBlock, draft_block, no_drafts
from dcut_sglang.host.hooks import verify_hooks
from dcut_sglang.host.logits import adjust_logits
from dcut_sglang.host.metrics import StepMetrics
from dcut_sglang.host.verify import commit_hidden, verify
from dcut_sglang.host.window import open_window, pack
from dcut_sglang.survival import rank_drafts, survival


class DCutWorker(DFlashWorkerV2):
    """Registered as speculative algorithm ``DCUT``; one per scheduler process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adapt_draft_model(self.draft_model, self.device)
        self.mask_token_id = int(self._mask_token_id)
        self.noise_embed_scale = self._noise_embed_scale
        self.forced: Forced | None = None
        self.metrics = StepMetrics(self.block_size)
        verify_hooks()

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
            return super().forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )
        if not isinstance(batch.spec_info, DFlashDraftInputV2):
            raise RuntimeError(
                f"a DCUT decode batch carries DFlashDraftInputV2, got {type(batch.spec_info)}"
            )
        return self.decode_step(batch, on_publish)

    def decode_step(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        """Draft, decide, verify, accept, commit."""
        timer = self.metrics.start_step()
        window = open_window(self, batch, self.block_size)

        plain = self.forced is not None and self.forced.plain
        drafts = no_drafts(window) if plain else draft_block(self, batch, window)
        timer.mark("draft")

        verify_lens, num_rows = self.decide(drafts)
        rows = pack(window, verify_lens, num_rows)
        timer.mark("decide")

        target = verify(self, batch, window, drafts, rows)
        timer.mark("verify")

        logits = adjust_logits(target.logits, batch.sampling_info, rows.request)
        accepted = accept_greedy(drafts.tokens, argmax_rows(logits), rows.index, verify_lens)
        num_emitted = accepted.num_drafts + 1
        new_seq_lens = window.prefix_lens + num_emitted.to(window.prefix_lens.dtype)
        if on_publish is not None:
            on_publish(new_seq_lens)
        commit_hidden(self, window, rows, target.hidden)
        timer.mark("commit")

        self.metrics.end_step(
            timer,
            bs=window.bs,
            num_rows=num_rows,
            verified_rows=target.logits.shape[0],
            drafted=not plain,
            num_accepted=accepted.num_drafts,
        )
        # Kept out of the result: under overlap everything in it is copied to the host.
        target.result.logits_output.hidden_states = None
        target.result.logits_output.next_token_logits = None
        return GenerationBatchResult(
            logits_output=target.result.logits_output,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=num_emitted.to(torch.int32),
            cap_lens=verify_lens,
            can_run_cuda_graph=target.result.can_run_cuda_graph,
            next_draft_input=make_draft_input_v2(
                bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self.block_size,
            new_seq_lens=new_seq_lens,
            routed_experts_output=target.result.routed_experts_output,
            indexer_topk_output=target.result.indexer_topk_output,
        )

    def decide(self, drafts: DraftBlock) -> tuple[torch.Tensor, int]:
        """Verify lengths int32 [bs] and their sum; at least the anchor of every request."""
        ranked = rank_drafts(survival(drafts.confidence))
        if self.forced is not None:
            verify_lens = self.forced.verify_lens(ranked, self.block_size, self.metrics.steps)
        else:
            verify_lens = ranked.verify_lens(ranked.num_drafts)
        return verify_lens, int(verify_lens.sum())

    def describe(self) -> dict[str, Any]:
        """The ``dcut`` object of ``/server_info``. Syncs once with the device."""
        return {
            "version": __version__,
            "active": True,
            "block_size": self.block_size,
            "forced": self.forced.describe() if self.forced is not None else None,
            **self.metrics.snapshot(),
        }
