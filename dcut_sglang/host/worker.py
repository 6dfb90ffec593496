"""The D-Cut worker: DFLASH whose decode step verifies only the drafts that pay.

Prefill and idle batches are the parent's. The decode step below is the whole algorithm; each
line's details are in the file it names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from dcut_sglang.accept import Accepted, accept
from dcut_sglang.controller import Controller
from dcut_sglang.force import Forced
from dcut_sglang.host.choice import Chooser
from dcut_sglang.host.device import adapt_draft_model, argmax_rows
from dcut_sglang.host.draft import DraftBlock, draft_blocks
from dcut_sglang.host.draft_kv import DraftKV
from dcut_sglang.host.flag import read_config
from dcut_sglang.host.head import DraftHead, draft_vocabulary
from dcut_sglang.host.hooks import verify_hooks
from dcut_sglang.host.learning import Learning
from dcut_sglang.host.metrics import StepMetrics, StepTimer
from dcut_sglang.host.passes import Arrivals, count_passes, most_passes
from dcut_sglang.host.probe import load_or_probe
from dcut_sglang.host.ranks import LedStages, Ranks
from dcut_sglang.host.recording import record
from dcut_sglang.host.tracing import open_trace
from dcut_sglang.host.verify import TargetOutput, verify
from dcut_sglang.host.window import BlockWindow, advanced, open_window, pack
from dcut_sglang.plan import Mode, Plan
from dcut_sglang.selector import Decision, Selector
from dcut_sglang.survival import rank_drafts
from dcut_sglang.trace import TraceWriter
from dcut_sglang.value import IntArray


class DCutWorker(DFlashWorkerV2):
    """Registered as speculative algorithm ``DCUT``; one per scheduler process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = Ranks()
        adapt_draft_model(self.draft_model, self.device)
        self.mask_token_id = int(self._mask_token_id)
        self.noise_embed_scale = self._noise_embed_scale
        self.config = read_config(self.server_args)
        self.draft_head = DraftHead(
            self.model_runner.model.lm_head, self.ranks, self._tokens_to_draft()
        )
        self.draft_kv = DraftKV(self)
        self.selector: Selector | None = None
        self.controller: Controller | None = None
        self.learning: Learning | None = None
        self.probe_s = 0.0
        self.forced: Forced | None = None
        self.arrivals = Arrivals()
        self.chooser = Chooser(self.model_runner.sampler)
        self.metrics = StepMetrics(self.block_size)
        self.trace: TraceWriter | None = None
        verify_hooks()

    def _tokens_to_draft(self) -> torch.Tensor | None:
        if not self.config.short_vocabulary:
            return None
        hf_config = self.draft_model_runner.model_config.hf_config
        return draft_vocabulary(hf_config, int(self.model_runner.model_config.vocab_size))

    def _defer_target_verify_gather(self) -> None:
        """Acceptance reads whole rows of logits; under TP, SGLang would hand out shards."""
        return None

    def prewarm_sampling(self) -> Any:
        """The last thing SGLang calls before serving: measure what steps cost."""
        result = super().prewarm_sampling()
        with torch.inference_mode():
            cost, self.probe_s = load_or_probe(self, self.config)
        self.draft_kv.forget()
        self.selector = Selector(cost, self.config)
        # Each stage of the head is decided on the host: on a CPU that is free.
        on_cpu = torch.device(self.device).type == "cpu"
        self.controller = Controller(self.selector, has_stages=on_cpu)
        self.learning = Learning(
            self.selector,
            self.controller,
            int(self.model_runner.max_running_requests),
            self.ranks.decides,
        )
        if self.ranks.decides:
            self.trace = open_trace(self.config, self.block_size, dict(cost.fingerprint))
        self.metrics.reset()
        return result

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        mode = batch.forward_mode
        if not mode.is_decode() and self.learning is not None:
            self.learning.interrupted()
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
            with self.chooser.prefill(batch):
                return super().forward_batch_generation(
                    batch, on_publish, grammar_barrier, pp_proxy_tensors
                )
        if not isinstance(batch.spec_info, DFlashDraftInputV2):
            raise RuntimeError(
                f"a DCUT decode batch carries DFlashDraftInputV2, got {type(batch.spec_info)}"
            )
        return self.decode_step(batch, on_publish, grammar_barrier)

    def _append_target_hidden_to_draft_kv_by_loc(
        self,
        *,
        target_hidden: torch.Tensor,
        cache_loc: torch.Tensor,
        positions: torch.Tensor,
        **kwargs: Any,
    ) -> None:
        """What the parent's prefill calls for the drafter's keys and values of the prompt."""
        if not self.draft_kv.prefilled(target_hidden, cache_loc, positions):
            self.write_draft_kv(target_hidden, cache_loc, positions, **kwargs)

    def write_draft_kv(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, **kwargs: Any
    ) -> None:
        """Project target features [rows, features] to the drafter's KV, at slots int64 [rows]."""
        super()._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden, cache_loc=slots, positions=positions, **kwargs
        )

    def decode_step(
        self, batch: Any, on_publish: Any, grammar_barrier: Any = None
    ) -> GenerationBatchResult:
        """Plan, draft, decide, verify, accept, commit; then learn from what came of it."""
        assert self.learning and self.controller, "the costs are measured before serving"
        timer = StepTimer(self.device)
        window = open_window(self, batch, self.block_size)
        contexts = window.prefix_lens
        plan = self.plan(batch)
        timer.mark("decide")

        if len(plan.drafted):
            self.draft_kv.settle()
            timer.mark("settle")
        drafts = draft_blocks(self, batch, window, plan, timer)
        timer.mark("draft")

        verify_lens, num_rows, decision = self.ranks.lengths_decided(
            lambda: self.decide(drafts, plan), window.bs, window.positions.device
        )
        timer.mark("decide")

        target, accepted = self.verify_and_commit(
            batch, window, drafts, verify_lens, num_rows, on_publish, timer, grammar_barrier
        )
        for _ in range(1, plan.num_passes):
            if self.arrivals.are_waiting():
                plan = self.controller.cut_short(plan, accepted.num_passes)
                break
            window = advanced(window, accepted.bonus)
            target, behind = self.verify_and_commit(
                batch, window, drafts, verify_lens, num_rows, timer=timer
            )
            accepted = accepted.then(behind.bonus)
        if decision is not None:
            self.learning.outcome(batch, plan, drafts, verify_lens, accepted, decision)
        timer.mark("decide")
        timer.stop()
        self.learning.costs(plan, drafts, num_rows, timer)
        record(
            self,
            batch=batch,
            contexts=contexts,
            plan=plan,
            drafts=drafts,
            verify_lens=verify_lens,
            num_rows=num_rows,
            verified_rows=target.logits.shape[0],
            accepted=accepted,
            decision=decision,
            timer=timer,
        )
        if accepted.num_passes > 1:
            count_passes(batch.reqs, accepted.num_passes - 1)
        new_seq_lens = contexts + accepted.num_emitted
        return self._result(new_seq_lens, verify_lens, target, accepted)

    def plan(self, batch: Any) -> Plan:
        """For whom this step drafts, and how deep; with several ranks, as rank 0 decides."""
        assert self.controller is not None, "the costs are measured before serving"
        context = batch.seq_lens_sum / len(batch.reqs)
        own = self._own_plan(batch, context) if self.ranks.decides else None
        if own is not None and self.ranks.size == 1:
            return own
        shared = self.ranks.decided(lambda: _to_share(own))
        plan = own or self.controller.following(*shared, len(batch.reqs), context)
        return replace(plan, stages=LedStages(self.ranks, plan.stages))

    def _own_plan(self, batch: Any, context: float) -> Plan:
        assert self.controller is not None
        passes = most_passes(self, batch)
        if self.forced is not None:
            bs, step = len(batch.reqs), self.metrics.steps
            return self.controller.forced(self.forced, bs, context, step, passes)
        return self.controller.plan([r.rid for r in batch.reqs], context, passes)

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """The parent warns that it verifies greedily at any temperature; DCUT does not."""

    def decide(self, drafts: DraftBlock, plan: Plan) -> tuple[torch.Tensor, int, Decision | None]:
        """Verify lengths int32 [bs], their sum, and the selector's reasons (None when forced)."""
        if self.forced is not None:
            ranked = rank_drafts(drafts.survival)
            verify_lens = self.forced.verify_lens(
                ranked, self.block_size, self.metrics.steps, plan.drafted, drafts.computed.depth
            )
            return verify_lens.to(self.device), int(verify_lens.sum()), None
        assert self.selector is not None and self.controller is not None
        if not drafts.num_drafted:
            lens = torch.ones(len(drafts.tokens), dtype=torch.int32, device=self.device)
            return lens, len(lens), self.selector.plain(plan.costs, plan.overhead_ms)
        ranked, decision = self.selector.decide(
            drafts.survival,
            plan.depths(drafts.computed),
            plan.costs,
            plan.draft_ms(drafts.computed),
        )
        decision = self.controller.explored(decision, plan, drafts.num_drafts)
        verify_lens = ranked.verify_lens(decision.num_kept)
        return verify_lens.to(self.device), decision.num_rows, decision

    def verify_and_commit(
        self,
        batch: Any,
        window: BlockWindow,
        drafts: DraftBlock,
        verify_lens: torch.Tensor,
        num_rows: int,
        on_publish: Any = None,
        timer: StepTimer | None = None,
        grammar_barrier: Any = None,
    ) -> tuple[TargetOutput, Accepted]:
        """What a step costs once its lengths are chosen; the probe times this very function."""
        timer = timer or StepTimer(self.device)
        rows = pack(window, verify_lens, num_rows)
        choice = self.chooser.begin(batch, window, drafts.tokens, verify_lens, rows)
        target = verify(self, batch, window, drafts, rows)
        if choice is None:
            chosen, site = argmax_rows(target.logits), SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
        else:
            chosen = choice.choose(target.logits, grammar_barrier)
            site = SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        self._tp_sync.sync(site, chosen)
        timer.mark("verify")

        accepted = accept(drafts.tokens, chosen, rows.index, verify_lens)
        if on_publish is not None:
            on_publish(window.prefix_lens + accepted.num_emitted)
        self.draft_kv.commit(window, rows, target.hidden)
        if choice is not None:
            choice.commit(accepted, target.result.logits_output)
        timer.mark("commit")
        return target, accepted

    def _result(
        self,
        new_seq_lens: torch.Tensor,
        verify_lens: torch.Tensor,
        target: TargetOutput,
        accepted: Accepted,
    ) -> GenerationBatchResult:
        """The fields that the scheduler reads (batch_result_processor.py, scheduler.run_batch)."""
        # Under overlap, whatever stays in here is copied to the host.
        output = target.result.logits_output
        output.hidden_states = output.next_token_logits = None
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=accepted.num_emitted.to(torch.int32),
            cap_lens=verify_lens,
            can_run_cuda_graph=target.result.can_run_cuda_graph,
            next_draft_input=make_draft_input_v2(
                bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self.block_size,
            num_non_draft_tokens_per_req=accepted.num_passes,
            new_seq_lens=new_seq_lens,
            routed_experts_output=target.result.routed_experts_output,
            indexer_topk_output=target.result.indexer_topk_output,
        )


def _to_share(plan: Plan | None) -> tuple[Mode, IntArray, int]:
    """What the other ranks need of rank 0's plan."""
    assert plan is not None, "only rank 0, which has a plan, is asked"
    return plan.mode, plan.drafted, plan.block_size
