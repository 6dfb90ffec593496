"""What a step teaches: outcomes of drafts to the controller, measured times to the costs."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from dcut_sglang.accept import Accepted
from dcut_sglang.controller import Controller
from dcut_sglang.correction import CostCorrection, MeasuredStep, refined
from dcut_sglang.host.draft import DraftBlock
from dcut_sglang.host.metrics import StepTimer
from dcut_sglang.plan import Plan
from dcut_sglang.selector import Decision, Selector

logger = logging.getLogger(__name__)


class Learning:
    """Feeds the controller and the costs of one worker.

    Args:
        selector: its cost table is replaced as it is corrected.
        controller: learns from outcomes.
        max_bs: largest batch that the server can run.
        decides: whether this rank decides; the others learn nothing, since they do as it says.
    """

    def __init__(
        self, selector: Selector, controller: Controller, max_bs: int, decides: bool
    ) -> None:
        config = selector.config
        corrects = decides and config.cost_correction and not config.deterministic
        self.correction = CostCorrection(refined(selector.cost, max_bs)) if corrects else None
        self._selector = selector
        self._controller = controller
        self._ended_s: float | None = None  # of the last decode step, if nothing ran since

    def interrupted(self) -> None:
        """Something else than a decode step runs."""
        self._ended_s = None

    def outcome(
        self,
        batch: Any,
        plan: Plan,
        drafts: DraftBlock,
        verify_lens: torch.Tensor,
        accepted: Accepted,
        decision: Decision,
    ) -> None:
        """Let the controller know what was drafted and what came of it. Syncs with a step that
        drafted."""
        requests = [r.rid for r in batch.reqs]
        if not drafts.num_drafted:
            none = np.zeros(len(requests), dtype=np.int64)
            self._controller.advance(requests, none, none + plan.num_passes, decision, plan)
            return
        kept = verify_lens.cpu().numpy().astype(np.int64) - 1
        num_accepted = accepted.num_drafts.cpu().numpy()
        self._controller.observe(
            [requests[i] for i in plan.drafted],
            drafts.computed,
            drafts.confidence.numpy()[plan.drafted],
            kept[plan.drafted],
            num_accepted[plan.drafted],
            plan,
        )
        self._controller.advance(requests, kept, num_accepted + 1, decision, plan)

    def costs(self, plan: Plan, drafts: DraftBlock, num_rows: int, timer: StepTimer) -> None:
        """Let measured times correct the costs, where steps are timed on the table's clock."""
        if self.correction is None or timer.step_ms is None:
            return
        if plan.is_followed:
            self._ended_s = timer.ended_s
            return
        forward_ms, head_ms = timer.priced("draft"), timer.priced("head", "confidence")
        verify_ms = timer.priced("verify", "commit")
        # What plain steps left to be written is no price of the drafts that it is written for.
        settle_ms = timer.priced("settle")
        other_ms = timer.step_ms - (forward_ms + head_ms + verify_ms + settle_ms)
        # The costs are those of a pass.
        passes = plan.num_passes
        measured = MeasuredStep(
            bs=plan.costs.bs,
            rows=num_rows,
            context=plan.context,
            num_drafted=drafts.num_drafted,
            draft_block_size=plan.block_size,
            head_rows=drafts.computed.rows,
            forward_ms=forward_ms,
            head_ms=head_ms,
            verify_ms=verify_ms / passes,
            other_ms=(other_ms + self._gap_ms(timer)) / passes,
            costs=plan.costs,
        )
        if self.correction.observe(measured):
            logger.warning(
                "DCUT: steps take %.2f times what the cost table says, over the last hundred; "
                "costs are being corrected. Has the machine's load changed since start-up?",
                self.correction.error_ratio,
            )
        self._selector.cost = self.correction.table
        self._controller.overhead_ms = (
            self.correction.overhead_ms(drafting=False),
            self.correction.overhead_ms(drafting=True),
        )

    def _gap_ms(self, timer: StepTimer) -> float:
        """What the scheduler's thread spent between the last decode step and this one; 0 where
        something else ran in between."""
        ended_s, self._ended_s = self._ended_s, timer.ended_s
        return 0.0 if ended_s is None else max(0.0, (timer.started_s - ended_s) * 1e3)
