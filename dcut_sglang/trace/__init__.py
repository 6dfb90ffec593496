"""The decision trace: what each decode step knew, chose, got and paid; written and read back."""

from dcut_sglang.trace.reader import PHASES, Trace, TraceError, TraceStep, read_trace
from dcut_sglang.trace.writer import TraceWriter

__all__ = ["PHASES", "Trace", "TraceError", "TraceStep", "TraceWriter", "read_trace"]
