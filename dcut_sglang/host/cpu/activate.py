"""Entry point of the ``sglang.srt.platforms`` group."""

import os

# The attention backend's name. Here, because the platform class needs it while sglang itself
# is still importing.
BACKEND_NAME = "torch_varlen"


def cpu_engine_enabled() -> bool:
    """Whether this process was asked to serve on the CPU (SGLang's own switch)."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"


def activate() -> str | None:
    """Return the platform class for SGLang to load, or None when the CPU is not asked for."""
    if not cpu_engine_enabled():
        return None
    return "dcut_sglang.host.cpu.platform.DCutCpuPlatform"
