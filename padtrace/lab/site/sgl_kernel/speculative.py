"""CPU stand-ins for the speculative-decoding kernels of sgl_kernel, for chains (topk 1).

Named and called as SGLang's CPU branch calls them; they write into tensors of the caller, as the
Triton and CUDA twins do.
"""

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Store consecutive cache slots into each request's row, from start to end."""
    taken = 0
    for request, start, end in _rows(req_pool_indices, start_offset, end_offset):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[request, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The reverse: collect each request's slots, from start to end, into out_cache_loc."""
    written = 0
    for request, start, end in _rows(req_pool_indices, start_offset, end_offset):
        slots = req_to_token[request, start:end]
        out_cache_loc[written : written + end - start] = slots.to(out_cache_loc.dtype)
        written += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Collect the topk * num_steps slots behind each sequence, request after request."""
    width = topk * num_steps
    for row, (request, length) in enumerate(_rows(req_pool_indices, seq_lens)):
        slots = req_to_token[request, length : length + width]
        out_cache_loc[row * width : (row + 1) * width] = slots.to(out_cache_loc.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    stride: int,
) -> None:
    """The last accepted token of each request; accept_tokens holds `stride` per request."""
    tokens = accept_tokens.reshape(-1)
    for row, accepted in enumerate(accept_lens.tolist()):
        bonus_tokens[row] = tokens[stride * row + accepted - 1]


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """The cache slots of the accepted tokens, packed; -1 in accept_index means not accepted."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted > -1]
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted.long()]


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """A chain of draft_token_num tokens per request: positions, links and a causal mask."""
    if topk != 1:
        raise RuntimeError(f"the lab builds chains only: --speculative-eagle-topk 1, not {topk}")
    width = draft_token_num
    for row, length in enumerate(verified_seq_len.tolist()):
        first = row * width
        positions[first : first + width] = torch.arange(length, length + width)
        retrive_index[row] = torch.arange(first, first + width)
        retrive_next_token[row, : width - 1] = torch.arange(1, width)
        retrive_next_token[row, width - 1] = -1
        retrive_next_sibling[row] = -1
    # Other mask modes prepend the whole prefix; no lab backend reads the mask.
    if tree_mask.numel() == len(verified_seq_len) * width * width:
        tree_mask.view(-1, width, width)[:] = torch.ones(width, width, dtype=torch.bool).tril()


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
    """Walk each chain while the draft agrees with the target, and note what was accepted."""
    targets = target_predict.reshape(-1)
    most = accept_index.shape[1]
    for row in range(candidates.shape[0]):
        last = int(retrive_index[row, 0])
        accept_index[row, 0] = last
        accepted, node = 0, int(retrive_next_token[row, 0])
        while node != -1 and accepted + 1 < most and candidates[row, node] == targets[last]:
            predicts[last] = targets[last]
            accepted += 1
            last = int(retrive_index[row, node])
            accept_index[row, accepted] = last
            node = int(retrive_next_token[row, node])
        predicts[last] = targets[last]
        accept_token_num[row] = accepted


def _rows(*columns: torch.Tensor) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))
