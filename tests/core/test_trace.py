"""The decision trace: round trip, bounds, damage, and reproduction of a recorded run."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_sglang.candidates import Candidates
from dcut_sglang.cost import CostTable
from dcut_sglang.replay.reproduce import reproduce
from dcut_sglang.trace import Trace, TraceError, TraceWriter, read_trace
from dcut_sglang.trace.records import STEP, Records, record

BLOCK = 4


def write_some(path: Path, num_steps: int, max_bytes: int = 1 << 20, bs: int = 3) -> TraceWriter:
    rng = np.random.default_rng(num_steps)
    with TraceWriter(path, BLOCK, max_bytes, {"model": "m"}) as writer:
        for step in range(num_steps):
            plain = step % 5 == 4
            lens = np.ones(bs, dtype=int) if plain else rng.integers(1, BLOCK + 1, bs)
            writer.write_step(
                step=step,
                request_ids=[f"r{step // 7}-{i}" for i in range(bs)],
                verify_lens=lens,
                accepted=rng.integers(0, lens),
                contexts=np.arange(bs) + step,
                mode="plain" if plain else "speculate",
                confidence=None if plain else rng.random((bs, BLOCK - 1)),
                predicted_ms=1.5 * step,
                measured_ms=2.0 * step,
                phase_ms={"verify": 1.0 * step},
                forced="ratio 0.5" if step % 3 == 0 else "",
            )
    return writer


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "t.dcut"
    confidence = np.random.default_rng(0).random((2, BLOCK - 1), dtype=np.float32)
    with TraceWriter(path, BLOCK, conditions={"model": "m", "tp": 1}) as writer:
        assert writer.write_step(
            step=7,
            request_ids=["a", 12],
            verify_lens=np.array([4, 1]),
            accepted=[2, 0],
            contexts=[100, 5],
            confidence=confidence,
            predicted_ms=3.25,
            measured_ms=3.5,
            phase_ms={"draft": 1.0, "commit": 0.5},
            forced="lengths [4, 1]",
        )
        assert writer.write_step(
            step=8,
            request_ids=[12],
            verify_lens=[1],
            accepted=[0],
            contexts=6,
            mode="plain",
        )
    trace = read_trace(path)
    assert not trace.truncated
    assert trace.conditions == {"model": "m", "tp": 1}
    first, second = trace.steps
    assert (first.step, first.mode, first.forced) == (7, "speculate", "lengths [4, 1]")
    assert (first.predicted_ms, first.measured_ms) == (3.25, 3.5)
    np.testing.assert_array_equal(first.phase_ms, np.float32([1.0, np.nan, np.nan, 0.5]))
    assert [trace.names[r] for r in first.requests] == ["a", "12"]
    assert trace.names[second.requests[0]] == "12"
    assert first.confidence is not None
    np.testing.assert_array_equal(first.confidence, confidence)
    np.testing.assert_array_equal(first.verify_lens, [4, 1])
    np.testing.assert_array_equal(first.accepted, [2, 0])
    np.testing.assert_array_equal(first.contexts, [100, 5])
    assert second.mode == "plain" and second.confidence is None
    assert math.isnan(second.measured_ms)
    assert (trace.num_tokens, trace.num_rows) == (2 + 2 + 1, 5 + 1)


def test_the_largest_block_fits_its_bytes(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", 256) as writer:
        writer.write_step(step=0, request_ids=[1], verify_lens=[256], accepted=[255], contexts=[0])
    step = read_trace(tmp_path / "t").steps[0]
    assert (step.verify_lens[0], step.accepted[0]) == (256, 255)


@settings(max_examples=40, deadline=None)
@given(cut=st.floats(0, 1))
def test_a_file_cut_anywhere_gives_its_whole_steps_and_says_so(
    tmp_path_factory: pytest.TempPathFactory, cut: float
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    write_some(folder / "whole", 30)
    whole = read_trace(folder / "whole")
    data = (folder / "whole").read_bytes()
    header = 9 + int.from_bytes(data[1:5], "little")
    size = header + int(cut * (len(data) - 1 - header))
    (folder / "cut").write_bytes(data[:size])
    trace = read_trace(folder / "cut")
    assert trace.truncated and trace.end in ("missing", "damaged")
    assert len(trace.steps) <= len(whole.steps)
    for got, want in zip(trace.steps, whole.steps, strict=False):
        np.testing.assert_array_equal(got.accepted, want.accepted)
        assert [trace.names[r] for r in got.requests] == [whole.names[r] for r in want.requests]


def test_damage_inside_is_noticed(tmp_path: Path) -> None:
    write_some(tmp_path / "t", 30)
    data = bytearray((tmp_path / "t").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "t").write_bytes(data)
    trace = read_trace(tmp_path / "t")
    assert trace.end == "damaged" and 0 < len(trace.steps) < 30


@pytest.mark.parametrize("max_bytes", [400, 1000, 5000])
def test_the_file_never_grows_beyond_its_limit(tmp_path: Path, max_bytes: int) -> None:
    writer = write_some(tmp_path / "t", 200, max_bytes)
    trace = read_trace(tmp_path / "t")
    assert (tmp_path / "t").stat().st_size <= max_bytes
    assert writer.full and trace.end == "full" and trace.truncated
    assert len(trace.steps) + trace.dropped_steps == 200
    assert writer.num_steps == len(trace.steps)


def test_other_files_and_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"not a trace at all")
    with pytest.raises(TraceError, match="not a DCUT trace"):
        read_trace(tmp_path / "t")
    (tmp_path / "t").write_bytes(b"")
    with pytest.raises(TraceError, match="not a DCUT trace"):
        read_trace(tmp_path / "t")
    write_some(tmp_path / "u", 1)
    with pytest.raises(FileExistsError):
        TraceWriter(tmp_path / "u", BLOCK)


@pytest.mark.parametrize(
    "wrong",
    [
        {"verify_lens": [0]},
        {"verify_lens": [BLOCK + 1]},
        {"accepted": [2]},
        {"verify_lens": [1, 1]},
        {"mode": "other"},
        {"phase_ms": {"nap": 1.0}},
        {"confidence": np.ones((1, BLOCK))},
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    values = {"step": 0, "request_ids": [1], "verify_lens": [2], "accepted": [1], "contexts": [9]}
    with TraceWriter(tmp_path / "t", BLOCK) as writer, pytest.raises(ValueError):
        writer.write_step(**{**values, **wrong})  # type: ignore[arg-type]


def test_writing_a_step_is_cheap(tmp_path: Path) -> None:
    confidence = np.full((32, 15), 0.5, dtype=np.float32)
    ids = [f"request-{i}" for i in range(32)]
    lens, accepted, contexts = np.full(32, 4), np.full(32, 2), np.full(32, 100)
    with TraceWriter(tmp_path / "t", 16) as writer:
        started = time.perf_counter()
        for step in range(500):
            writer.write_step(
                step=step,
                request_ids=ids,
                verify_lens=lens,
                accepted=accepted,
                contexts=contexts,
                confidence=confidence,
            )
        assert (time.perf_counter() - started) / 500 < 2e-3  # about 60 us; the margin is for noise


def costs() -> CostTable:
    verify = 5.0 + np.array([2.0, 4.0])[:, None, None] * np.array([1.0, 3.0])[:, None]
    return CostTable(
        BLOCK,
        (1, 4),
        (0.0, 1.0),
        (10, 20),
        verify + np.array([0.0, 1.0]),
        np.array([[3.0, 3.5], [4.0, 4.5]]),
        head_rows=(1, 12),
        head_ms=np.array([2.0, 5.0]),
        short_blocks=(3,),
        short_draft_ms=np.array([[[1.0, 1.5], [2.0, 2.5]]]),
    )


def test_a_recorded_run_is_reproduced(tmp_path: Path) -> None:
    """Counts exactly; time from the cost table, with what was drafted: a step drafts for none,
    some or all of its requests, the head in one stage or in two."""
    rng = np.random.default_rng(3)
    table = costs()
    tokens = rows = 0
    predicted = 0.0
    with TraceWriter(tmp_path / "t", BLOCK) as writer:
        for step in range(50):
            bs = int(rng.integers(1, 6))
            num_drafted = 0 if rng.random() < 0.3 else int(rng.integers(1, bs + 1))
            deep = int(rng.integers(0, num_drafted + 1))
            depth = np.zeros(bs, dtype=int)
            depth[:num_drafted], depth[:deep] = 2, BLOCK - 1
            block_size = BLOCK if deep else 3  # nobody needs the last draft
            lens = rng.integers(1, depth + 2)
            accepted = rng.integers(0, lens)
            contexts = rng.integers(5, 30, bs)
            context = float(contexts.mean())
            ms = float(table.verify(bs, int(lens.sum()), context))
            if num_drafted:
                ms += float(table.draft_forward(num_drafted, context, block_size))
                head_rows = [num_drafted * 2] + [deep * (BLOCK - 3)] * (deep > 0)
                ms += float(table.head(np.array(head_rows)).sum())
            tokens += int(accepted.sum()) + bs
            rows += int(lens.sum())
            predicted += ms
            computed = np.arange(1, BLOCK) <= depth[:, None]
            writer.write_step(
                step=step,
                request_ids=list(range(bs)),
                verify_lens=lens,
                accepted=accepted,
                contexts=contexts,
                confidence=np.where(computed, 0.5, 0.0) if num_drafted else None,
                mode="speculate" if num_drafted else "plain",
                predicted_ms=1.045 * ms if step % 3 else math.nan,  # forced: not predicted
                measured_ms=1.1 * ms,
                draft_block_size=block_size,
                head_rows=head_rows if num_drafted else (),
            )
    trace = read_trace(tmp_path / "t")
    assert {step.draft_block_size for step in trace.steps} == {3, BLOCK}
    result = reproduce(trace, table)
    assert (result.tokens, result.rows, result.steps) == (tokens, rows, 50)
    assert result.predicted_ms == pytest.approx(predicted)
    assert result.time_error == pytest.approx(1 / 1.1 - 1, abs=1e-5)
    assert result.server_error == pytest.approx(-0.05, abs=1e-5)
    assert result.median_step_error == pytest.approx(1 - 1 / 1.1, abs=1e-5)


def test_an_empty_trace_has_no_time_error() -> None:
    result = reproduce(Trace(BLOCK), costs())
    assert (result.tokens, result.rows) == (0, 0) and math.isnan(result.time_error)
    with pytest.raises(ValueError, match="blocks of 8"):
        reproduce(Trace(8), costs())


def test_reasons_come_back_and_are_optional(tmp_path: Path) -> None:
    weighed = Candidates(np.arange(3), np.array([2.0, 2.5, 2.75]), np.array([8.0, 9.0, 10.5]))
    common = {"request_ids": ["a"], "verify_lens": [2], "accepted": [1], "contexts": [5]}
    with TraceWriter(tmp_path / "t", 4) as writer:
        writer.write_step(step=1, **common, candidates=weighed, draft_gains=[0.5])
        writer.write_step(step=2, **common)
        writer.write_step(step=3, **common, draft_gains=[-0.25])
    first, second, third = read_trace(tmp_path / "t").steps
    assert first.candidates is not None
    assert first.candidates.num_kept.tolist() == [0, 1, 2]
    assert first.candidates.expected_tokens.tolist() == [2.0, 2.5, 2.75]
    assert first.candidates.predicted_ms.tolist() == [8.0, 9.0, 10.5]
    assert first.draft_gains == (0.5,)
    assert (second.candidates, second.draft_gains) == (None, ())
    assert (third.candidates, third.draft_gains) == (None, (-0.25,))


def test_a_step_record_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, 4) as writer:
        writer.write_step(step=1, request_ids=["a"], verify_lens=[2], accepted=[1], contexts=[5])
    header = next(Records(path.read_bytes()))
    path.write_bytes(record(*header) + record(STEP, b"\x01" * 20))
    with pytest.raises(TraceError, match="step record 1 is whole, but not as this dcut_sglang"):
        read_trace(path)
