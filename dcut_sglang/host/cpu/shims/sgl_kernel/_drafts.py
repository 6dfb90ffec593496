"""sgl-kernel's operators of speculative decoding on a CPU, in plain torch.

For SGLang's NGRAM, STANDALONE and EAGLE-3 with top-k 1. A verify block has n nodes per request:
node 0 is the last known token, the others are drafts; node i of request b has the packed index
``b * n + i``. Each operator fills the tensors that its name or docstring calls outputs, in place.
"""

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Links of a draft tree, from the ancestors of each node.

    Args:
        tree_mask: bool [bs * n * n], entry (b, i, j): node j is i itself or an ancestor of it.
        verified_seq_len: int [bs], tokens before the block.
        positions: output, int [bs * n], position in the request's text.
        retrieve_index: output, int [bs, n], the packed index.
        retrieve_next_token: output, int [bs, n], a node's first child, -1 without one.
        retrieve_next_sibling: output, int [bs, n], the next child of the same parent, or -1.
    """
    bs, n = batch_size, draft_token_num
    node = torch.arange(n, device=tree_mask.device)
    ancestors = tree_mask.view(bs, n, n) & (node[None, :] < node[:, None])
    # The nearest ancestor has the largest number: nodes are numbered from the root outward.
    parent = torch.where(ancestors, node, -1).amax(-1)
    depth = ancestors.sum(-1)
    positions.view(bs, n).copy_(depth + verified_seq_len[:, None])
    retrieve_index.copy_(torch.arange(bs * n, device=tree_mask.device).view(bs, n))
    child_of = parent[:, None, :] == node[None, :, None]  # [bs, parent, child]
    first_child = torch.where(child_of, node, n).amin(-1)
    retrieve_next_token.copy_(torch.where(first_child < n, first_child, -1))
    sibling = (parent[:, None, :] == parent[:, :, None]) & (node[None, :] > node[:, None])
    next_sibling = torch.where(sibling & (parent >= 0)[:, :, None], node, n).amin(-1)
    retrieve_next_sibling.copy_(torch.where(next_sibling < n, next_sibling, -1))


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """The links of a chain of drafts; outputs as above, ``tree_mask`` bool [bs * n * n] too.

    Raises:
        NotImplementedError: a tree (top-k above 1), or a mask that covers the context as well.
    """
    if topk != 1 or int(tree_mask_mode) != 1:
        raise NotImplementedError(
            f"this CPU stand-in builds chains with a mask over the block only, got top-k {topk} "
            f"and mask mode {int(tree_mask_mode)}; set --speculative-eagle-topk 1"
        )
    bs, n = verified_seq_len.numel(), draft_token_num
    node = torch.arange(n, device=tree_mask.device)
    tree_mask.view(bs, n, n).copy_(node[None, :] <= node[:, None])
    positions.view(bs, n).copy_(verified_seq_len[:, None] + node)
    retrieve_index.copy_(torch.arange(bs * n, device=tree_mask.device).view(bs, n))
    retrieve_next_token.copy_(torch.where(node + 1 < n, node + 1, -1).expand(bs, n))
    retrieve_next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from its root along the drafts that are the target's own choice.

    Args (the misspelt names are sgl-kernel's):
        predicts: output, int32 [bs * n], the target's token behind each node of the path.
        accept_index: output, int32 [bs, s], packed indices of the path, root first; the rest is
            left as it was. At most s - 1 drafts are accepted.
        accept_token_num: output, int32 [bs], accepted drafts.
        candidates: int [bs, n], token of each node.
        retrive_index, retrive_next_token, retrive_next_sibling: int [bs, n], the links.
        target_predict: int [bs, n], the target's token behind each node.
    """
    max_accepts = accept_index.shape[1] - 1
    tokens, targets = candidates.tolist(), target_predict.tolist()
    packed, child, sibling = (
        links.tolist() for links in (retrive_index, retrive_next_token, retrive_next_sibling)
    )
    for row in range(len(tokens)):
        path = [0]
        while len(path) <= max_accepts:
            node = child[row][path[-1]]
            while node >= 0 and tokens[row][node] != targets[row][path[-1]]:
                node = sibling[row][node]
            if node < 0:
                break
            path.append(node)
        places = torch.tensor([packed[row][node] for node in path])
        predicts[places] = torch.tensor([targets[row][node] for node in path], dtype=predicts.dtype)
        accept_index[row, : len(path)] = places.to(accept_index.dtype)
        accept_token_num[row] = len(path) - 1


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """The last token that each request emitted: ``bonus_tokens``, output [bs].

    accept_tokens: [bs * accept_stride], each request's tokens in front; accept_lens: int [bs].
    """
    rows = torch.arange(accept_lens.numel(), device=accept_lens.device)
    bonus_tokens.copy_(accept_tokens.view(-1)[rows * accept_stride + accept_lens - 1])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """KV slots of the accepted nodes, packed to the front of ``accept_out_cache_loc``.

    accept_index: int [bs, s], packed indices, -1 where there is none; out_cache_loc: [bs * n].
    """
    chosen = accept_index.view(-1)
    slots = out_cache_loc[chosen[chosen >= 0].to(torch.int64)]
    accept_out_cache_loc[: slots.numel()] = slots.to(accept_out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """The KV slots behind each request's text: ``out_cache_loc``, output [bs * topk * steps]."""
    width = topk * speculative_num_steps
    columns = seq_lens.to(torch.int64)[:, None] + torch.arange(width, device=seq_lens.device)
    slots = req_to_token[req_pool_indices.to(torch.int64)[:, None], columns]
    out_cache_loc.view(-1, width).copy_(slots)
