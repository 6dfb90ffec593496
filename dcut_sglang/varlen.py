"""Attention over variable-length queries against a paged KV cache, in torch.

Interface and conventions are FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper``: the batch
is described once per forward by CSR arrays (``plan``), then every layer calls ``run``. Pages
hold one token, as SGLang plans them, so ``kv_indices`` are token slots of the KV pool. A CUDA
host plugs FlashInfer's wrapper into the same two calls.

Work is arranged for a CPU. Requests with equal query length run as one padded batched SDPA,
so a ragged verify of D different lengths costs about D calls per layer instead of one per
request (more where KV lengths differ widely), and no query row is padding. The query heads
that share a KV head are folded into the query length, so K and V are gathered once per KV head
and never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

# Requests of one group are padded to the longest KV among them. A new group starts where that
# would more than double the work, except for short KV, where a call costs more than padding.
_MAX_PADDING_RATIO = 2.0
_SHORT_KV_LEN = 128


@dataclass
class _Group:
    """Requests of equal query length ``q_len``, padded to one KV length."""

    q_len: int
    rows: torch.Tensor | slice  # packed query rows, request-major: [n * q_len]
    slots: torch.Tensor  # KV slots, row-major: [n * max_kv_len], padded with the request's first
    q_offset: torch.Tensor  # position of each request's first query in its KV: int64 [n]
    kv_len: torch.Tensor  # int64 [n]
    max_kv_len: int
    tree: torch.Tensor | None = None  # which rows of its block a query sees: bool [n, q_len, q_len]
    masks: dict[tuple[int, torch.dtype], torch.Tensor | None] = field(default_factory=dict)


class VarlenAttention:
    """Plan once per forward, run once per layer."""

    def __init__(self) -> None:
        self._groups: list[_Group] | None = None
        self._num_tokens = 0
        self._causal = True
        self._window_left = -1

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        *,
        causal: bool = True,
        window_left: int = -1,
        tree_mask: torch.Tensor | None = None,
    ) -> None:
        """Describe the batch.

        Args:
            qo_indptr: int [bs + 1], request i owns packed query rows
                ``qo_indptr[i]:qo_indptr[i + 1]``; an empty request is allowed.
            kv_indptr: int [bs + 1], likewise for ``kv_indices``.
            kv_indices: int [kv_indptr[-1]], token slots in order of position.
            causal: query j of request i sees the KV up to its own position; the last query is
                aligned with the last KV entry (FlashInfer's convention). False: every query
                sees the whole KV of its request.
            window_left: a query sees at most this many positions before its own; -1: all.
            tree_mask: bool [bs, q_len, q_len], for trees of drafts: query j of request i sees
                entry k of its own block where [i, j, k] is true, and all KV before the block.
                Takes the place of ``causal``; every request must have q_len queries.

        Raises:
            ValueError: arrays that do not fit each other, more queries than KV entries in a
                causal request, or a tree mask with ragged queries or with a window.

        Host syncs: copies both indptr arrays to the host, and index arrays back.
        """
        if qo_indptr.numel() != kv_indptr.numel() or qo_indptr.numel() == 0:
            raise ValueError(
                f"qo_indptr has {qo_indptr.numel()} entries and kv_indptr {kv_indptr.numel()}; "
                "both must have bs + 1"
            )
        q_start, kv_start = qo_indptr.tolist(), kv_indptr.tolist()
        if kv_indices.numel() < kv_start[-1]:
            raise ValueError(
                f"kv_indices has {kv_indices.numel()} entries, kv_indptr ends at {kv_start[-1]}"
            )
        bs = len(q_start) - 1
        q_lens = [q_start[i + 1] - q_start[i] for i in range(bs)]
        kv_lens = [kv_start[i + 1] - kv_start[i] for i in range(bs)]
        if min(q_lens, default=0) < 0 or min(kv_lens, default=0) < 0:
            raise ValueError("qo_indptr and kv_indptr must not decrease")
        for i in range(bs):
            if q_lens[i] > 0 and kv_lens[i] == 0:
                raise ValueError(f"request {i} has {q_lens[i]} queries and no KV")
            if causal and q_lens[i] > kv_lens[i]:
                raise ValueError(
                    f"request {i} has {q_lens[i]} causal queries but only {kv_lens[i]} KV entries"
                )
        if tree_mask is not None:
            _check_tree_mask(tree_mask, q_lens, window_left)
        self._num_tokens = q_start[-1]
        self._causal, self._window_left = causal, window_left
        self._groups = []
        for members in _group_requests(q_lens, kv_lens):
            group = self._make_group(members, q_lens, kv_lens, q_start, kv_start, kv_indices)
            if tree_mask is not None:
                group.tree = tree_mask[torch.tensor(members, device=tree_mask.device)]
            self._groups.append(group)

    def _make_group(
        self,
        members: list[int],
        q_lens: list[int],
        kv_lens: list[int],
        q_start: list[int],
        kv_start: list[int],
        kv_indices: torch.Tensor,
    ) -> _Group:
        device = kv_indices.device
        q_len = q_lens[members[0]]
        max_kv_len = max(kv_lens[i] for i in members)
        kv_len = torch.tensor([kv_lens[i] for i in members], device=device)
        starts = torch.tensor([kv_start[i] for i in members], device=device)
        columns = torch.arange(max_kv_len, device=device)
        valid = columns < kv_len[:, None]
        # Padding is masked out, but 0 * NaN is NaN: it must not read a slot that is not the
        # request's own and may hold anything.
        flat = torch.where(valid, starts[:, None] + columns, starts[:, None]).reshape(-1)
        slots = kv_indices.to(torch.int64)[flat]
        first, last = q_start[members[0]], q_start[members[-1] + 1]
        rows: torch.Tensor | slice
        if last - first == q_len * len(members) and members == sorted(members):
            rows = slice(first, last)  # contiguous: a view instead of a gather
        else:
            first_rows = torch.tensor([q_start[i] for i in members], device=device)
            rows = (first_rows[:, None] + torch.arange(q_len, device=device)).reshape(-1)
        return _Group(q_len, rows, slots, kv_len - q_len, kv_len, max_kv_len)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        sm_scale: float | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            q: [num_tokens, num_qo_heads, head_dim_qk], packed as planned. Rows beyond the
                planned ones (graph padding) are allowed and come back as zeros.
            k_cache: [num_slots, num_kv_heads, head_dim_qk].
            v_cache: [num_slots, num_kv_heads, head_dim_vo].
            sm_scale: softmax scale, ``head_dim_qk ** -0.5`` by default.

        Returns:
            [num_tokens, num_qo_heads, head_dim_vo], dtype of ``q``. Host sync in the first call
            after a plan, where the masks are built.

        Raises:
            RuntimeError: nothing was planned.
            ValueError: ``q`` does not fit the plan or the caches.
        """
        if self._groups is None:
            raise RuntimeError("plan the batch before running attention over it")
        num_rows, num_qo_heads, head_dim = q.shape
        num_kv_heads, head_dim_vo = v_cache.shape[1], v_cache.shape[2]
        if num_rows < self._num_tokens:
            raise ValueError(f"q has {num_rows} rows, the plan {self._num_tokens}")
        if num_qo_heads % num_kv_heads:
            raise ValueError(f"{num_qo_heads} query heads do not share {num_kv_heads} KV heads")
        fold = num_qo_heads // num_kv_heads
        out = q.new_zeros(num_rows, num_qo_heads, head_dim_vo)
        for group in self._groups:
            n, q_len, kv_len = len(group.kv_len), group.q_len, group.max_kv_len
            # [n, kv heads, fold * q_len, head_dim]: a query row per (head of the group, token).
            folded = (
                q[group.rows]
                .view(n, q_len, num_kv_heads, fold, head_dim)
                .permute(0, 2, 3, 1, 4)
                .reshape(n, num_kv_heads, fold * q_len, head_dim)
            )
            keys = k_cache.index_select(0, group.slots).view(n, kv_len, num_kv_heads, head_dim)
            values = v_cache.index_select(0, group.slots).view(n, kv_len, num_kv_heads, head_dim_vo)
            attended = F.scaled_dot_product_attention(
                folded,
                keys.transpose(1, 2).to(q.dtype),
                values.transpose(1, 2).to(q.dtype),
                attn_mask=self._mask(group, fold, q.dtype),
                scale=sm_scale,
            )
            out[group.rows] = (
                attended.view(n, num_kv_heads, fold, q_len, head_dim_vo)
                .permute(0, 3, 1, 2, 4)
                .reshape(n * q_len, num_qo_heads, head_dim_vo)
            )
        return out

    def _mask(self, group: _Group, fold: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [n, 1, fold * q_len, max_kv_len], or None where every query sees all."""
        key = (fold, dtype)
        if key not in group.masks:
            group.masks[key] = self._build_mask(group, fold, dtype)
        return group.masks[key]

    def _build_mask(self, group: _Group, fold: int, dtype: torch.dtype) -> torch.Tensor | None:
        device = group.kv_len.device
        columns = torch.arange(group.max_kv_len, device=device)[None, None, :]
        position = (
            group.q_offset[:, None, None] + torch.arange(group.q_len, device=device)[None, :, None]
        )
        seen = (columns < group.kv_len[:, None, None]).expand(-1, group.q_len, -1)
        if group.tree is not None:
            seen = seen & (columns < group.q_offset[:, None, None])
            rows, block = group.q_offset.numel(), torch.arange(group.q_len, device=device)
            places = (group.q_offset[:, None] + block)[:, None, :].expand(rows, group.q_len, -1)
            seen = seen.scatter(2, places, group.tree)
        elif self._causal:
            seen = seen & (columns <= position)
        if self._window_left >= 0:
            seen = seen & (columns >= position - self._window_left)
        if bool(seen.all()):
            return None
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        mask.masked_fill_(~seen, torch.finfo(dtype).min)
        n, q_len, kv_len = seen.shape
        return mask[:, None].expand(n, fold, q_len, kv_len).reshape(n, 1, fold * q_len, kv_len)


def _check_tree_mask(tree_mask: torch.Tensor, q_lens: list[int], window_left: int) -> None:
    bs, q_len = len(q_lens), max(q_lens, default=0)
    if window_left >= 0:
        raise ValueError("tree_mask does not go with a window")
    if any(length != q_len for length in q_lens) or tree_mask.shape != (bs, q_len, q_len):
        raise ValueError(
            f"tree_mask has shape {tuple(tree_mask.shape)}, expected [bs, q_len, q_len] for "
            f"{bs} requests of equal query length, got lengths {q_lens}"
        )


def _group_requests(q_lens: list[int], kv_lens: list[int]) -> list[list[int]]:
    """Split requests with queries into groups of equal query length and similar KV length."""
    order = sorted((i for i in range(len(q_lens)) if q_lens[i] > 0), key=lambda i: q_lens[i])
    groups: list[list[int]] = []
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and q_lens[order[stop]] == q_lens[order[start]]:
            stop += 1
        same_q = order[start:stop]
        shortest = min(kv_lens[i] for i in same_q)
        limit = max(_SHORT_KV_LEN, _MAX_PADDING_RATIO * shortest)
        if max(kv_lens[i] for i in same_q) <= limit:
            groups.append(same_q)  # in batch order: a full batch stays contiguous
        else:
            groups.extend(_split_by_kv_len(sorted(same_q, key=lambda i: kv_lens[i]), kv_lens))
        start = stop
    return groups


def _split_by_kv_len(members: list[int], kv_lens: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in members:
        first = kv_lens[groups[-1][0]] if groups else 0
        if groups and kv_lens[i] <= max(_SHORT_KV_LEN, _MAX_PADDING_RATIO * first):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
