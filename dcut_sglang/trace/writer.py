"""Writes the decision trace; the format is described in ``trace``."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    NO_NAME,
    PHASES,
    REASONS_HEAD,
    RECORD,
    STEP,
    STEP_HEAD,
    Mode,
    record,
)

_MOST_CANDIDATES = 64


class TraceWriter:
    """Appends steps to one file, up to a size.

    Args:
        path: created; an existing file is refused, so that a run never overwrites another's.
        block_size: D, 2..256.
        max_bytes: the file never grows beyond this; later steps are counted and dropped.
        conditions: JSON values that describe the run.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: it cannot be written (also from ``write_step`` and ``close``).
    """

    def __init__(
        self,
        path: Path | str,
        block_size: int,
        max_bytes: int = 256 << 20,
        conditions: Mapping[str, Any] | None = None,
    ) -> None:
        if not 2 <= block_size <= 256:
            raise ValueError(f"block_size must be in 2..256, got {block_size}")
        self.path = Path(path)
        self.block_size = block_size
        self.max_bytes = max_bytes
        self.full = False
        self.num_steps = 0
        self.dropped_steps = 0
        self._names: dict[str, int] = {}
        # The end record's place is reserved from the start.
        self._num_bytes = RECORD.size + END_HEAD.size
        header = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "block_size": block_size,
            "conditions": dict(conditions or {}),
        }
        first = record(HEADER, json.dumps(header).encode())
        if self._num_bytes + len(first) > max_bytes:
            raise ValueError(f"max_bytes must be at least {self._num_bytes + len(first)}")
        # Unbuffered, so that a step is either in the file or lost, never in between.
        self._file: io.RawIOBase | None = io.FileIO(self.path, "x")
        self._append(first)

    def write_step(
        self,
        *,
        step: int,
        request_ids: Sequence[str | int],
        verify_lens: npt.ArrayLike,
        accepted: npt.ArrayLike,
        contexts: npt.ArrayLike,
        mode: Mode = "speculate",
        confidence: npt.ArrayLike | None = None,
        tokens: npt.ArrayLike | None = None,
        predicted_ms: float = float("nan"),
        measured_ms: float = float("nan"),
        phase_ms: Mapping[str, float] | None = None,
        forced: str = "",
        draft_block_size: int | None = None,
        head_rows: Sequence[int] = (),
        candidates: Candidates | None = None,
        draft_gains: Sequence[float] = (),
    ) -> bool:
        """Append one step.

        Args:
            request_ids, verify_lens, accepted, contexts: [bs] each, host values.
            confidence: float [bs, D-1] on the host, or None.
            tokens: int [bs, D] on the host, anchors and drafts, or None.
            phase_ms: milliseconds of any of ``PHASES``.
            draft_block_size: 2..D; D by default.
            head_rows: rows of each stage of the draft head; (): one stage over whole blocks.
            candidates: what the step weighed; about 64 of them are kept.
            draft_gains: expected of drafting for the 1, 2, .. best requests; see ``TraceStep``.

        Returns:
            whether it was written; False once the file is full or closed.

        Raises:
            ValueError: shapes that do not fit, an unknown mode or phase.
        """
        if self._file is None or self.full:
            self.dropped_steps += self._file is not None
            return False
        bs = len(request_ids)
        lens = np.asarray(verify_lens)
        kept_right = np.asarray(accepted)
        if mode not in ("speculate", "plain"):
            raise ValueError(f"mode must be speculate or plain, got {mode!r}")
        for name, array in (("verify_lens", lens), ("accepted", kept_right)):
            if array.shape != (bs,):
                raise ValueError(f"{name} must have shape ({bs},), got {array.shape}")
        if ((lens < 1) | (lens > self.block_size) | (kept_right < 0) | (kept_right >= lens)).any():
            raise ValueError("need 1 <= verify_lens <= block size and 0 <= accepted < verify_lens")
        phases = dict(phase_ms or {})
        if not phases.keys() <= set(PHASES):
            raise ValueError(f"phases are {PHASES}, got {tuple(phases)}")
        has_reasons = candidates is not None or len(draft_gains) > 0
        new_names: list[bytes] = []
        numbers = [self._name(str(request_id), new_names) for request_id in request_ids]
        forced_number = self._name(forced, new_names) if forced else NO_NAME
        parts = [
            STEP_HEAD.pack(
                step,
                bs,
                mode == "speculate",
                HAS_CONFIDENCE * (confidence is not None)
                | HAS_TOKENS * (tokens is not None)
                | HAS_REASONS * has_reasons,
                (draft_block_size or self.block_size) - 1,
                len(head_rows),
                forced_number,
                predicted_ms,
                measured_ms,
                *(phases.get(name, float("nan")) for name in PHASES),
            ),
            np.array(numbers, dtype="<u4").tobytes(),
            np.broadcast_to(np.asarray(contexts), (bs,)).astype("<u4").tobytes(),
            (lens - 1).astype("u1").tobytes(),  # 1..256 does not fit a byte, 0..255 does
            kept_right.astype("u1").tobytes(),
            np.asarray(head_rows, dtype="<u4").tobytes(),
        ]
        if confidence is not None:
            drafts = np.asarray(confidence, dtype="<f4")
            if drafts.shape != (bs, self.block_size - 1):
                raise ValueError(
                    f"confidence must have shape {(bs, self.block_size - 1)}, got {drafts.shape}"
                )
            parts.append(drafts.tobytes())
        if tokens is not None:
            ids = np.asarray(tokens, dtype="<u4")
            if ids.shape != (bs, self.block_size):
                raise ValueError(f"tokens must have shape {(bs, self.block_size)}, got {ids.shape}")
            parts.append(ids.tobytes())
        if has_reasons:
            num_kept = int(lens.sum()) - bs
            parts.append(_reasons(candidates, num_kept, draft_gains))
        whole = b"".join([*new_names, record(STEP, b"".join(parts))])
        if self._num_bytes + len(whole) > self.max_bytes:
            self.full = True
            self.dropped_steps += 1
            return False
        self._append(whole)
        self.num_steps += 1
        return True

    def close(self) -> None:
        """Write the end record and close; calling it again does nothing."""
        if self._file is None:
            return
        self._file.write(record(END, END_HEAD.pack(self.full, self.num_steps, self.dropped_steps)))
        self._file.close()
        self._file = None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _name(self, text: str, new_names: list[bytes]) -> int:
        number = self._names.get(text)
        if number is None:
            number = self._names[text] = len(self._names) + 1
            new_names.append(record(NAME, text.encode()))
        return number

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        written = self._file.write(data)
        if written != len(data):
            raise OSError(f"{self.path}: wrote {written} of {len(data)} bytes; disk full?")
        self._num_bytes += len(data)


def _reasons(candidates: Candidates | None, num_kept: int, draft_gains: Sequence[float]) -> bytes:
    """What a step weighed; a large batch has a thousand candidates, more than anyone looks at."""
    gains = np.asarray(draft_gains, dtype="<f4").tobytes()
    if candidates is None:
        return REASONS_HEAD.pack(0, len(draft_gains)) + gains
    few = candidates.thinned(_MOST_CANDIDATES, num_kept)
    return b"".join(
        [
            REASONS_HEAD.pack(len(few.num_kept), len(draft_gains)),
            few.num_kept.astype("<u4").tobytes(),
            few.expected_tokens.astype("<f4").tobytes(),
            few.predicted_ms.astype("<f4").tobytes(),
            gains,
        ]
    )
