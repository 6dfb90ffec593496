"""The state of a training run on disk: complete, of this run, or refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from dcut_sglang.training.files import replace_atomically


def save_state(path: Path, state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Replaces the state atomically. `identity` (JSON) names what must agree on resuming."""
    replace_atomically(path, lambda temp: torch.save({"identity": identity, "state": state}, temp))


def load_state(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the saved state, or None if there is none.

    Raises ValueError if it is another run's or damaged. Reads tensors and plain values only.
    """
    if not path.exists():
        return None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged: delete it to start afresh") from error
    for name, expected in identity.items():
        if saved["identity"].get(name) != expected:
            raise ValueError(
                f"{path} belongs to a run with {name} = {saved['identity'].get(name)}, "
                f"got {expected}; keep the setting, or delete the file to start afresh"
            )
    state: dict[str, Any] = saved["state"]
    return state
