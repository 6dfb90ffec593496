"""Progress lines of a benchmark script."""

from __future__ import annotations

import time

_START = time.monotonic()


def say(text: str) -> None:
    """A progress line with the time since the start."""
    elapsed = int(time.monotonic() - _START)
    print(f"[{elapsed // 60:2d}:{elapsed % 60:02d}] {text}", flush=True)
