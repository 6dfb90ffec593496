"""The decision trace: what each step knew, chose, got and paid.

Format, version 2 (little-endian). The file is a sequence of records,

    kind: u8 | payload length: u32 | CRC-32 of the payload: u32 | payload

of four kinds: a HEADER (JSON: version, block size, what the writer was told about the run), a
NAME (a text that later records refer to by its number: request ids and forced choices), a STEP,
and an END (why the writer stopped). A STEP's payload is a fixed head followed by arrays over the
bs requests: name number u32, context u32, verify length u8, accepted drafts u8; then the rows of
the draft head's stages u32, and, when the step drafted, the confidences as float32 [bs, D-1];
in every-anchor recordings, the tokens u32 [bs, D]; last, where the step was decided and not
forced, its reasons (absent in older traces): numbers u16 n and m, then of n weighed candidates
the drafts kept u32, the expected tokens float32 and the predicted milliseconds float32, and m
gains of drafting float32.

Each record is one unbuffered write, so a process that dies loses at most the record it was
writing; the reader returns every whole record before the damage.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dcut_sglang.candidates import Candidates
from dcut_sglang.trace.records import (
    END,
    END_HEAD,
    FORMAT,
    FORMAT_VERSION,
    HAS_CONFIDENCE,
    HAS_REASONS,
    HAS_TOKENS,
    HEADER,
    NAME,
    PHASES,
    REASONS_HEAD,
    STEP,
    STEP_HEAD,
    Mode,
    Records,
)

__all__ = ["PHASES", "Mode", "Trace", "TraceError", "TraceStep", "read_trace"]

IntArray = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class TraceError(ValueError):
    """A file that is not a trace, or of another version."""


@dataclass(frozen=True, eq=False)
class TraceStep:
    """One decode step of the batch.

    Attributes:
        step: the writer's step number.
        mode: "speculate", or "plain" for a step that drafts nothing.
        forced: label of a forced choice, "" when the selector chose.
        predicted_ms: cost-table milliseconds of the decision; nan: unknown.
        measured_ms: milliseconds of the whole step, on the clock of the cost table (on a CPU the
            thread's CPU time); nan: unknown.
        phase_ms: wall milliseconds by phase, float32 [4] in the order of ``PHASES``; nan: unknown.
        requests: int64 [bs], place of each request's id in ``Trace.names``.
        contexts: int64 [bs], committed tokens before the step.
        verify_lens: int64 [bs], anchor counted.
        accepted: int64 [bs], accepted drafts; a request emits one token more.
        confidence: float32 [bs, D-1], 0 for requests that were not drafted for; None where none
            was.
        tokens: int64 [bs, D], anchors and drafts (0 where none was computed); None unless the
            trace was recorded with them.
        draft_block_size: D of the step's draft forward.
        head_rows: rows of each stage of the draft head; () where it ran over whole blocks.
        candidates: numbers of drafts that were weighed, thinned; None where the choice was
            forced, or the trace is of an earlier version.
        draft_gains: float64, tokens that drafting for the 1, 2, .. bs best requests (one entry:
            for all) was expected to add, less the price of its time; () as for ``candidates``, and
            where nothing was known of the requests yet.
    """

    step: int
    mode: Mode
    forced: str
    predicted_ms: float
    measured_ms: float
    phase_ms: Float32Array
    requests: IntArray
    contexts: IntArray
    verify_lens: IntArray
    accepted: IntArray
    confidence: Float32Array | None
    tokens: IntArray | None = None
    draft_block_size: int = 0
    head_rows: tuple[int, ...] = ()
    candidates: Candidates | None = None
    draft_gains: tuple[float, ...] = ()

    @property
    def bs(self) -> int:
        return len(self.verify_lens)

    @property
    def num_drafted(self) -> int:
        """Requests that were drafted for; all of them where the trace does not say."""
        if self.mode == "plain":
            return 0
        return self.bs if self.confidence is None else int((self.confidence > 0).any(axis=1).sum())


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace read back.

    Attributes:
        block_size: D.
        conditions: what the writer was told about the run (model, host, ...).
        names: number -> text; place 0 is unused.
        steps: every whole step record, in order.
        end: "closed" and "full" (stopped at its size limit) were written by the writer;
            "missing" means that the writer died, "damaged" that a record is incomplete or does
            not match its checksum. What follows the damage is not read.
        dropped_steps: steps that no longer fitted, known only when ``end`` is "full".
    """

    block_size: int
    conditions: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ("",)
    steps: tuple[TraceStep, ...] = ()
    end: Literal["closed", "full", "missing", "damaged"] = "closed"
    dropped_steps: int = 0

    @property
    def truncated(self) -> bool:
        """The run had more steps than the trace holds, or may have had."""
        return self.end != "closed"

    @property
    def num_tokens(self) -> int:
        """Tokens emitted by the recorded steps."""
        return sum(int(step.accepted.sum()) + step.bs for step in self.steps)

    @property
    def num_rows(self) -> int:
        """Tokens that the target saw in the recorded steps."""
        return sum(int(step.verify_lens.sum()) for step in self.steps)


def read_trace(path: Path | str) -> Trace:
    """Read a trace, as far as it is whole.

    Raises:
        TraceError: not a trace, a damaged header, another version, or whole records that do not
            hold what this version writes.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    records = Records(data)
    first = next(records, None)
    if first is None or first[0] != HEADER:
        raise TraceError(f"{path} is not a DCUT trace")
    try:
        header = json.loads(first[1])
        known = header["format"] == FORMAT
        version, block_size = header["version"], int(header["block_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: damaged trace header: {error!r}") from error
    if not known or version != FORMAT_VERSION:
        raise TraceError(f"{path}: trace version {version!r}, this reads {FORMAT_VERSION}")
    names = [""]
    steps: list[TraceStep] = []
    end: Literal["closed", "full", "missing", "damaged"] = "missing"
    dropped = 0
    for kind, payload in records:
        if kind == NAME:
            names.append(payload.decode(errors="replace"))
        elif kind == STEP:
            try:
                steps.append(_read_step(payload, block_size, names))
            except (ValueError, IndexError, struct.error) as error:
                raise TraceError(
                    f"{path}: step record {len(steps) + 1} is whole, but not as this dcut_sglang "
                    f"writes them ({error}); was the trace recorded with an earlier commit?"
                ) from error
        elif kind == END:
            is_full, _, dropped = END_HEAD.unpack(payload)
            end = "full" if is_full else "closed"
            break
    if records.damaged:
        end = "damaged"
    return Trace(block_size, header.get("conditions", {}), tuple(names), tuple(steps), end, dropped)


def _read_step(payload: bytes, block_size: int, names: Sequence[str]) -> TraceStep:
    head = STEP_HEAD.unpack_from(payload)
    step, bs, speculate, has, last_place, num_stages, forced, predicted_ms, measured_ms, *phases = (
        head
    )
    at = STEP_HEAD.size

    def take(dtype: str, count: int) -> npt.NDArray[Any]:
        nonlocal at
        array = np.frombuffer(payload, dtype, count, at)
        at += array.nbytes
        return array

    def floats(count: int) -> npt.NDArray[np.float64]:
        return take("<f4", count).astype(np.float64)

    def reasons() -> tuple[Candidates | None, tuple[float, ...]]:
        nonlocal at
        if not has & HAS_REASONS:
            return None, ()
        num_candidates, num_gains = REASONS_HEAD.unpack_from(payload, at)
        at += REASONS_HEAD.size
        kept = take("<u4", num_candidates).astype(np.int64)
        found = Candidates(kept, floats(num_candidates), floats(num_candidates))
        return (found if num_candidates else None), tuple(floats(num_gains).tolist())

    whole = TraceStep(
        step=step,
        mode="speculate" if speculate else "plain",
        forced=names[forced],
        predicted_ms=predicted_ms,
        measured_ms=measured_ms,
        phase_ms=np.array(phases, dtype=np.float32),
        requests=take("<u4", bs).astype(np.int64),
        contexts=take("<u4", bs).astype(np.int64),
        verify_lens=take("u1", bs).astype(np.int64) + 1,
        accepted=take("u1", bs).astype(np.int64),
        head_rows=tuple(take("<u4", num_stages).tolist()),
        confidence=(
            take("<f4", bs * (block_size - 1)).reshape(bs, -1).copy()
            if has & HAS_CONFIDENCE
            else None
        ),
        draft_block_size=last_place + 1,
        tokens=(
            take("<u4", bs * block_size).reshape(bs, -1).astype(np.int64)
            if has & HAS_TOKENS
            else None
        ),
    )
    candidates, draft_gains = reasons()
    return replace(whole, candidates=candidates, draft_gains=draft_gains)
