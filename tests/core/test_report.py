"""``dcut report``: rows and traces brought into shape, refusals, and data that cannot escape."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_inputs import BLOCK_SIZE, HOSTILE, bench_row, write_rows, write_trace

from dcut_sglang.bench.server import REPO_ROOT
from dcut_sglang.candidates import Candidates
from dcut_sglang.cli import main
from dcut_sglang.config import DCutConfig
from dcut_sglang.cost import CostTable
from dcut_sglang.report import page as page_module
from dcut_sglang.report.errors import ReportError
from dcut_sglang.report.page import page, script_safe
from dcut_sglang.report.reasons import expected_and_deviation
from dcut_sglang.report.rows import read_rows
from dcut_sglang.report.traces import Window, trace_data
from dcut_sglang.selector import Selector
from dcut_sglang.trace import read_trace

TABLE = CostTable(
    BLOCK_SIZE,
    (1, 4),
    (0.0, 1.0),
    (64,),
    np.array([[[5.0], [12.0]], [[8.0], [30.0]]]),
    np.array([[2.0], [4.0]]),
)


@pytest.fixture(autouse=True)
def no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five megabytes that these tests do not look at."""
    monkeypatch.setattr(page_module, "packed_plotly", lambda: "cGxvdGx5")


def report(tmp_path: Path, *args: object) -> tuple[int, Path]:
    out = tmp_path / "out" / "report.html"
    return main(["report", *map(str, args), "-o", str(out)]), out


def data_of(html: str) -> dict:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert len(found) == 1
    return json.loads(found[0])


def test_rows_and_trace_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, trace = write_rows(tmp_path / "rows.jsonl"), write_trace(tmp_path / "run.trace")
    code, out = report(tmp_path, rows, trace, "--title", HOSTILE)
    assert code == 0 and str(out) in capsys.readouterr().out
    data = data_of(out.read_text())
    assert len(data["rows"]) == 24 and data["title"] == HOSTILE
    assert [t["name"] for t in data["traces"]] == ["run.trace"]


def test_every_row_file_of_the_repository_is_read() -> None:
    files = sorted((REPO_ROOT / "bench_results").glob("*.jsonl"))
    assert files
    for path in files:
        rows = read_rows(path)
        assert rows.arms and rows.conditions
        own, peer = {"plain", "dflash", "dcut"}, {"vllm-plain", "vllm-dflash"}
        expected = {"bench-peer": peer, "bench-ablations": {"plain", "dcut"}}
        of_file = expected.get("-".join(path.name.split("-")[:2]), own)
        assert of_file <= {arm.arm for arm in rows.arms}
        for arm in rows.arms:
            assert arm.tokens_per_s or arm.tokens_per_cpu_s
            assert arm.keep_ratio is None or 0 <= arm.keep_ratio <= 1
            assert arm.measured_ms is None or arm.measured_ms > 0


def test_a_row_of_the_benchmark_is_read_steady_part_first(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl")
    row = next(r for r in read_rows(path).arms if r.arm == "dcut" and r.concurrency == 4)
    assert row.tokens_per_s == [120.0] and row.tokens_per_cpu_s == [pytest.approx(132.0)]
    assert row.user_tokens_per_s == 30.0 and row.prompts == "easy"
    assert (row.predicted_ms, row.measured_ms) == (10.0, 11.0)
    assert row.by_batch_size == [[4, 4, 28, 12, 1]] and row.equal_to_plain == [8, 8]
    # Flags of speculation differ from arm to arm; the equal ones are conditions.
    (conditions,) = read_rows(path).conditions
    assert conditions["flags"] == "--max-running-requests 32" and conditions["rows"] == 24


def test_fields_that_a_row_lacks_stay_unknown(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"arm": "plain", "tokens_per_s": 4.0, "invented_later": [1]}\n\n')
    (row,) = read_rows(path).arms
    assert row.tokens_per_s == [4.0] and row.concurrency is None and row.user_tokens_per_s is None


def test_without_a_steady_part_the_whole_wave_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    nothing = {"steady": None, "tokens_per_s_per_user": None, "concurrency": None}
    row = bench_row("dcut", 4, 100.0) | nothing
    path.write_text(json.dumps(row))
    (arm,) = read_rows(path).arms
    assert arm.tokens_per_s == [90.0]
    assert arm.user_tokens_per_s == 200.0 and "median" in arm.user_speed_from


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"hello\n", "expected rows (JSON lines"),
        (b"\x89PNG\r\n", "begins with b'\\x89PNG"),
        (b'{"format": "dcut-cost-table"}', "got an object with keys format"),
        (b'{"arm": "plain"', "line 1: expected one JSON object per line"),
        (b'{"arm": "dcut", "tokens_per_s": [1]}\n[]\n', "got an object"),
        (b'{"arm": "dcut", "tokens_per_s": ["fast"]}', "not of the expected type"),
        (b"", "empty file"),
    ],
)
def test_other_inputs_are_refused_with_what_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    code, out = report(tmp_path, path)
    error = capsys.readouterr().err
    assert code == 2 and not out.exists()
    assert "expected" in error and str(path) in error
    assert said in error or "line 2: expected a JSON object, got list" in error


def test_missing_files_folders_and_windows_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "run.trace")
    for args, said in (
        ((tmp_path / "none.jsonl",), "none.jsonl"),
        ((tmp_path,), "got a folder"),
        ((trace, "--steps", "3"), "expected two places A:B"),
        ((trace, "--steps", "9:12"), "the trace has 5"),
        ((trace, "--costs", "smollm2-cpu"), "expected a cost table for blocks of 8, got one for"),
    ):
        assert report(tmp_path, *args)[0] == 2
        assert said in capsys.readouterr().err


def test_without_plotly_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(ReportError, match=r"pip install 'dcut_sglang\[report\]'"):
        page_module.packed_plotly()


def test_nothing_in_the_data_ends_its_element() -> None:
    html = page({"title": HOSTILE, "rows": [HOSTILE, "@@SCRIPT@@", "<!--<script>"]})
    assert "window.attacked" in html
    assert not re.search(r"<script>window\.attacked", html)
    assert data_of(html)["rows"] == [HOSTILE, "@@SCRIPT@@", "<!--<script>"]
    assert json.loads(script_safe(json.dumps(HOSTILE))) == HOSTILE
    # Data, plotting library and script: no other element may load or run anything.
    assert html.count("<script") == 3
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", html)
    assert "default-src 'none'" in html


def test_steps_say_what_was_kept_and_why(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "run.trace"))
    data = trace_data(trace, "run", Window())
    first, _, plain, forced, slow = data["steps"]
    assert first["kept"] == [3, 1] and first["accepted"] == [2, 0] and first["emitted"] == 4
    assert [len(c) for c in first["confidence"]] == [5, 5] and first["why"] == "recorded"
    assert first["candidates"]["kept"] == list(range(11)) and first["draft_gains"] == [-0.2, 0.3]
    assert plain["mode"] == "plain" and plain["candidates"]["kept"] == [0]
    assert plain["confidence"] == [[], []]
    assert forced["forced"] == "ratio 0.5" and "candidates" not in forced
    assert forced["predicted_ms"] is None
    assert first["surprise"] == [] and slow["surprise"] == ["took 200% more time than predicted"]
    assert data["requests"] == [f"{HOSTILE} 0", f"{HOSTILE} 1"] and data["recomputed"] == 0


def test_a_window_of_steps(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "run.trace"))
    data = trace_data(trace, "run", Window.parse("2:3"))
    assert [s["step"] for s in data["steps"]] == [2, 3] and data["num_steps"] == 5


def test_candidates_are_recomputed_only_where_none_were_recorded(tmp_path: Path) -> None:
    selector = Selector(TABLE, DCutConfig())
    old = read_trace(write_trace(tmp_path / "old.trace", with_reasons=False))
    steps = trace_data(old, "old", Window(), selector)["steps"]
    assert {step["why"] for step in steps} == {"recomputed"}
    weighed = steps[0]["candidates"]
    confidence = old.steps[0].confidence
    assert confidence is not None
    best_first = np.sort(np.cumprod(confidence, axis=1).ravel())[::-1]
    assert weighed["kept"] == list(range(11))
    assert weighed["tokens"] == pytest.approx(
        [2 + best_first[:k].sum() for k in range(11)], rel=1e-4
    )
    # Two requests lie a third of the way from one to four: forward 2.67 ms, verify 6 to 18 ms.
    want = [2 + 2 / 3 + 6 + 12 * k / 14 for k in range(11)]
    assert weighed["ms"] == pytest.approx(want, rel=1e-4)
    assert steps[2]["candidates"]["kept"] == [0]
    new = read_trace(write_trace(tmp_path / "new.trace"))
    assert trace_data(new, "new", Window(), selector)["recomputed"] == 1  # the forced step


def test_expected_tokens_and_their_deviation_are_those_of_the_confidences(tmp_path: Path) -> None:
    step = read_trace(write_trace(tmp_path / "run.trace")).steps[0]
    assert step.confidence is not None
    expected, deviation = expected_and_deviation(step)
    rng = np.random.default_rng(1)
    draws = rng.random((40_000, *step.confidence.shape)) < step.confidence
    accepted = np.minimum(np.cumprod(draws, axis=2).sum(axis=2), step.verify_lens - 1)
    tokens = step.bs + accepted.sum(axis=1)
    assert expected == pytest.approx(tokens.mean(), rel=0.01)
    assert deviation == pytest.approx(tokens.std(), rel=0.02)


def test_thinning_keeps_the_best_the_ends_and_what_was_chosen() -> None:
    kept = np.arange(1000)
    found = Candidates(kept, 10 + 10 * (1 - 0.99**kept), 20 + 0.05 * kept)
    few = found.thinned(32, 777)
    assert len(few.num_kept) <= 32 + 6
    best = int(np.argmax(found.tokens_per_ms))
    assert {0, best - 1, best, best + 1, 777, 999} <= set(few.num_kept.tolist())
    assert found.thinned(1000) is found


def test_a_cost_table_of_other_conditions_is_named(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "old.trace", with_reasons=False))
    for target, differing in ((HOSTILE, []), ("another", ["target"])):
        selector = Selector(replace(TABLE, fingerprint={"target": target}), DCutConfig())
        assert trace_data(trace, "old", Window(), selector)["costs_differ"] == differing
