"""Records of a trace file: framing and checksums; the format is described in ``trace``."""

from __future__ import annotations

import struct
import zlib
from typing import Literal

FORMAT = "dcut-trace"
FORMAT_VERSION = 2
PHASES = ("draft", "decide", "verify", "commit")
Mode = Literal["speculate", "plain"]

HEADER, NAME, STEP, END = 1, 2, 3, 4
RECORD = struct.Struct("<BII")
# step, bs, mode (1: speculate), what follows (the sum of HAS_...), block size of the draft less
# one, stages of the draft head, forced name (0: none), predicted ms, measured ms in total, and by
# phase.
STEP_HEAD = struct.Struct("<IHBBBBIff4f")
HAS_CONFIDENCE, HAS_TOKENS, HAS_REASONS = 1, 2, 4
REASONS_HEAD = struct.Struct("<HH")
END_HEAD = struct.Struct("<BII")  # full?, steps written, steps dropped
NO_NAME = 0


def record(kind: int, payload: bytes) -> bytes:
    """One framed record."""
    return RECORD.pack(kind, len(payload), zlib.crc32(payload)) + payload


class Records:
    """Iterates over (kind, payload) and stops at the first record that is not whole."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0
        self.damaged = False

    def __iter__(self) -> Records:
        return self

    def __next__(self) -> tuple[int, bytes]:
        if self._at == len(self._data):
            raise StopIteration
        start = self._at + RECORD.size
        if start <= len(self._data):
            kind, size, checksum = RECORD.unpack_from(self._data, self._at)
            payload = bytes(self._data[start : start + size])
            if len(payload) == size and zlib.crc32(payload) == checksum:
                self._at = start + size
                return kind, payload
        self.damaged = True
        raise StopIteration
