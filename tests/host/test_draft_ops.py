"""The stand-ins for sgl-kernel's operators of speculative decoding, one definition at a time."""

from __future__ import annotations

import inspect
import random
from types import ModuleType

import pytest
import torch

NUM_NODES = 6


@pytest.fixture(scope="module")
def ops() -> ModuleType:
    import sgl_kernel

    if not getattr(sgl_kernel, "IS_DCUT_STAND_IN", False):
        pytest.skip("a CPU build of sgl-kernel is installed")
    return inspect.getmodule(sgl_kernel.verify_tree_greedy_cpu)  # type: ignore[return-value]


def random_parents(rng: random.Random) -> list[int]:
    """A tree whose nodes are numbered from the root outward; node 0 is the root."""
    return [-1, *(rng.randrange(node) for node in range(1, NUM_NODES))]


def links_of(ops: ModuleType, trees: list[list[int]]) -> dict[str, torch.Tensor]:
    """The links that the stand-in makes of the trees' masks."""
    bs, n = len(trees), NUM_NODES
    mask = torch.zeros(bs, n, n, dtype=torch.bool)
    for row, parents in enumerate(trees):
        for node in range(n):
            ancestor = node
            while ancestor >= 0:
                mask[row, node, ancestor] = True
                ancestor = parents[ancestor]
    found = {
        "positions": torch.empty(bs * n, dtype=torch.int64),
        "retrieve_index": torch.empty(bs, n, dtype=torch.int64),
        "retrieve_next_token": torch.empty(bs, n, dtype=torch.int64),
        "retrieve_next_sibling": torch.empty(bs, n, dtype=torch.int64),
    }
    lens = torch.arange(10, 10 + bs)
    ops.reconstruct_indices_from_tree_mask(
        mask.flatten(), lens, **found, batch_size=bs, draft_token_num=n
    )
    return found


def test_links_of_trees(ops: ModuleType) -> None:
    rng = random.Random(3)
    trees = [random_parents(rng) for _ in range(20)]
    found = links_of(ops, trees)
    for row, parents in enumerate(trees):
        children = {p: [c for c in range(NUM_NODES) if parents[c] == p] for p in range(NUM_NODES)}
        for node in range(NUM_NODES):
            depth, ancestor = 0, parents[node]
            while ancestor >= 0:
                depth, ancestor = depth + 1, parents[ancestor]
            place = row * NUM_NODES + node
            later = [c for c in children.get(parents[node], []) if c > node]
            assert found["positions"][place] == 10 + row + depth
            assert found["retrieve_index"][row, node] == place
            assert found["retrieve_next_token"][row, node] == (children[node] or [-1])[0]
            assert found["retrieve_next_sibling"][row, node] == (later or [-1])[0]


@pytest.mark.parametrize("max_path", [NUM_NODES, 3])
def test_greedy_verification_walks_the_tree(ops: ModuleType, max_path: int) -> None:
    rng = random.Random(4)
    trees = [random_parents(rng) for _ in range(30)]
    links = links_of(ops, trees)
    bs, n = len(trees), NUM_NODES
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 3, (bs, n), generator=generator)
    targets = torch.randint(0, 3, (bs, n), generator=generator)
    predicts = torch.zeros(bs * n, dtype=torch.int32)
    accept_index = torch.full((bs, max_path), -1, dtype=torch.int32)
    accepts = torch.empty(bs, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepts,
        candidates=tokens,
        retrive_index=links["retrieve_index"],
        retrive_next_token=links["retrieve_next_token"],
        retrive_next_sibling=links["retrieve_next_sibling"],
        target_predict=targets,
    )
    for row, parents in enumerate(trees):
        path = [0]
        while len(path) < max_path:
            fits = [
                node
                for node in range(n)
                if parents[node] == path[-1] and tokens[row, node] == targets[row, path[-1]]
            ]
            if not fits:
                break
            path.append(fits[0])
        assert accepts[row] == len(path) - 1
        expected = [row * n + node for node in path] + [-1] * (max_path - len(path))
        assert accept_index[row].tolist() == expected
        assert predicts[expected[: len(path)]].tolist() == targets[row, path].tolist()
    assert accepts.max() >= 2  # the drawn case is a telling one


def test_chains(ops: ModuleType) -> None:
    bs, n = 3, 4
    lens = torch.tensor([5, 9, 2])
    mask = torch.empty(bs * n * n, dtype=torch.bool)
    positions = torch.empty(bs * n, dtype=torch.int64)
    index, token, sibling = torch.full((3, bs, n), -7)
    outputs = (mask, positions, index, token, sibling)
    ops.build_tree_kernel_efficient_cpu(None, None, lens, *outputs, 1, n - 1, n, 1)
    assert mask.view(bs, n, n).equal(torch.ones(bs, n, n).tril().bool())
    assert positions.view(bs, n).tolist() == [[v + i for i in range(n)] for v in lens.tolist()]
    assert index.flatten().tolist() == list(range(bs * n))
    assert token.tolist() == [[1, 2, 3, -1]] * bs
    assert sibling.eq(-1).all()
    for topk, mode in ((2, 1), (1, 0)):
        with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1"):
            ops.build_tree_kernel_efficient_cpu(None, None, lens, *outputs, topk, 3, n, mode)


def test_slots_and_bonus_tokens(ops: ModuleType) -> None:
    table = torch.arange(100, 160, dtype=torch.int32).view(3, 20)
    slots = torch.zeros(2 * 4, dtype=torch.int64)
    ops.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([2, 0]), table, torch.tensor([3, 7]), slots, 20, 1, 4
    )
    assert slots.tolist() == [143, 144, 145, 146, 107, 108, 109, 110]
    accepted = torch.tensor([[0, 2, -1], [4, -1, -1]], dtype=torch.int32)
    packed = torch.zeros(6, dtype=torch.int64)
    ops.fill_accept_out_cache_loc_cpu(accepted, slots, packed)
    assert packed.tolist() == [143, 145, 107, 0, 0, 0]
    bonus = torch.zeros(2, dtype=torch.int32)
    tokens = torch.tensor([7, 8, 9, 4, 5, 6], dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(tokens, torch.tensor([2, 3], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [8, 6]
