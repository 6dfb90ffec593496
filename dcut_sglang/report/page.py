"""The page: template, styles, scripts, plotting library and data, in one file."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from dcut_sglang.report.errors import ReportError

_SCRIPTS = ("base.js", "tables.js", "charts.js", "steps.js", "report.js")


def page(data: Mapping[str, Any]) -> str:
    """The whole HTML page, which loads nothing from anywhere.

    Args:
        data: plain data; its "title" is the page's.

    Raises:
        ReportError: the plotting library is not installed.
        ValueError: the data holds a number that JSON has none for.
    """
    parts = {
        "TITLE": html.escape(str(data["title"])),
        "STYLE": _file("report.css"),
        "DATA": script_safe(json.dumps(data, allow_nan=False, separators=(",", ":"))),
        "PLOTLY": packed_plotly(),
        "SCRIPT": "\n".join(_file(name) for name in _SCRIPTS),
    }
    # One pass over the template, so that nothing inside a part is taken for a mark.
    pieces = _file("template.html").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def script_safe(text: str) -> str:
    """JSON that may stand inside a script element: no tag and no comment can end or open it."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def packed_plotly() -> str:
    """plotly.js, gzipped, in base64: 2 MB instead of 5; the browser unpacks it.

    Raises:
        ReportError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ReportError(
            "expected the plotting library plotly, which is not installed; "
            "run: pip install 'dcut_sglang[report]'"
        ) from error
    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def _file(name: str) -> str:
    return (files("dcut_sglang.report") / name).read_text(encoding="utf-8")
