"""SGLang's CPU platform plus the speculative hooks that only out-of-tree platforms get."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.interface import PlatformCapabilities

from dcut_sglang.host.cpu.activate import BACKEND_NAME


class DCutCpuPlatform(CpuSRTPlatform):
    """CPU platform that can serve the DFLASH family and its rivals.

    ``_enum`` stays CPU, so SGLang's ``is_cpu()`` branches are still taken; being out of tree
    is what lets a platform vouch for a speculative algorithm
    (srt/arg_groups/speculative_hook.py, ``_handle_dflash``).
    """

    # Eager only: SGLang's CPU graphs exclude speculation.
    capabilities = PlatformCapabilities()

    def is_out_of_tree(self) -> bool:
        return True

    def apply_server_args_defaults(self, server_args: Any) -> None:
        # SGLang has filled in intel_amx by now, whatever the machine, and would fall back to
        # torch_native without AMX, which cannot run a verify.
        from sglang.srt.utils import cpu_has_amx_support

        if server_args.attention_backend in (None, "intel_amx") and not cpu_has_amx_support():
            server_args.attention_backend = BACKEND_NAME

    def get_default_attention_backend(self) -> str:
        return BACKEND_NAME

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        from dcut_sglang.host.cpu.rivals import runs_on_cpu

        return runs_on_cpu(algorithm) is None

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == BACKEND_NAME

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return BACKEND_NAME

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """The builtin DFLASH worker with its CUDA assumptions undone; others as they are."""
        if algorithm != "DFLASH":
            return None
        from dcut_sglang.host.cpu.dflash import CpuDFlashWorker

        return CpuDFlashWorker
