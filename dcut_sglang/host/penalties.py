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
    """The penalties of one step: what they do to its rows, and what it adds to the counts.

    Whatever comes from the host is sent to the device here, before the verify is launched.

    Args:
        blocks: int64 [bs, D], anchor and drafts.
    """

    def __init__(
        self,
        emitted: EmittedCounts,
        reqs: Sequence[Any],
        window: BlockWindow,
        blocks: torch.Tensor,
        rows: PackedRows,
        table: RowTable,
        vocab_size: int,
    ) -> None:
        params = [req.sampling_params for req in reqs]
        penalised = [
            i
            for i, p in enumerate(params)
            if p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0
        ]
        minimum = [i for i, p in enumerate(params) if p.min_new_tokens > 0]
        self._emitted = emitted
        self._penalties = self._minimum = None
        if penalised:
            self._penalties = _PenalisedRows(
                [reqs[i] for i in penalised],
                _Rows(penalised, rows, table, blocks, window.block_size),
                torch.stack(
                    [emitted.get(reqs[i], window.prefix_lens[i], vocab_size) for i in penalised]
                ),
            )
        if minimum:
            self._minimum = _MinimumRows(
                [reqs[i] for i in minimum],
                _Rows(minimum, rows, table, blocks, window.block_size),
                torch.stack([emitted.stops(reqs[i], vocab_size, blocks.device) for i in minimum]),
            )

    def apply(self, logits: torch.Tensor) -> None:
        """Change ``logits`` [rows, vocab] in place. No host sync."""
        if self._penalties is not None:
            self._penalties.apply(logits)
        if self._minimum is not None:
            self._minimum.apply(logits)

    def commit(self, accepted: Accepted) -> None:
        """Count the step's tokens. No host sync."""
        if self._penalties is not None:
            self._emitted.keep(self._penalties.reqs, self._penalties.advanced(accepted))


class _Rows:
    """The rows of some of the batch's requests.

    Attributes:
        places: int64 [n], those requests.
        blocks: int64 [n, D].
        index: int64 [rows], their packed rows.
        among: int64 [rows], each row's request, as a place among the n.
        depth: int64 [rows], each row's place in the block.
        positions: int64 [rows], of each row's input token.
    """

    def __init__(
        self,
        places: list[int],
        rows: PackedRows,
        table: RowTable,
        blocks: torch.Tensor,
        block_size: int,
    ) -> None:
        lens = torch.tensor([table.lens[i] for i in places])
        among = torch.repeat_interleave(torch.arange(len(places)), lens)
        self.places = _to_device(places, blocks.device)
        self.blocks = blocks[self.places]
        self.index = table.of(places)
        self.among = among.to(blocks.device, non_blocking=True)
        self.depth = rows.index[self.index] % block_size
        self.positions = rows.positions[self.index]


class _PenalisedRows:
    """Requests with a frequency, presence or repetition penalty."""

    def __init__(self, reqs: list[Any], rows: _Rows, counts: torch.Tensor) -> None:
        self.reqs, self._rows, self._counts = reqs, rows, counts
        of_requests = Penalties(
            *(
                _to_device([getattr(req.sampling_params, name) for req in reqs], counts.device)
                for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
            )
        )
        self._penalties = of_requests.of(rows.among)

    def apply(self, logits: torch.Tensor) -> None:
        rows = self._rows
        counts = counts_at_rows(self._counts, rows.blocks, rows.among, rows.depth)
        logits[rows.index] = penalise(logits[rows.index], counts, self._penalties)

    def advanced(self, accepted: Accepted) -> torch.Tensor:
        rows = self._rows
        return advance(self._counts, rows.blocks, accepted.num_emitted[rows.places])


class _MinimumRows:
    """Requests with a minimum length."""

    def __init__(self, reqs: list[Any], rows: _Rows, stops: torch.Tensor) -> None:
        self._rows, self._stops = rows, stops
        prompt_lens = _to_device([len(req.origin_input_ids) for req in reqs], stops.device)
        min_new = _to_device([req.sampling_params.min_new_tokens for req in reqs], stops.device)
        # The row at the anchor's position predicts what follows the anchor.
        self._num_before = rows.positions + 1 - prompt_lens[rows.among]
        self._min_new = min_new[rows.among]

    def apply(self, logits: torch.Tensor) -> None:
        rows = self._rows
        logits[rows.index] = forbid_early_stop(
            logits[rows.index], self._stops[rows.among], self._num_before, self._min_new
        )


def _to_device(values: list[Any], device: torch.device) -> torch.Tensor:
    return torch.tensor(values).to(device, non_blocking=True)
