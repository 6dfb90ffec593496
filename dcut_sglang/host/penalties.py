"""Penalties and minimum lengths of the batch's requests, along their blocks.

SGLang counts emitted tokens on the host, a step late under overlap, and not at all when
speculating (``ScheduleBatch.prepare_for_decode`` returns first). So the counts are kept here,
on the device, and never wait for the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dcut_sglang.accept import Accepted
from dcut_sglang.host.row_table import RowTable
from dcut_sglang.host.window import BlockWindow, PackedRows
from dcut_sglang.penalties import (
    Penalties,
    advance,
    counts_at_rows,
    forbid_early_stop,
    penalise,
)


def penalties_asked(sampling_info: Any) -> bool:
    """Whether any request has a penalty or a minimum length, from SGLang's own flag."""
    orchestrator = sampling_info.penalizer_orchestrator
    return sampling_info.acc_additive_penalties is not None or (
        orchestrator is not None and orchestrator.is_required
    )


class EmittedCounts:
    """How often each live request has emitted each token, anchors left out.

    Entries die with SGLang's request object. A retracted request starts again from what the
    scheduler has kept of it.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, tuple[int, torch.Tensor]] = WeakKeyDictionary()
        self._stops: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()

    def get(self, req: Any, prefix_len: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """float32 [vocab]. Host sync only at a request's first step after a retraction.

        Args:
            prefix_len: int scalar on the device, the request's committed length.
        """
        known = self._known.get(req)
        if known is not None and known[0] == req.retraction_count:
            return known[1]
        counts = torch.zeros(vocab_size, dtype=torch.float32, device=prefix_len.device)
        if req.retraction_count:
            num_before = int(prefix_len) - len(req.origin_input_ids)
            emitted = torch.tensor(list(req.output_ids[:num_before]), dtype=torch.int64)
            counts += torch.bincount(emitted, minlength=vocab_size).to(counts)
        return counts

    def keep(self, reqs: Sequence[Any], counts: torch.Tensor) -> None:
        for req, row in zip(reqs, counts, strict=True):
            self._known[req] = (req.retraction_count, row)

    def stops(self, req: Any, vocab_size: int, device: torch.device) -> torch.Tensor:
        """Tokens that would end the request, as SGLang's minimum length forbids them: bool
        [vocab]."""
        if req not in self._stops:
            ids = {
                *(req.sampling_params.stop_token_ids or ()),
                *(req.eos_token_ids or ()),
                *(req.tokenizer.additional_stop_token_ids or ()),
                req.tokenizer.eos_token_id,
            } - {None}
            mask = torch.zeros(vocab_size, dtype=torch.bool)
            mask[[i for i in ids if i < vocab_size]] = True
            self._stops[req] = mask.to(device)
        return self._stops[req]


def prefill_info(batch: Any, emitted: EmittedCounts) -> Any:
    """The sampling record of a prefill whose requests have emitted before they were retracted.

    SGLang begins to count anew there, for penalties and minimum lengths alike; the token that
    such a prefill draws must see all that was emitted.
    """
    info, reqs, device = batch.sampling_info, batch.reqs, batch.device
    params = [req.sampling_params for req in reqs]
    counts = torch.stack(
        [
            torch.bincount(
                torch.tensor(list(req.output_ids), dtype=torch.int64), minlength=info.vocab_size
            ).float()
            for req in reqs
        ]
    ).to(device)
    frequency, presence, repetition = (
        torch.tensor([[getattr(p, name)] for p in params], device=device)
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
    )
    additive = -frequency * counts - presence * (counts > 0)
    for row, req in enumerate(reqs):
        if len(req.output_ids) < req.sampling_params.min_new_tokens:
            additive[row, emitted.stops(req, info.vocab_size, counts.device)] = float("-inf")
    return dataclasses.replace(
        info,
        penalizer_orchestrator=None,
        acc_additive_penalties=additive,
        acc_scaling_penalties=torch.where(counts > 0, repetition, 1.0),
    )


class StepPenalties:
    """The penalties of one step: what they do to its rows, and what it adds to the counts."""

    def __init__(
        self,
        emitted: EmittedCounts,
        reqs: Sequence[Any],
        window: BlockWindow,
        blocks: torch.Tensor,
        rows: PackedRows,
        table: RowTable,
    ) -> None:
        params = [req.sampling_params for req in reqs]
        self._emitted, self._reqs, self._window = emitted, reqs, window
        self._blocks, self._rows, self._table = blocks, rows, table
        self._penalised = [
            i
            for i, p in enumerate(params)
            if p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0
        ]
        self._minimum = [i for i, p in enumerate(params) if p.min_new_tokens > 0]
        self._counts: torch.Tensor | None = None

    def apply(self, logits: torch.Tensor) -> None:
        """Change ``logits`` [rows, vocab] in place."""
        if self._penalised:
            self._apply_penalties(logits)
        if self._minimum:
            self._apply_minimum(logits)

    def _apply_penalties(self, logits: torch.Tensor) -> None:
        places, vocab_size = self._penalised, logits.shape[1]
        prefix_lens = self._window.prefix_lens
        self._counts = torch.stack(
            [self._emitted.get(self._reqs[i], prefix_lens[i], vocab_size) for i in places]
        )
        index, among = self._rows_of(places)
        params = [self._reqs[i].sampling_params for i in places]
        penalties = Penalties(
            *(
                torch.tensor([getattr(p, name) for p in params], device=logits.device)
                for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
            )
        )
        counts = counts_at_rows(
            self._counts, self._blocks[places], among, self._rows.index[index] % self.block_size
        )
        logits[index] = penalise(logits[index], counts, penalties.of(among))

    def _apply_minimum(self, logits: torch.Tensor) -> None:
        places, vocab_size = self._minimum, logits.shape[1]
        reqs = [self._reqs[i] for i in places]
        index, among = self._rows_of(places)
        prompt_lens, min_new = (
            torch.tensor(values, device=logits.device)[among]
            for values in (
                [len(req.origin_input_ids) for req in reqs],
                [req.sampling_params.min_new_tokens for req in reqs],
            )
        )
        stops = torch.stack([self._emitted.stops(r, vocab_size, logits.device) for r in reqs])
        # The row at the anchor's position predicts what follows the anchor.
        num_before = self._rows.positions[index] + 1 - prompt_lens
        logits[index] = forbid_early_stop(logits[index], stops[among], num_before, min_new)

    @property
    def block_size(self) -> int:
        return self._window.block_size

    def _rows_of(self, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed rows of these requests, and each row's place among them."""
        lens = torch.tensor([self._table.lens[i] for i in places])
        among = torch.repeat_interleave(torch.arange(len(places)), lens)
        return self._table.of(places), among.to(self._blocks.device)

    def commit(self, accepted: Accepted) -> None:
        """Count the step's tokens. No host sync."""
        if self._counts is not None:
            places = self._penalised
            counts = advance(self._counts, self._blocks[places], accepted.num_emitted[places])
            self._emitted.keep([self._reqs[i] for i in places], counts)
