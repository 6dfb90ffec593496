"""The benchmark on the tiny pair's real servers: rows, resuming, figures, and what is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dcut_sglang.bench import rows as row_files
from dcut_sglang.bench.server import REPO_ROOT, Server
from dcut_sglang.bench.summary import points, speedup

RUN = (
    *("--model", "tiny", "--arms", "plain", "dflash", "dcut", "plain@again", "mtp"),
    *("--data", "mixed", "--concurrency", "1", "4", "--tokens", "24", "--least-requests", "3"),
    *("--requests-per-slot", "2", "--dcut-config", '{"probe_budget_s": 4}'),
)


def script(name: str, *args: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON of the last line of output, and the errors."""
    done = subprocess.run(
        [sys.executable, str(REPO_ROOT / "scripts" / name), *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{REPO_ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        timeout=1800,
    )
    lines = done.stdout.strip().splitlines()
    result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    return done.returncode, result, done.stdout + done.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("bench") / "bench-tiny.jsonl"
    code, result, output = script("bench.py", *RUN, "--out", str(path))
    assert code == 0, output
    return path, result


def test_rows(measured: tuple[Path, dict[str, Any]]) -> None:
    path, result = measured
    assert result["ok"] and result["rows"] == 16
    assert result["arms"] == ["plain", "dflash", "dcut", "plain@again"]
    assert result["skipped"] == {
        "mtp": "the target of tiny has no layers for multi-token prediction"
    }
    for row in row_files.read(path):
        assert row["steady"]["tokens_per_cpu_s"] > 0 and row["ttft_ms"]["p50"] > 0
        assert row["equal_to_plain"]["equal"] == row["equal_to_plain"]["of"]
        if row["arm"] in ("dflash", "dcut"):
            assert row["accept_length"] > 1
            assert sum(row["accept_histogram"]) > 0
        if row["arm"] == "dcut":
            assert sum(row["keep_ratio_counts"].values()) == row["steps"]
            assert row["cost_table"]["block_size"] == 16
            assert row["phase_ms"]["verify"] > 0 and row["reliability"] and row["step_sample"]


def test_the_same_arm_twice_is_within_the_noise(measured: tuple[Path, dict[str, Any]]) -> None:
    path, result = measured
    found = points(row_files.read(path))
    ratios = [speedup(found, "plain@again", point.load) for point in found if point.arm == "plain"]
    mean = math.exp(sum(math.log(ratio) for ratio in ratios if ratio) / len(ratios))
    assert abs(math.log(mean)) < math.log1p(result["noise"])


def test_a_second_run_measures_nothing_again(measured: tuple[Path, dict[str, Any]]) -> None:
    path, result = measured
    before = path.read_text()
    code, again, output = script("bench.py", *RUN, "--out", str(path))
    assert code == 0, output
    assert path.read_text() == before and again["rows"] == result["rows"]


def test_figures(measured: tuple[Path, dict[str, Any]]) -> None:
    path, _ = measured
    code, result, output = script("plot.py", str(path))
    assert code == 0, output
    assert set(result["skipped"]) == {"arrivals", "fixed_and_auto", "share_of_knowing"}
    assert len(result["figures"]) == 8
    for name in result["figures"]:
        assert (path.parent / "figures" / path.stem / name).stat().st_size > 5_000


def test_rows_without_an_active_dcut_are_refused(
    plain: Server, dcut: Server, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    common = ("--model", "tiny", "--data", "easy", "--concurrency", "1", "--tokens", "8")
    common += ("--passes", "1", "--out", str(path))
    code, result, output = script(
        "bench.py", *common, "--arms", "dcut", "--url", f"dcut={plain.url}"
    )
    assert code == 1 and "does not run DCUT" in result["error"], output
    # A name of its own, for which nothing is set at run time.
    dcut.set_state(dcut_force_plain=1)
    try:
        code, result, output = script(
            "bench.py", *common, "--arms", "dcut-mine", "--url", f"dcut-mine={dcut.url}"
        )
    finally:
        dcut.set_state(dcut_force_plain=0)
    assert code == 1 and "has not drafted once" in result["error"], output
    assert not path.exists()


def test_arrivals_at_a_rate(plain: Server, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    code, result, output = script(
        "bench.py",
        *("--model", "tiny", "--arms", "plain", "--url", f"plain={plain.url}", "--data", "easy"),
        *("--concurrency", "--request-rate", "8", "--num-prompts", "6", "--tokens", "8"),
        *("--passes", "1", "--out", str(path)),
    )
    assert code == 0, output
    (row,) = row_files.read(path)
    assert row["request_rate"] == 8 and row["concurrency"] is None
    assert row["overall"]["tokens"] > 6 and row["ttft_ms"]["p99"] > 0
