"""Attention over trees of drafts, against each path of the tree attended by itself."""

from __future__ import annotations

import pytest
import torch
from test_varlen import Shape, make_batch

from dcut_sglang.varlen import VarlenAttention

# Two branches behind the root: 0 - 1 - 3 and 0 - 2.
PARENTS = (-1, 0, 0, 1)


def ancestors(parents: tuple[int, ...]) -> torch.Tensor:
    """Which nodes lie on each node's path from the root, itself included: bool [n, n]."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@pytest.mark.parametrize("kv_lens", [(9, 6), (400, 5)], ids=["one group", "two groups"])
def test_each_path_of_a_tree_is_attended_as_a_chain(kv_lens: tuple[int, int]) -> None:
    torch.manual_seed(1)
    n = len(PARENTS)
    batch = make_batch(Shape((n, n), kv_lens, kv_heads=2, fold=3))
    trees = torch.stack([ancestors(PARENTS), torch.ones(n, n).tril().bool()])
    attention = VarlenAttention()
    attention.plan(*batch.csr, tree_mask=trees)
    found = attention.run(*batch.data)
    for request, start in enumerate(batch.kv_indptr[:-1].tolist()):
        slots = batch.kv_indices[start : start + kv_lens[request]]
        text, block = slots[:-n], slots[-n:]
        for node in range(n):
            path = trees[request, node].nonzero()[:, 0]
            kv = torch.cat([text, block[path]])
            lens = torch.tensor([0, 1]), torch.tensor([0, len(kv)])
            alone = VarlenAttention()
            alone.plan(*lens, kv)
            row = request * n + node
            expected = alone.run(batch.q[row : row + 1], batch.k_cache, batch.v_cache)
            torch.testing.assert_close(found[row : row + 1], expected, atol=2e-6, rtol=1e-5)


def test_a_tree_mask_that_does_not_fit_is_refused() -> None:
    attention, mask = VarlenAttention(), torch.ones(2, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="equal query length"):
        attention.plan(*make_batch(Shape((3, 2), (5, 5))).csr, tree_mask=mask)
    with pytest.raises(ValueError, match="window"):
        attention.plan(*make_batch(Shape((3, 3), (5, 5))).csr, tree_mask=mask, window_left=4)
