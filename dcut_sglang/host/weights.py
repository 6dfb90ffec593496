"""Whether the target's weights have changed since something was made of them."""

from __future__ import annotations

from typing import Any

_version = 0


def version() -> int:
    """Grows with every weight update of this process."""
    return _version


def note_update(result: Any, *_: Any, **__: Any) -> Any:
    """AFTER hook on SGLang's weight updates."""
    global _version
    _version += 1
    return result
