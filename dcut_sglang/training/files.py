"""Files that are complete or absent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file, flushes it to the disk and renames it to `path`.

    Whatever happens on the way (a kill, a full disk), `path` holds its old contents or all of the
    new ones. An error of `write` passes through, and the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.tmp")
    try:
        write(temp)
        with temp.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a text file atomically."""
    replace_atomically(path, lambda temp: temp.write_text(text))
