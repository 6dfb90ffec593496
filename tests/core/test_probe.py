"""The cost probe against a simulated machine: what it records, and that it keeps its budget."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_sglang.probe import ProbeError, ProbeReport, format_table, probe_costs
from dcut_sglang.survival import num_kept_at_ratio

BLOCK_SIZE = 16


@dataclass
class Machine:
    """Simulated steps; its clock only moves when a step runs."""

    base_s: float = 0.004
    row_s: float = 0.001
    context_s: float = 1e-6
    draft_s: float = 0.002
    head_base_s: float = 0.003
    head_row_s: float = 0.0004
    noise: float = 0.0
    miscount: int = 0
    now_s: float = 0.0
    bs: int = 0
    context: int = 0
    executed: list[tuple[int, int, int]] = field(default_factory=list)
    headed: list[int] = field(default_factory=list)
    drafted: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(0)

    def _spend(self, seconds: float) -> None:
        self.now_s += seconds * (1 + self.noise * self._random.random())

    def verify_s(self, bs: int, rows: int, context: int) -> float:
        return self.base_s + self.row_s * rows + self.context_s * rows * context

    def open(self, bs: int, context: int) -> None:
        self.bs, self.context = bs, context

    def draft_block_s(self, bs: int, block_size: int) -> float:
        return self.draft_s * bs * (1 + block_size / BLOCK_SIZE) / 2

    def draft(self, block_size: int) -> None:
        self._spend(self.draft_block_s(self.bs, block_size))
        self.drafted.add((self.bs, block_size))

    def head_s(self, rows: int) -> float:
        return self.head_base_s + self.head_row_s * rows

    def head(self, num_rows: int) -> None:
        self._spend(self.head_s(num_rows))
        self.headed.append(num_rows)

    def verify(self, num_rows: int) -> int:
        self._spend(self.verify_s(self.bs, num_rows, self.context))
        self.executed.append((self.bs, num_rows, self.context))
        return num_rows - self.miscount


def probe(
    machine: Machine, budget_s: float, max_bs: int = 16, short_blocks: tuple[int, ...] = ()
) -> ProbeReport:
    return probe_costs(
        machine,
        block_size=BLOCK_SIZE,
        short_blocks=short_blocks,
        max_bs=max_bs,
        contexts=(64, 512),
        budget_s=budget_s,
        fingerprint={"device": "simulated"},
        clock=lambda: machine.now_s,
        step_clock=lambda: machine.now_s,
    )


def test_table_holds_the_machine_s_costs_and_only_what_ran() -> None:
    machine = Machine()
    report = probe(machine, budget_s=60, short_blocks=(4, 8))
    table = report.table
    assert table.batch_sizes == (1, 2, 4, 8, 16)
    assert table.keep_ratios == (0.0, 0.1, 0.25, 0.5, 1.0)
    assert table.fingerprint == {"device": "simulated"}
    ran = set(machine.executed)
    for i, bs in enumerate(table.batch_sizes):
        for j, ratio in enumerate(table.keep_ratios):
            for k, context in enumerate(table.contexts):
                rows = bs + num_kept_at_ratio(ratio, bs, BLOCK_SIZE)
                assert (bs, rows, context) in ran
                assert table.verify_ms[i, j, k] == pytest.approx(
                    1e3 * machine.verify_s(bs, rows, context)
                )
        assert table.draft_ms[i] == pytest.approx(1e3 * machine.draft_s * bs)
        for short_ms, size in zip(table.short_draft_ms, (4, 8), strict=True):
            assert (bs, size) in machine.drafted
            assert short_ms[i] == pytest.approx(1e3 * machine.draft_block_s(bs, size))
    assert table.short_blocks == (4, 8)
    assert report.num_steps == len(machine.executed)
    assert table.head_rows == (1, 4, 16, 64, 240) and set(machine.headed) == {1, 4, 16, 64, 240}
    assert table.head_ms == pytest.approx([1e3 * machine.head_s(n) for n in table.head_rows])


def test_repeats_median_beats_noise() -> None:
    quiet, noisy = Machine(), Machine(noise=0.5)
    expected, found = probe(quiet, 60).table, probe(noisy, 60).table
    assert np.all(found.verify_ms >= 0.99 * expected.verify_ms)
    assert np.all(found.verify_ms <= 1.5 * expected.verify_ms)
    assert np.all(found.head_ms >= 0.99 * expected.head_ms)
    assert np.all(found.head_ms <= 1.5 * expected.head_ms)


def test_rows_that_did_not_run_as_asked_stop_the_probe() -> None:
    with pytest.raises(ProbeError, match="asked for 1 rows and 0 ran"):
        probe(Machine(miscount=1), budget_s=60)


@given(
    base_s=st.floats(1e-4, 0.5),
    row_s=st.floats(1e-6, 0.05),
    noise=st.floats(0, 1),
    budget_s=st.floats(1, 60),
    max_bs=st.integers(1, 64),
)
def test_budget_holds_whatever_the_machine(
    base_s: float, row_s: float, noise: float, budget_s: float, max_bs: int
) -> None:
    machine = Machine(base_s=base_s, row_s=row_s, noise=noise)
    report = probe(machine, budget_s, max_bs)
    # What predicts, the first batch size, and where there is little time the largest one, always
    # run; after that, one step may be under way when the time is up.
    always = [step for step in machine.executed if step[0] in (1, min(4, max_bs))]
    always_s = sum(machine.verify_s(*step) for step in always[:20])
    if len(report.table.batch_sizes) <= 2:
        largest = [step for step in machine.executed if step[0] == max_bs]
        always_s += sum(machine.verify_s(*step) for step in largest)
    draft_s = 20 * machine.draft_s * max_bs
    longest_s = max(machine.verify_s(*step) for step in machine.executed)
    # Each number of the head's rows runs once in any case.
    head_s = sum(machine.head_s(rows) for rows in report.table.head_rows)
    assert machine.now_s <= (1 + noise) * (max(budget_s, always_s) + longest_s + draft_s + head_s)
    assert report.table.batch_sizes[0] == 1
    assert set(report.table.batch_sizes) <= {b for b, _, _ in machine.executed}


def test_a_small_budget_means_a_coarser_grid() -> None:
    fine, coarse = Machine(), Machine()
    big = probe(fine, budget_s=60, max_bs=64).table
    small = probe(coarse, budget_s=4, max_bs=64).table
    assert len(small.batch_sizes) < len(big.batch_sizes)
    assert coarse.now_s <= 4.5
    assert small.verify(64, 64 * BLOCK_SIZE, 100) == pytest.approx(
        big.verify(64, 64 * BLOCK_SIZE, 100), rel=0.05
    )


def test_format_has_a_line_per_batch_size_and_context() -> None:
    text = format_table(probe(Machine(), budget_s=60).table)
    lines = text.splitlines()
    assert len(lines) == 1 + 5 * 2 + 1
    assert "25 %" in lines[0]
    assert lines[-1].startswith("draft head by rows: 1: 3.4, 4: 4.6, ")
