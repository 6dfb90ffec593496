"""Variable-length attention against dense masked attention, request by request in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dcut_sglang.varlen import VarlenAttention


@dataclass(frozen=True)
class Shape:
    """One batch: query and KV lengths of its requests, and the heads."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    kv_heads: int = 2
    fold: int = 1
    dim_qk: int = 8
    dim_vo: int = 8


@dataclass
class Batch:
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    @property
    def csr(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.qo_indptr, self.kv_indptr, self.kv_indices

    @property
    def data(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k_cache, self.v_cache


def indptr(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)


def make_batch(shape: Shape, dtype: torch.dtype = torch.float32) -> Batch:
    """Random data; the KV entries lie in shuffled slots of a pool with room to spare."""
    num_kv, num_q = sum(shape.kv_lens), sum(shape.q_lens)
    slots = num_kv + 5
    return Batch(
        indptr(shape.q_lens),
        indptr(shape.kv_lens),
        torch.randperm(slots)[:num_kv].to(torch.int32),
        torch.randn(num_q, shape.kv_heads * shape.fold, shape.dim_qk).to(dtype),
        torch.randn(slots, shape.kv_heads, shape.dim_qk).to(dtype),
        torch.randn(slots, shape.kv_heads, shape.dim_vo).to(dtype),
    )


def dense_attention(
    batch: Batch, causal: bool = True, window_left: int = -1, sm_scale: float | None = None
) -> torch.Tensor:
    """Softmax attention of each query over the KV entries that it may see, in float64."""
    q, k_cache, v_cache = (x.double() for x in batch.data)
    fold = q.shape[1] // k_cache.shape[1]
    scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
    out = torch.zeros(*q.shape[:2], v_cache.shape[2], dtype=torch.float64)
    qo, kv = batch.qo_indptr.tolist(), batch.kv_indptr.tolist()
    for i in range(len(qo) - 1):
        slots = batch.kv_indices[kv[i] : kv[i + 1]].long()
        keys, values = k_cache[slots], v_cache[slots]
        q_len, kv_len = qo[i + 1] - qo[i], len(slots)
        for j in range(q_len):
            position = kv_len - q_len + j
            last = position if causal else kv_len - 1
            first = max(0, position - window_left) if window_left >= 0 else 0
            seen = slice(first, last + 1)
            for head in range(q.shape[1]):
                scores = keys[seen, head // fold] @ q[qo[i] + j, head] * scale
                out[qo[i] + j, head] = scores.softmax(0) @ values[seen, head // fold]
    return out


def attend(batch: Batch, sm_scale: float | None = None, **plan: Any) -> torch.Tensor:
    attention = VarlenAttention()
    attention.plan(*batch.csr, **plan)
    return attention.run(*batch.data, sm_scale=sm_scale)


SHAPES = {
    "decode": Shape((1, 1, 1), (5, 9, 1), fold=3),
    "prefill": Shape((5, 7), (5, 7)),
    "uniform verify": Shape((4, 4, 4), (9, 4, 30), kv_heads=3, fold=4),
    "ragged verify": Shape((3, 1, 4, 3, 2, 1), (11, 7, 4, 35, 2, 23), kv_heads=1, fold=3),
    "one query, one KV": Shape((1,), (1,)),
    "empty queries": Shape((0, 3, 0, 0, 3, 0), (4, 6, 0, 2, 8, 0)),
    "no queries at all": Shape((0, 0), (3, 0)),
    "no requests": Shape((), ()),
    "odd sizes": Shape((17, 1, 17), (111, 99, 17), kv_heads=3, fold=1, dim_qk=13, dim_vo=7),
    "wider values": Shape((2, 5), (6, 5), fold=4, dim_qk=4, dim_vo=12),
    "split, then out of order": Shape((2,) * 5, (200, 300, 250, 390, 900), kv_heads=1, fold=2),
    "split by KV length": Shape((2, 2, 1, 2, 2, 2), (300, 3, 40, 129, 700, 290), kv_heads=1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    "causal, window_left", [(True, -1), (False, -1), (True, 0), (True, 3), (False, 2), (True, 999)]
)
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_equals_dense_attention(
    shape: Shape, causal: bool, window_left: int, dtype: torch.dtype, tolerance: float
) -> None:
    batch = make_batch(shape, dtype)
    out = attend(batch, causal=causal, window_left=window_left)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), dense_attention(batch, causal, window_left), atol=tolerance, rtol=tolerance
    )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    q_lens = draw(st.lists(st.integers(0, 5), max_size=6))
    prefix = st.sampled_from([0, 1, 2, 17, 100, 150, 400])
    kv_lens = tuple(n + draw(prefix) for n in q_lens)
    return Shape(tuple(q_lens), kv_lens, draw(st.integers(1, 2)), draw(st.integers(1, 2)), 4, 3)


@given(shapes(), st.booleans(), st.sampled_from([-1, 0, 2, 120]))
def test_equals_dense_attention_for_any_batch(shape: Shape, causal: bool, window_left: int) -> None:
    batch = make_batch(shape, torch.float64)
    torch.testing.assert_close(
        attend(batch, causal=causal, window_left=window_left),
        dense_attention(batch, causal, window_left),
    )


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    batch = make_batch(SHAPES["ragged verify"], dtype)
    out = attend(batch)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), dense_attention(batch), atol=tolerance, rtol=tolerance)


def test_a_key_that_stands_out_is_found() -> None:
    """Known answer: a query that matches one key gets that key's value."""
    kv_len = 5
    attention = VarlenAttention()
    attention.plan(torch.tensor([0, 2]), torch.tensor([0, kv_len]), torch.arange(kv_len))
    keys = 100 * torch.eye(kv_len)[:, None]
    values = torch.arange(float(kv_len)).view(kv_len, 1, 1)
    out = attention.run(keys[[0, 3]], keys, values)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, 3.0]))


def test_more_queries_than_kv_without_causality() -> None:
    batch = make_batch(Shape((6, 2), (1, 4)), torch.float64)
    torch.testing.assert_close(attend(batch, causal=False), dense_attention(batch, causal=False))


def test_softmax_scale() -> None:
    batch = make_batch(SHAPES["ragged verify"], torch.float64)
    torch.testing.assert_close(attend(batch, sm_scale=0.7), dense_attention(batch, sm_scale=0.7))


@pytest.mark.parametrize("name", ["uniform verify", "ragged verify", "no requests"])
def test_padded_rows_come_back_zero(name: str) -> None:
    batch = make_batch(SHAPES[name])
    planned = batch.q.shape[0]
    padded = replace(
        batch, q=torch.cat([batch.q, torch.full_like(batch.q[:1], 9.0).repeat(3, 1, 1)])
    )
    out = attend(padded) if planned else attend(replace(batch, q=torch.randn(3, 2, 8)))
    torch.testing.assert_close(out[:planned], attend(batch))
    assert (out[planned:] == 0).all()


def test_strided_queries_and_a_cache_of_another_dtype() -> None:
    """Queries are a view into a fused QKV projection; the KV pool may hold another dtype."""
    batch = make_batch(SHAPES["ragged verify"])
    fused = torch.randn(batch.q.shape[0], 3 * batch.q.shape[1], batch.q.shape[2])
    fused[:, : batch.q.shape[1]] = batch.q
    half = replace(
        batch,
        q=fused[:, : batch.q.shape[1]],
        k_cache=batch.k_cache.bfloat16(),
        v_cache=batch.v_cache.bfloat16(),
    )
    before = fused.clone()
    out = attend(half)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), dense_attention(half), atol=1e-5, rtol=1e-5)
    assert torch.equal(fused, before)


def test_spare_slots_do_not_count() -> None:
    """``kv_indices`` may be a longer buffer than the plan uses."""
    batch = make_batch(SHAPES["ragged verify"])
    longer = replace(batch, kv_indices=F.pad(batch.kv_indices, (0, 9), value=10**6))
    assert torch.equal(attend(longer), attend(batch))


def test_one_plan_serves_layers_of_different_heads_and_dtypes() -> None:
    shape = SHAPES["ragged verify"]
    batch = make_batch(shape)
    attention = VarlenAttention()
    attention.plan(*batch.csr)
    layers = [shape, replace(shape, fold=1), replace(shape, kv_heads=4, dim_vo=5), shape]
    for i, layer_shape in enumerate(layers):
        layer = make_batch(layer_shape, torch.float64 if i % 2 else torch.float32)
        layer = replace(layer, kv_indices=batch.kv_indices)
        torch.testing.assert_close(
            attention.run(*layer.data).double(), dense_attention(layer), atol=1e-5, rtol=1e-5
        )


def test_a_new_plan_replaces_the_old_one() -> None:
    attention = VarlenAttention()
    attention.plan(*make_batch(SHAPES["split by KV length"]).csr, causal=False, window_left=2)
    batch = make_batch(SHAPES["uniform verify"], torch.float64)
    attention.plan(*batch.csr)
    torch.testing.assert_close(attention.run(*batch.data), dense_attention(batch))


@pytest.mark.parametrize(
    "q_lens, kv_lens, num_calls",
    [
        ((4,) * 6, (40, 50, 60, 70, 80, 128), 1),  # a uniform batch
        ((3, 1, 3, 2, 1, 2), (40, 50, 60, 70, 80, 128), 3),  # one call per query length
        ((2, 2, 2), (128, 1, 1), 1),  # short KV is padded rather than split
        ((2, 2, 2, 2), (1000, 200, 210, 600), 2),  # padded to 210 and to 1000, not all to 1000
        ((0, 0), (5, 6), 0),
    ],
)
def test_few_calls_and_bounded_padding(
    monkeypatch: pytest.MonkeyPatch,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    num_calls: int,
) -> None:
    padded_to: list[tuple[int, int]] = []
    sdpa = F.scaled_dot_product_attention

    def counting(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        padded_to.append((q.shape[0], k.shape[2]))
        return sdpa(q, k, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    kv_lens = tuple(max(q, kv) for q, kv in zip(q_lens, kv_lens, strict=True))
    attend(make_batch(Shape(q_lens, kv_lens)))
    assert len(padded_to) == num_calls
    needed = sum(max(128, 2 * kv) for q, kv in zip(q_lens, kv_lens, strict=True) if q)
    assert sum(n * kv_len for n, kv_len in padded_to) <= needed


@pytest.mark.parametrize(
    "qo_indptr, kv_indptr, num_indices, causal, sentence",
    [
        ([0, 1], [0, 1, 2], 2, True, r"qo_indptr has 2 entries and kv_indptr 3; both .* bs \+ 1"),
        ([0, 1], [0, 4], 3, True, "kv_indices has 3 entries, kv_indptr ends at 4"),
        ([0, 2, 1], [0, 2, 4], 4, True, "must not decrease"),
        ([0, 1, 2], [0, 4, 2], 4, True, "must not decrease"),
        ([0, 1, 2], [0, 4, 4], 4, True, "request 1 has 1 queries and no KV"),
        ([0, 1, 2], [0, 4, 4], 4, False, "request 1 has 1 queries and no KV"),
        ([0, 3], [0, 2], 2, True, "request 0 has 3 causal queries but only 2 KV entries"),
        ([], [], 0, True, r"both must have bs \+ 1"),
    ],
)
def test_plan_refuses_arrays_that_do_not_fit(
    qo_indptr: list[int], kv_indptr: list[int], num_indices: int, causal: bool, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        VarlenAttention().plan(
            torch.tensor(qo_indptr, dtype=torch.int64),
            torch.tensor(kv_indptr, dtype=torch.int64),
            torch.zeros(num_indices, dtype=torch.int64),
            causal=causal,
        )


def test_run_refuses_what_does_not_fit_the_plan() -> None:
    batch = make_batch(Shape((2, 1), (4, 3), kv_heads=2, fold=2))
    attention = VarlenAttention()
    attention.plan(*batch.csr)
    with pytest.raises(ValueError, match="q has 2 rows, the plan 3"):
        attention.run(batch.q[:2], batch.k_cache, batch.v_cache)
    with pytest.raises(ValueError, match="3 query heads do not share 2 KV heads"):
        attention.run(batch.q[:, :3], batch.k_cache, batch.v_cache)


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_garbage_in_slots_of_no_request_is_never_seen(cache: str) -> None:
    batch = make_batch(Shape((1, 1, 2), (2, 9, 5)))
    kv_indices = torch.arange(1, 17)  # slot 0 belongs to no request, as in SGLang's pools
    batch = replace(batch, kv_indices=kv_indices)
    getattr(batch, cache)[0] = torch.nan
    torch.testing.assert_close(attend(batch).double(), dense_attention(batch), atol=1e-5, rtol=1e-5)
