"""Rows of the benchmark: what is refused, what resumes, and what is made of them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_rows import SPEEDS, make_row, make_rows
from hypothesis import given
from hypothesis import strategies as st

from dcut_sglang.bench import rows as row_files
from dcut_sglang.bench.never_slower_table import geomean_over_plain, newest
from dcut_sglang.bench.never_slower_table import table as never_slower_table
from dcut_sglang.bench.rows import RowRefusedError
from dcut_sglang.bench.steady import staggered
from dcut_sglang.bench.summary import (
    is_noise,
    noise_band,
    of_last_commit,
    points,
    speedup,
    speedup_table,
    table,
)


def test_complete_rows_pass() -> None:
    for row in make_rows():
        row_files.check(row)


@pytest.mark.parametrize(
    "numbers",
    [{"tokens": 0}, {"tokens_per_s": 0.0}, {"wall_s": math.nan}, {"tokens_per_cpu_s": math.inf}],
)
def test_rows_of_a_failed_server_are_refused(numbers: dict[str, float]) -> None:
    row = make_row("plain", 1, 0)
    row["overall"] = {**row["overall"], **numbers}
    with pytest.raises(RowRefusedError, match="is the server dead"):
        row_files.check(row)


def test_rows_without_dcut_are_refused() -> None:
    with pytest.raises(RowRefusedError, match="does not run DCUT"):
        row_files.check(make_row("dcut", 1, 0, dcut=None))
    with pytest.raises(RowRefusedError, match="does not run DCUT"):
        row_files.check(make_row("dcut-25", 1, 0, dcut=None, server="dcut-remote"))


def test_rows_of_a_dcut_that_never_drafted_are_refused() -> None:
    idle = {"requests_drafted": 0, "steps": 50, "block_size": 16}
    with pytest.raises(RowRefusedError, match="not drafted once since the server started"):
        row_files.check(make_row("dcut", 8, 0, dcut=idle))
    # It drafted elsewhere and found plain decoding better here; or was asked for plain steps.
    row_files.check(make_row("dcut", 8, 0, dcut=idle), drafted_before=3)
    row_files.check(make_row("dcut", 8, 0, dcut=idle, knobs={"dcut_force_plain": 1}))


def test_a_row_is_known_by_its_conditions_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = make_row("dcut", 8, 0)
    row_files.append(path, [row])
    (back,) = row_files.read(path)
    again = make_row("dcut", 8, 0, time="later", overall=None, accept_length=3.0)
    assert row_files.key(back) == row_files.key(again)
    for change in (
        {"commit": "abd"},
        {"pass": 1},
        {"seed": 1},
        {"knobs": {"dcut_force_ratio": 0.5}},
        {"load": {**row["load"], "tokens": 49}},
        {"model": {"path": "models/t", "sha256": "3"}},
    ):
        assert row_files.key({**row, **change}) != row_files.key(row)


def test_a_line_cut_short_by_an_interruption_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row_files.append(path, [make_row("plain", 1, 0)])
    whole = path.read_text()
    path.write_text(whole + whole[:50])
    assert len(row_files.read(path)) == 1
    path.write_text(whole[:50] + "\n" + whole)
    with pytest.raises(ValueError, match="line 1: not JSON"):
        row_files.read(path)


def test_checkpoints_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = row_files.file_hash(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert row_files.file_hash(tmp_path) != first


def test_means_and_speedups() -> None:
    found = points(make_rows())
    load = ("mixed", 8, None)
    assert speedup(found, "dcut", load) == pytest.approx(1.1)
    assert speedup(found, "dcut", load, "dflash") == pytest.approx(44 / 24)
    assert speedup(found, "ngram", load) is None
    assert len(table(found)) == 2 + len(found)
    lines = speedup_table(found)
    assert lines[0] == "| load | dflash | dcut | dcut-25 | dcut-100 |"
    assert lines[-1].startswith("| geometric mean | **0.92** | **1.28** |")


def test_noise_band_follows_the_spread_of_passes() -> None:
    found = points(make_rows())
    deviation = math.log(1.01 / 0.99) / math.sqrt(2) / 0.6745
    assert noise_band(found) == pytest.approx(math.exp(3 * deviation) - 1)
    assert noise_band(points([make_row("plain", 1, 0)])) is None


def test_noise_band_covers_the_same_arm_measured_twice() -> None:
    rng = np.random.default_rng(0)
    outside = 0
    for _ in range(200):
        rows = []
        for arm, concurrency, number in itertools.product(SPEEDS, (1, 8), (0, 1)):
            row = make_row(arm, concurrency, number)
            row["steady"]["tokens_per_cpu_s"] = 40 * math.exp(rng.normal(0, 0.05))
            rows.append(row)
        found = points(rows)
        ratio = speedup(found, "dcut", ("mixed", 8, None), "dcut-25")
        band = noise_band(found)
        assert ratio is not None and band is not None
        outside += abs(math.log(ratio)) > math.log1p(band)
    # The band is itself estimated, from ten pairs of passes.
    assert outside <= 10


def test_a_disturbed_pass_is_noise_where_it_is_only() -> None:
    rows = make_rows()
    for row in rows:
        if row["arm"] == "dcut" and row["concurrency"] == 8 and row["pass"] == 0:
            row["steady"]["tokens_per_cpu_s"] = 15.0
    found = points(rows)
    band = noise_band(found)
    assert band == noise_band(points(make_rows()))
    at = {(p.arm, p.load[1]): p for p in found}
    assert is_noise(at["dcut", 8], at["plain", 8], band)
    assert not is_noise(at["dcut", 1], at["plain", 1], band)
    assert is_noise(at["dcut-100", 1], at["dflash", 1], band)


def test_rows_of_other_commits_are_not_mixed_in() -> None:
    rows = [*make_rows(), make_row("plain", 1, 0, commit="other")]
    assert of_last_commit(rows) == rows[-1:]
    assert len(of_last_commit(make_rows())) == len(make_rows())


def test_rows_are_json() -> None:
    for row in make_rows():
        assert json.loads(json.dumps(row, allow_nan=False)) == row


def never_slower_row(prompts: str, concurrency: int, dcut: list[float], **more: Any) -> Any:
    waves = {"plain": [10.0, 10.0], "dflash": [5.0], "dcut": dcut}
    found = {"accept_length": 2.0, "rows_per_step": 3.25, "plain_share": 0.4}
    cell = {"prompts": prompts, "concurrency": concurrency, "tokens_per_cpu_s": waves}
    return {**cell, **found, "over_plain": sum(dcut) / 20, **more}


def test_the_first_table_is_of_each_cell_s_last_row() -> None:
    rows = [
        never_slower_row("hard", 1, [9.0, 9.0]),
        never_slower_row("mixed", 8, [30.0, 30.0]),
        never_slower_row("mixed", 8, [20.0, 20.0], predicted_over_plain=2.1),
        never_slower_row("easy", 2, [80.0, 80.0]),
    ]
    found = newest(rows)
    assert [(row["prompts"], row["concurrency"]) for row in found] == [
        *(("mixed", 8), ("easy", 2), ("hard", 1))
    ]
    lines = never_slower_table(found)
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert lines[2] == (
        "| mixed | 8 | 10.0 | 5.0 | 20.0 | 2.00 [2.00, 2.00] | 2.10 | 4.00 | 2.00 | 3.2 | 40 % |"
    )
    assert geomean_over_plain(found) == pytest.approx(4.0)


@given(tokens=st.integers(1, 200), count=st.integers(1, 300))
def test_staggered_lengths_are_around_the_mean_and_mixed_from_the_start(
    tokens: int, count: int
) -> None:
    lengths = staggered(tokens, count)
    assert len(lengths) == count and min(lengths) >= 1
    assert min(lengths) >= tokens // 2 and max(lengths) <= tokens * 1.5 + 1
    if count >= 16 and tokens >= 20:
        assert abs(np.mean(lengths) - tokens) < 0.1 * tokens
        assert len(set(lengths[:8])) >= 6
