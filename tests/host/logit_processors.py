"""Custom logit processors that depend on what was emitted, for the tests.

They travel to the server by name: ``conftest.py`` puts this folder on its path.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class ForbidsRepeats(CustomLogitProcessor):
    """Forbids the request's ``last`` latest output tokens."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            recent = list(params["__req__"].output_ids)[-params["last"] :]
            logits[row, recent] = float("-inf")
        return logits


class CountsItsCalls(CustomLogitProcessor):
    """Forces ``token`` at every call number ``every``, counting in its own parameters."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            params["calls"] = params.get("calls", 0) + 1
            if params["calls"] % params["every"] == 0:
                logits[row] = float("-inf")
                logits[row, params["token"]] = 0.0
        return logits
