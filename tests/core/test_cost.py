"""CostTable: interpolation, extrapolation, the monotone envelope, and the file."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_sglang.cost import CostTable, CostTableError

BATCH_SIZES, KEEP_RATIOS, CONTEXTS = (1, 4, 16), (0.0, 0.25, 0.5, 1.0), (64, 256, 512)
HEAD_ROWS, SHORT_BLOCKS = (1, 8, 64), (3, 5)
BLOCK_SIZE = 9  # 8 drafts, so that every ratio of the grid is a whole number of drafts


def random_table(seed: int = 0, low: float = 1.0, high: float = 100.0, **changes: Any) -> CostTable:
    """Independent cells: nothing about them is monotone."""
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "batch_sizes": BATCH_SIZES,
        "keep_ratios": KEEP_RATIOS,
        "contexts": CONTEXTS,
        "verify_ms": rng.uniform(low, high, (3, 4, 3)),
        "draft_ms": rng.uniform(low, high, (3, 3)),
        "fingerprint": {"model": "m", "threads": 1},
        "head_rows": HEAD_ROWS,
        "head_ms": rng.uniform(low, high, 3),
        "short_blocks": SHORT_BLOCKS,
        "short_draft_ms": rng.uniform(low, high, (2, 3, 3)),
    }
    return CostTable(**values | changes)


def num_tokens(bs: int, ratio: float) -> float:
    return bs + ratio * bs * (BLOCK_SIZE - 1)


def test_exact_at_grid_points() -> None:
    table = random_table()
    for (b, bs), (x, context) in itertools.product(enumerate(BATCH_SIZES), enumerate(CONTEXTS)):
        tokens = [num_tokens(bs, ratio) for ratio in KEEP_RATIOS]
        assert table.verify(bs, tokens, context).tolist() == table.verify_ms[b, :, x].tolist()
        assert table.draft_forward(bs, context) == table.draft_ms[b, x]
        whole = table.draft_ms[b, x] + table.head(bs * (BLOCK_SIZE - 1))
        assert table.draft(bs, context) == pytest.approx(whole)
    assert table.head(HEAD_ROWS).tolist() == table.head_ms.tolist()


@pytest.mark.parametrize("weight", [0.25, 0.5, 0.75])
def test_linear_between_batch_sizes(weight: float) -> None:
    table = random_table()
    bs = round(4 + weight * 12)
    for r, ratio in enumerate(KEEP_RATIOS):
        between = (1 - weight) * table.verify_ms[1, r, 1] + weight * table.verify_ms[2, r, 1]
        assert table.verify(bs, num_tokens(bs, ratio), 256) == pytest.approx(between)
    between = (1 - weight) * table.draft_ms[1, 1] + weight * table.draft_ms[2, 1]
    assert table.draft_forward(bs, 256) == pytest.approx(between)


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_linear_between_contexts_and_ratios(weight: float) -> None:
    table = random_table()
    context = 64 + weight * (256 - 64)
    by_ratio = (1 - weight) * table.verify_ms[1, :, 0] + weight * table.verify_ms[1, :, 1]
    tokens = [num_tokens(4, ratio) for ratio in KEEP_RATIOS]
    assert table.verify(4, tokens, context) == pytest.approx(by_ratio)
    ratio = 0.25 + weight * 0.25
    between = (1 - weight) * by_ratio[1] + weight * by_ratio[2]
    assert table.verify(4, num_tokens(4, ratio), context) == pytest.approx(between)
    by_draft = (1 - weight) * table.draft_ms[1, 0] + weight * table.draft_ms[1, 1]
    assert table.draft_forward(4, context) == pytest.approx(by_draft)
    rows = 8 + weight * (64 - 8)
    by_rows = (1 - weight) * table.head_ms[1] + weight * table.head_ms[2]
    assert table.head(rows) == pytest.approx(by_rows)


def test_tokens_are_clamped_and_keep_their_shape() -> None:
    table = random_table()
    first, last = table.verify_ms[1, 0, 0], table.verify_ms[1, -1, 0]
    assert table.verify(4, [[0, 4], [36, 1000]], 64).tolist() == [[first, first], [last, last]]
    scalar = table.verify(4, 4, 64)
    assert scalar.shape == () and scalar.dtype == np.float64
    for costs in (table.head, table.at(4, 64).draft_forward):
        assert costs(3).shape == () and costs([[3, 4], [5, 6]]).shape == (2, 2)
        assert costs(3).dtype == np.float64


def test_short_blocks_have_their_own_forward() -> None:
    table = random_table()
    for s, size in enumerate(SHORT_BLOCKS):
        for (b, bs), (x, context) in itertools.product(enumerate(BATCH_SIZES), enumerate(CONTEXTS)):
            assert table.draft_forward(bs, context, size) == table.short_draft_ms[s, b, x]
    assert table.draft_forward(4, 64, BLOCK_SIZE) == table.draft_forward(4, 64)
    assert sorted(table.at(4, 64).forward_ms) == [*SHORT_BLOCKS, BLOCK_SIZE]
    raised = table.monotone().short_draft_ms
    assert raised.shape == (2, 3, 3) and (raised >= table.short_draft_ms).all()
    assert (np.diff(raised, axis=1) >= 0).all() and (np.diff(raised, axis=2) >= 0).all()
    with pytest.raises(KeyError):
        table.draft_forward(4, 64, 4)


def test_a_table_without_short_blocks_comes_back_from_its_file(tmp_path: Path) -> None:
    table = random_table(short_blocks=(), short_draft_ms=np.zeros((0, 0, 0)))
    table.save(tmp_path / "t.json")
    loaded = CostTable.load(tmp_path / "t.json")
    assert loaded.short_blocks == () and sorted(loaded.at(4, 64).forward_ms) == [BLOCK_SIZE]
    assert loaded.monotone().short_blocks == ()


def test_no_rows_need_no_head() -> None:
    table = random_table()
    assert table.head(0) == 0
    assert table.head([0, 1]).tolist() == [0.0, table.head_ms[0]]


@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(0, 5_000), st.integers(1, 60))
def test_the_costs_of_a_batch_are_the_table_s(
    seed: int, bs: int, context: float, num_requests: int
) -> None:
    table = random_table(seed)
    costs = table.at(bs, context)
    assert costs.bs == bs and costs.table is table
    tokens = bs + np.arange(bs * (BLOCK_SIZE - 1) + 1)
    assert costs.verify(tokens).tolist() == table.verify(bs, tokens, context).tolist()
    forward_ms = costs.draft_forward(num_requests)
    assert forward_ms == table.draft_forward(num_requests, context)
    whole = num_requests * (BLOCK_SIZE - 1)
    assert costs.head(whole) == table.head(whole)
    assert table.draft(num_requests, context) == pytest.approx(forward_ms + costs.head(whole))


def test_extended_beyond_the_grid() -> None:
    verify_ms = np.array([10.0, 20.0, 50.0])[:, None, None] + np.zeros((3, 4, 3))
    table = random_table(verify_ms=verify_ms)
    assert table.verify(28, 28, 64) == pytest.approx(80.0)
    longer = random_table(draft_ms=np.array([[1.0, 2.0, 4.0]] * 3))
    assert longer.draft_forward(4, 768) == pytest.approx(6.0)
    assert longer.draft_forward(4, 0) == pytest.approx(1.0 - 64 / 192)
    larger = random_table(draft_ms=np.array([[10.0] * 3, [20.0] * 3, [50.0] * 3]))
    assert larger.draft_forward([1, 28], 64) == pytest.approx([10.0, 80.0])
    deeper = random_table(head_rows=(4, 8, 64), head_ms=np.array([3.0, 4.0, 18.0]))
    assert deeper.head([2, 96]) == pytest.approx([2.5, 26.0])


def test_a_steep_fit_stops_at_a_tenth_of_the_nearest_cell() -> None:
    draft_ms = np.array([[1.0, 90.0, 10.0]] * 3)
    table = random_table(draft_ms=draft_ms)
    assert table.draft_forward(4, 10_000) == pytest.approx(1.0)
    assert table.draft_forward(4, 0) == pytest.approx(0.1)
    falling = random_table(head_ms=np.array([1.0, 90.0, 10.0]))
    assert falling.head(1_000) == pytest.approx(1.0)


@given(
    st.integers(0, 10_000), st.integers(1, 2000), st.floats(0, 200_000), st.lists(st.integers(0))
)
def test_costs_are_positive_everywhere(
    seed: int, bs: int, context: float, tokens: list[int]
) -> None:
    table = random_table(seed, low=0.01)
    verify_ms = table.verify(bs, tokens, context)
    assert np.isfinite(verify_ms).all() and (verify_ms > 0).all()
    assert math.isfinite(table.draft(bs, context)) and table.draft(bs, context) > 0
    assert table.draft(bs, context) > table.draft_forward(bs, context) > 0


@pytest.mark.parametrize("axes", [(1, 1, 1), (1, 2, 3)], ids=["single cell", "single batch size"])
def test_axes_of_one_point_are_constant(axes: tuple[int, int, int]) -> None:
    b, _, x = axes
    table = CostTable(
        16,
        (8,),
        (0.0, 1.0),
        CONTEXTS[:x],
        np.array([[[5.0] * x, [9.0] * x]] * b),
        np.array([[2.0] * x] * b),
    )
    for bs, context in [(1, 0), (8, 64), (500, 9999)]:
        assert table.verify(bs, [bs, bs * 16], context) == pytest.approx([5.0, 9.0])
        assert table.draft(bs, context) == pytest.approx(2.0)


def test_monotone_raises_to_the_envelope() -> None:
    table = random_table(3)
    raised = table.monotone()
    for b, r, x in itertools.product(range(3), range(4), range(3)):
        assert raised.verify_ms[b, r, x] == table.verify_ms[: b + 1, : r + 1, : x + 1].max()
        assert raised.draft_ms[b, x] == table.draft_ms[: b + 1, : x + 1].max()
    assert raised.head_ms.tolist() == [table.head_ms[: h + 1].max() for h in range(3)]
    again = raised.monotone()
    assert np.array_equal(again.verify_ms, raised.verify_ms)
    assert np.array_equal(again.draft_ms, raised.draft_ms)
    assert np.array_equal(again.head_ms, raised.head_ms)
    assert raised.fingerprint == table.fingerprint


@given(
    st.integers(0, 10_000),
    st.tuples(st.integers(1, 16), st.integers(1, 16)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.tuples(st.floats(64, 512), st.floats(64, 512)),
)
def test_monotone_along_every_axis_between_cells(
    seed: int,
    sizes: tuple[int, int],
    ratios: tuple[float, float],
    contexts: tuple[float, float],
) -> None:
    table = random_table(seed).monotone()
    low = (min(sizes), min(ratios), min(contexts))
    high = (max(sizes), max(ratios), max(contexts))

    def cost(bs: float, ratio: float, context: float) -> tuple[float, float]:
        verify_ms = table.verify(int(bs), num_tokens(int(bs), ratio), context)
        return float(verify_ms), table.draft(int(bs), context)

    cheapest = cost(*low)
    for corner in itertools.product(*zip(low, high, strict=True)):
        for less, more in zip(cheapest, cost(*corner), strict=True):
            assert more >= less - 1e-9


def test_monotone_in_rows_beyond_the_longest_context() -> None:
    """Noise in the slopes along the context must not make more rows cheaper at long contexts."""
    table = CostTable(
        16,
        (1,),
        (0.0, 1.0),
        (64, 512),
        np.array([[[10.0, 11.0], [12.0, 12.9]]]),
        np.zeros((1, 2)),
    ).monotone()
    few, many = table.verify(1, [1, 16], 16_384)
    assert many >= few


# -- conditions and files ------------------------------------------------------------------------


def test_fingerprint_names_every_difference_with_both_values() -> None:
    table = random_table(fingerprint={"model": "a", "threads": 2, "dtype": "f32"})
    table.require_fingerprint({"dtype": "f32", "threads": 2, "model": "a"})
    with pytest.raises(CostTableError) as caught:
        table.require_fingerprint({"model": "b", "dtype": "f32", "tp": 4})
    message = str(caught.value)
    assert "model: table 'a', here 'b'" in message
    assert "threads: table 2, here has no such entry" in message
    assert "tp: table has no such entry, here 4" in message
    assert "dtype" not in message


def test_a_fingerprint_survives_the_file(tmp_path: Path) -> None:
    fingerprint = {"versions": ("0.5.23", "2.13.0")}
    random_table(fingerprint=fingerprint).save(tmp_path / "t.json")
    CostTable.load(tmp_path / "t.json").require_fingerprint(fingerprint)


def test_a_condition_that_the_table_does_not_name_differs_from_none() -> None:
    with pytest.raises(CostTableError, match="quantization"):
        random_table(fingerprint={}).require_fingerprint({"quantization": None})


def test_save_and_load(tmp_path: Path) -> None:
    table = random_table()
    path = tmp_path / "new" / "folder" / "table.json"
    table.save(path)
    loaded = CostTable.load(path)
    plain = ("block_size", "batch_sizes", "keep_ratios", "contexts", "head_rows", "fingerprint")
    for name in plain:
        assert getattr(loaded, name) == getattr(table, name)
    np.testing.assert_allclose(loaded.verify_ms, table.verify_ms, rtol=0, atol=5.1e-5)
    np.testing.assert_allclose(loaded.draft_ms, table.draft_ms, rtol=0, atol=5.1e-5)
    np.testing.assert_allclose(loaded.head_ms, table.head_ms, rtol=0, atol=5.1e-5)
    assert loaded.short_blocks == table.short_blocks
    np.testing.assert_allclose(loaded.short_draft_ms, table.short_draft_ms, rtol=0, atol=5.1e-5)
    loaded.save(path)  # what is in a file comes back as it was
    again = CostTable.load(path)
    assert np.array_equal(again.verify_ms, loaded.verify_ms)
    assert np.array_equal(again.draft_ms, loaded.draft_ms)
    assert np.array_equal(again.head_ms, loaded.head_ms)
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"not JSON", b"cut"])
def test_a_damaged_file_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "table.json"
    random_table().save(path)
    if content == b"cut":
        content = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(content)
    with pytest.raises(CostTableError, match=r"table\.json"):
        CostTable.load(path)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_an_unreadable_file_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(CostTableError, match="cannot read the cost table"):
        CostTable.load(tmp_path / name)


@pytest.mark.parametrize("data", [None, [], "x", {}, {"format": "other", "version": 1}])
def test_foreign_data_is_refused(data: Any) -> None:
    with pytest.raises(CostTableError, match="not a DCUT cost table"):
        CostTable.from_json(data)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None])
def test_another_version_is_refused_with_both(version: Any) -> None:
    data = random_table().to_json() | {"version": version}
    with pytest.raises(CostTableError, match=f"version {version!r}, this dcut_sglang reads 2"):
        CostTable.from_json(data)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"verify_ms": [[1.0]]}, "verify_ms"),
        ({"draft_ms": [1.0, 2.0, 3.0]}, "draft_ms"),
        ({"draft_ms": [[1.0], [2.0, 3.0]]}, "damaged"),
        ({"draft_ms": [[math.nan] * 3] * 3}, "draft_ms must hold finite"),
        ({"draft_ms": [[math.inf] * 3] * 3}, "draft_ms must hold finite"),
        ({"draft_ms": [[-1.0] * 3] * 3}, "draft_ms must hold finite"),
        ({"verify_ms": None}, "verify_ms"),
        ({"head_ms": [1.0]}, "head_ms must have shape"),
        ({"head_ms": [1.0, math.nan, 2.0]}, "head_ms must hold finite"),
        ({"head_ms": [1.0, -1.0, 2.0]}, "head_ms must hold finite"),
        ({"head_rows": [1, 64, 8]}, "head_rows must be ascending"),
        ({"head_rows": [0, 8, 64]}, "head_rows must be ascending, from 1 on"),
        ({"head_rows": []}, "head_rows must be ascending"),
        ({"head_rows": None}, "damaged"),
        ({"short_blocks": [5, 3]}, "short_blocks must ascend between 2 and 8"),
        ({"short_blocks": [3, 9]}, "short_blocks must ascend between 2 and 8"),
        ({"short_blocks": [1, 5]}, "short_blocks must ascend between 2 and 8"),
        ({"short_blocks": [3]}, "short_draft_ms must have shape"),
        ({"short_draft_ms": [[[math.nan] * 3] * 3] * 2}, "short_draft_ms must hold finite"),
        ({"batch_sizes": [1, 16, 4]}, "batch_sizes must be ascending"),
        ({"batch_sizes": [1, 4, 4]}, "batch_sizes must be ascending"),
        ({"batch_sizes": []}, "batch_sizes must be ascending"),
        ({"contexts": [64, 32, 512]}, "contexts must be ascending"),
        ({"contexts": 64}, "damaged"),
        ({"keep_ratios": [0.1, 0.25, 0.5, 1.0]}, "keep_ratios must go from 0 to 1"),
        ({"keep_ratios": [0.0, 0.25, 0.5, 0.75]}, "keep_ratios must go from 0 to 1"),
        ({"keep_ratios": [0.0, math.nan, 0.5, 1.0]}, "keep_ratios"),
        ({"block_size": "sixteen"}, "damaged"),
        ({"fingerprint": None}, "damaged"),
    ],
)
def test_inconsistent_data_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CostTableError, match=words):
        CostTable.from_json(random_table().to_json() | changes)


@pytest.mark.parametrize("key", [k for k in random_table().to_json() if k != "format"])
def test_a_missing_key_is_refused(key: str) -> None:
    data = random_table().to_json()
    del data[key]
    with pytest.raises(CostTableError, match=key):
        CostTable.from_json(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": math.inf},
        {"block_size": 1},
        {"block_size": 15.9},
        {"batch_sizes": [0, 4, 16]},
        {"batch_sizes": "149"},
        {"head_rows": [1, 8.5, 64]},
        {"contexts": [-5, 4, 16]},
        {"verify_ms": np.zeros((3, 4, 3)).tolist()},
    ],
    ids=lambda changes: f"{next(iter(changes))}",
)
def test_impossible_sizes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CostTableError):
        CostTable.from_json(random_table().to_json() | changes)


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("failing", ["write", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool, failing: str
) -> None:
    path = tmp_path / "table.json"
    if existing:
        random_table(1).save(path)
    old = path.read_bytes() if existing else None
    write_text = Path.write_text

    def write_half(self: Path, data: str, *args: Any, **kwargs: Any) -> int:
        write_text(self, data[: len(data) // 2], *args, **kwargs)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if failing == "write":
            patch.setattr(Path, "write_text", write_half)
        else:
            patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space left"):
            random_table(2).save(path)
    assert list(tmp_path.iterdir()) == ([path] if existing else [])
    if existing:
        assert path.read_bytes() == old
    random_table(2).save(path)
    assert json.loads(path.read_text()) == random_table(2).to_json()
