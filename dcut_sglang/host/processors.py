"""Custom logit processors along the block.

A processor may read its request (``__req__``, a thinking budget does) and keep notes in its
request's parameters. Plain decoding calls it once per token; so here each row gets a view of
the request as it will be if the row's drafts are accepted, and the notes as the row before it
left them. Only the notes of the last accepted row are kept.
"""

from __future__ import annotations

import copy
from array import array
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dcut_sglang.accept import Accepted
from dcut_sglang.host.row_table import RowTable
from dcut_sglang.host.window import BlockWindow

_REQ = "__req__"
Params = dict[str, Any]


class RequestAtRow:
    """A request as a processor sees it at one row: SGLang's, with that row's output ids."""

    def __init__(self, req: Any, output_ids: array[int]) -> None:
        self._req = req
        self.output_ids = output_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


@dataclass
class _LastStep:
    """What a request's last step left behind, on the device until the next step asks.

    ``num_before`` tokens had been emitted before it, the anchor included.
    """

    num_before: int
    out_tokens: torch.Tensor
    num_emitted: torch.Tensor
    notes: list[Params | None]


class ProcessorMemory:
    """The last step of every live request with a custom processor.

    Under overlap the scheduler's output ids lack exactly that step's tokens.
    """

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Any, _LastStep] = WeakKeyDictionary()
        # Tokens emitted before a request's last prefill, and its notes then.
        self._prefilled: WeakKeyDictionary[Any, tuple[int, Params]] = WeakKeyDictionary()

    def begin(self, req: Any, prefix_len: int, anchor: int) -> array[int]:
        """The request's output ids up to its anchor; settles the notes of its last step."""
        tail: list[int] = []
        last = self._last.pop(req, None)
        if last is not None:
            count = int(last.num_emitted)
            tail = last.out_tokens[:count].tolist()
            _replace(req.sampling_params.custom_params, last.notes[count - 1])
        num_emitted = prefix_len - len(req.origin_input_ids) + 1
        missing = max(num_emitted - len(req.output_ids), 0)
        tail = [*tail[:-1], anchor]
        known = list(req.output_ids[: num_emitted - missing])
        return array("q", known + tail[len(tail) - missing :])

    def settle(self, req: Any) -> None:
        """Settle the notes of a request before a prefill, which calls its processor itself.

        After a retraction, the request's last step counts only if the scheduler has kept that
        step's tokens; so does an earlier prefill.
        """
        params, num_kept = req.sampling_params.custom_params, len(req.output_ids)
        last = self._last.pop(req, None)
        if last is not None:
            count = int(last.num_emitted)
            if num_kept >= last.num_before + count:
                _replace(params, last.notes[count - 1])
        num_before, notes = self._prefilled.get(req, (-1, None))
        if num_kept == num_before:
            _replace(params, notes)
        if isinstance(params, dict):
            self._prefilled[req] = (num_kept, _without_request(params))

    def keep(self, req: Any, last: _LastStep) -> None:
        self._last[req] = last


class StepProcessors:
    """The custom processors of one step. Host syncs: committed lengths, drafts, and what the
    last step emitted, as processors are host code that may read any of it."""

    def __init__(
        self,
        memory: ProcessorMemory,
        batch: Any,
        window: BlockWindow,
        blocks: torch.Tensor,
        table: RowTable,
    ) -> None:
        self._memory, self._batch, self._table = memory, batch, table
        self._entries = list(batch.sampling_info.custom_logit_processor.values())
        self._places = sorted({i for entry in self._entries for i in entry.rows})
        self._blocks = blocks.tolist()
        prefix_lens = window.prefix_lens.tolist()
        self._emitted = {
            i: memory.begin(batch.reqs[i], prefix_lens[i], self._blocks[i][0]) for i in self._places
        }
        # Notes after each row.
        self._notes: dict[int, list[Params | None]] = {i: [] for i in self._places}

    def apply(self, logits: torch.Tensor) -> None:
        """Change ``logits`` [rows, vocab] in place."""
        for entry in self._entries:
            for depth in range(max(self._table.lens[i] for i in entry.rows)):
                places, rows = self._table.at_depth(entry.rows, depth)
                params = [self._params(i, depth) for i in places]
                changed = entry.processor(logits.index_select(0, rows), params)
                logits.index_copy_(0, rows, changed.to(logits.dtype))
                for i, after in zip(places, params, strict=True):
                    self._notes[i].append(after)

    def _params(self, place: int, depth: int) -> Params | None:
        req = self._batch.reqs[place]
        before = self._notes[place][depth - 1] if depth else req.sampling_params.custom_params
        if not isinstance(before, dict):
            return before
        params = _without_request(before)
        if _REQ in before:
            output_ids = self._emitted[place] + array("q", self._blocks[place][1 : depth + 1])
            params[_REQ] = RequestAtRow(req, output_ids)
        return params

    def commit(self, accepted: Accepted) -> None:
        """Remember the step. No host sync."""
        for i in self._places:
            last = _LastStep(
                len(self._emitted[i]),
                accepted.out_tokens[i],
                accepted.num_emitted[i],
                self._notes[i],
            )
            self._memory.keep(self._batch.reqs[i], last)


def _without_request(params: Params) -> Params:
    return {k: copy.deepcopy(v) for k, v in params.items() if k != _REQ}


def _replace(params: Params | None, notes: Params | None) -> None:
    """Make a request's parameters what a processor left, keeping SGLang's own reference."""
    if isinstance(params, dict) and isinstance(notes, dict):
        kept = {_REQ: params[_REQ]} if _REQ in params else {}
        params.clear()
        params.update({k: v for k, v in notes.items() if k != _REQ} | kept)
