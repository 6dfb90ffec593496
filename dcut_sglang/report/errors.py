"""What the report refuses."""

from __future__ import annotations


class ReportError(ValueError):
    """An input that is neither rows nor a trace, or a report that cannot be made."""
