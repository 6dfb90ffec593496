"""SGLang on a CPU without AMX: platform, attention backend and reference ops.

Active only when ``SGLANG_USE_CPU_ENGINE=1``; ``scripts/cpu_env.sh`` sets it.
"""
