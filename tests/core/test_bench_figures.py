"""Every figure and table from synthetic rows, through the script that users call."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench_rows import make_row, make_rows

from dcut_sglang.bench import rows as row_files
from dcut_sglang.bench import speed_figures, step_figures
from dcut_sglang.bench.arms import ARMS
from dcut_sglang.bench.speed_figures import NothingToDrawError
from dcut_sglang.bench.style import ARM_STYLES, arm_style

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import plot  # noqa: E402


def test_every_figure_is_drawn(tmp_path: Path) -> None:
    rows = make_rows()
    rows += [make_row("plain", None, n, request_rate=2.0, steady=None) for n in (0, 1)]
    path = tmp_path / "bench-tiny.jsonl"
    row_files.append(path, rows)
    replay = tmp_path / "regret.txt"
    found = {
        "policies": {"ours": {"1": 0.9, "8": 0.95}, "plain": {"1": 0.5, "8": 0.8}},
        "ece_raw": {"home": 0.05},
        "ece_calibrated": {"home": 0.01},
    }
    replay.write_text(f"progress\n{json.dumps(found)}\n")
    result = plot.draw(path, tmp_path / "out", replay)
    assert result["skipped"] == {}
    names = {f"{name}.png" for name in (*plot.FIGURES, "share_of_knowing")}
    assert set(result["figures"]) == names
    for name in names:
        png = tmp_path / "out" / name
        assert png.stat().st_size > 5_000
        assert png.with_suffix(".svg").read_text().rstrip().endswith("</svg>")
    assert "over plain" in (tmp_path / "out" / "table.md").read_text()
    assert "geometric mean" in (tmp_path / "out" / "speedups.md").read_text()


def test_a_figure_without_rows_says_what_it_lacks(tmp_path: Path) -> None:
    rows = [make_row("plain", 1, 0)]
    for figure, lacks in (
        (step_figures.cost_curve, "no rows of dcut with cost_table"),
        (step_figures.acceptance, "accept_histogram"),
        (speed_figures.arrivals, "request rate"),
        (speed_figures.heat_map, "dcut and of plain or dflash"),
        (speed_figures.fixed_and_auto, "dcut-25"),
    ):
        with pytest.raises(NothingToDrawError, match=lacks):
            figure(rows, tmp_path / "none", "")
    assert not list(tmp_path.iterdir())


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "demo.jsonl"
    row_files.append(path, [{"benchmark": "demo"}])
    with pytest.raises(ValueError, match="no rows of the benchmark"):
        plot.draw(path, tmp_path, None)
    with pytest.raises(ValueError, match="ending in JSON"):
        plot.read_replay(path.with_name("demo.jsonl").parent / _text(tmp_path, "no json"))


def _text(folder: Path, text: str) -> str:
    (folder / "text").write_text(text)
    return "text"


def test_arms_differ_without_colour() -> None:
    assert set(ARMS) <= set(ARM_STYLES)
    looks = [(s["marker"], s["linestyle"]) for s in ARM_STYLES.values()]
    assert len(set(looks)) == len(looks)
    assert arm_style("plain@again")["marker"] == ARM_STYLES["plain"]["marker"]
    assert arm_style("a server of mine")["label"] == "a server of mine"
