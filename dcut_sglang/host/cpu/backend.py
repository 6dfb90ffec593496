"""Registers the CPU attention backend under its name."""

from __future__ import annotations

from typing import Any

from dcut_sglang.host.cpu.activate import BACKEND_NAME


def register_attention() -> None:
    """Make ``--attention-backend torch_varlen`` known, for target and drafter."""
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_draft_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([BACKEND_NAME])
    add_draft_attention_backend_choices([BACKEND_NAME])
    # ``--enable-deterministic-inference`` is SGLang's switch for seeds. Each row is computed by
    # itself here, to rounding: batch shapes move logits by some 1e-6 in float32, as they do in
    # the GEMMs around it.
    add_deterministic_attention_backend_choices([BACKEND_NAME])
    add_radix_supported_deterministic_attention_backend_choices([BACKEND_NAME])

    @register_attention_backend(BACKEND_NAME)
    def create(runner: Any) -> Any:
        from dcut_sglang.host.cpu.attention import TorchVarlenAttnBackend

        return TorchVarlenAttnBackend(runner)
