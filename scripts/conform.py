"""`make conform`: start the tiny pair's plain and DCUT servers, and compare all features."""

from __future__ import annotations

import sys
from pathlib import Path

from dcut_sglang import cli
from dcut_sglang.bench.server import stop_on_sigterm
from dcut_sglang.conform.pair import tiny_pair

LOGS = Path(__file__).resolve().parents[1] / ".cache" / "conform"

if __name__ == "__main__":
    stop_on_sigterm()
    with tiny_pair(LOGS) as (dcut, plain):
        code = cli.main(["conform", "--url", dcut.url, "--against", plain.url, *sys.argv[1:]])
    sys.exit(code)
