"""How the target's token at each verified row is chosen, when a request asks for more than the
largest logit.

Every adjustment that plain decoding makes is made at every row, in its order
(``SamplingBatchInfo.apply_logits_bias``, then ``Sampler.forward``): penalties and minimum
length, grammar, bias, custom processors; then greedy requests take the largest logit and the
others draw. What depends on emitted tokens sees, at row t, those emitted so far and drafts
1..t. Acceptance (``dcut_sglang.accept``) compares drafts with the tokens chosen here, and so is
the same for every feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.utils.async_probe import sanitize_nan_logits

from dcut_sglang.accept import Accepted
from dcut_sglang.host.grammar import StepGrammar
from dcut_sglang.host.logprobs import fill_logprobs
from dcut_sglang.host.penalties import EmittedCounts, StepPenalties, penalties_asked, prefill_info
from dcut_sglang.host.processors import ProcessorMemory, StepProcessors
from dcut_sglang.host.row_table import RowTable
from dcut_sglang.host.sampling import choose_tokens
from dcut_sglang.host.window import BlockWindow, PackedRows


def can_choose_alone(batch: Any) -> bool:
    """Whether a token is all that the choice of the next one needs to know of it."""
    info = batch.sampling_info
    return info is None or not (
        info.has_custom_logit_processor
        or penalties_asked(info)
        or batch.has_grammar
        or batch.return_logprob
    )


class Chooser:
    """What a worker remembers of its requests between steps.

    Args:
        sampler: the target's ``Sampler``.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.emitted = EmittedCounts()
        self.memory = ProcessorMemory()

    @contextmanager
    def prefill(self, batch: Any) -> Iterator[None]:
        """A prefill draws a token itself, behind what retracted requests had emitted before."""
        info = batch.sampling_info
        if info is not None and info.has_custom_logit_processor:
            for req in batch.reqs:
                self.memory.settle(req)
        if info is not None and penalties_asked(info) and any(r.output_ids for r in batch.reqs):
            batch.sampling_info = prefill_info(batch, self.emitted)
        try:
            yield
        finally:
            batch.sampling_info = info

    def begin(
        self,
        batch: Any,
        window: BlockWindow,
        blocks: torch.Tensor,
        verify_lens: torch.Tensor,
        rows: PackedRows,
    ) -> StepChoice | None:
        """Prepare a step, before its verify is launched.

        Returns None, having done nothing, when every request takes the largest logit as the
        target gives it. Otherwise one host sync, for the verify lengths.

        Args:
            blocks: int64 [bs, D], anchor and drafts.
        """
        info = batch.sampling_info
        takes_largest = info is None or (info.is_all_greedy and info.logit_bias is None)
        if takes_largest and can_choose_alone(batch):
            return None
        return StepChoice(self, batch, window, blocks, verify_lens, rows)


class StepChoice:
    """One step of a batch in which a request asks for something."""

    def __init__(
        self,
        chooser: Chooser,
        batch: Any,
        window: BlockWindow,
        blocks: torch.Tensor,
        verify_lens: torch.Tensor,
        rows: PackedRows,
    ) -> None:
        info = batch.sampling_info
        self._sampler, self._batch, self._rows = chooser.sampler, batch, rows
        self._block_size = window.block_size
        self._grammar = (
            StepGrammar(blocks, verify_lens, info.vocab_size) if batch.has_grammar else None
        )
        self._table = RowTable(verify_lens)
        self._penalties = (
            StepPenalties(
                chooser.emitted, batch.reqs, window, blocks, rows, self._table, info.vocab_size
            )
            if penalties_asked(info)
            else None
        )
        self._processors = (
            StepProcessors(chooser.memory, batch, window, blocks, self._table)
            if info.has_custom_logit_processor
            else None
        )
        self._logits: torch.Tensor | None = None
        self._chosen: torch.Tensor | None = None

    def choose(self, logits: torch.Tensor, barrier: Callable[[], None] | None) -> torch.Tensor:
        """The target's token after each row: int64 [rows].

        Args:
            logits: [rows, vocab], as the target gave them; not changed.
            barrier: SGLang's grammar barrier, or None.
        """
        batch, rows = self._batch, self._rows
        logits = logits.clone()
        if self._penalties is not None:
            self._penalties.apply(logits)
        if self._grammar is not None:
            self._grammar.apply(logits, batch, rows, barrier)
        if batch.sampling_info.logit_bias is not None:
            logits += batch.sampling_info.logit_bias[rows.request]
        if self._processors is not None:
            self._processors.apply(logits)
        sanitize_nan_logits(logits, "DCUT: verified logits")
        self._logits = logits
        self._chosen = choose_tokens(self._sampler, logits, batch, rows, self._table)
        return self._chosen

    def commit(self, accepted: Accepted, output: Any) -> None:
        """Remember what was emitted, and hand log-probabilities to SGLang. No host sync.

        Args:
            output: SGLang's logits output of the verify.
        """
        assert self._logits is not None and self._chosen is not None, "choose first"
        if self._penalties is not None:
            self._penalties.commit(accepted)
        if self._processors is not None:
            self._processors.commit(accepted)
        if self._batch.return_logprob:
            fill_logprobs(
                output,
                self._batch,
                self._logits,
                self._chosen,
                self._rows,
                self._table,
                self._block_size,
            )
