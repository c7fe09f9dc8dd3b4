# SPDX-License-Identifier: Apache-2.0
"""Paged attention for Gaudi: with whole-context GEMMs.

Owns: prefill through the fused SDPA kernel with an explicit bias; decode in block space, merged per row by a one-hot
matmul. Decode and the parts around the fused kernel are plain torch and are compared on CPU.
Never: int64 indices, integer `where`, an index outside the cache.
Ordering rule: insert, then attend, as on the CPU; the cache must be finite wherever a table points.

Not bitwise independent of the bucket: the fused kernel and the one-hot matmul reduce over the padded context and over
F. Within one bucket a row does not depend on its neighbours' values. Unproved until it has run on a device: the fused
kernel's argument order, its accuracy and its largest bias; that `index_copy_` into the cache stays in place; any speed.
"""

import torch

QUERY_BIAS_BYTES = 2**30  # the fused kernel fails on a bias of 2^31 bytes; queries are cut to stay below this


def reshape_and_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`ReshapeAndCache`."""
    k_cache.index_copy_(0, slot_mapping, key.to(k_cache.dtype))
    v_cache.index_copy_(0, slot_mapping, value.to(v_cache.dtype))


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    scale: float,
    *,
    kernel_block: int,
) -> torch.Tensor:
    """`PagedPrefillAttention`, except its bitwise promise."""
    from vllm_gaudi.device import kernels

    sdpa = kernels().FusedSDPA
    batch, num_queries, heads, _ = q.shape
    key, value = (gather_context(cache, block_table, heads, kernel_block) for cache in (k_cache, v_cache))
    rows = max(1, QUERY_BIAS_BYTES // (batch * key.shape[2] * q.element_size()))
    parts = []
    for start in range(0, num_queries, rows):
        query = q[:, start : start + rows].transpose(1, 2).contiguous()
        bias = visibility_bias(num_computed_tokens + start, query.shape[2], key.shape[2], q.dtype)
        # query, key, value, bias, dropout, causal, scale, softmax mode, recompute, valid lengths, padding side
        parts.append(sdpa.apply(query, key, value, bias, 0.0, False, scale, "fp32", True, None, "right"))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_list: torch.Tensor,
    block_groups: torch.Tensor,
    block_usage: torch.Tensor,
    first_block: torch.Tensor,
    scale: float,
    *,
    kernel_block: int,
) -> torch.Tensor:
    """`PagedDecodeAttention`, except its bitwise promise; first_block is unused.

    Each block's softmax is rescaled to its row's maximum, then a [R, F] one-hot matrix adds the blocks of a row up.
    Empty entries enter that product as selected zeros. Keys and values of all F blocks are gathered and multiplied in
    the cache's dtype: a float32 copy of them would be the largest tensor of a step.
    """
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    entries = block_list.shape[0]
    token = torch.arange(kernel_block, dtype=torch.int32, device=q.device)
    unused = (token >= block_usage[:, None])[:, None, :, None]  # [F, 1, kernel_block, 1]
    key, value = (
        cache.unflatten(0, (-1, kernel_block)).index_select(0, block_list).transpose(1, 2).masked_fill(unused, 0.0)
        for cache in (k_cache, v_cache)
    )  # [F, Hkv, kernel_block, D]
    query = (q.float() * scale).to(key.dtype).index_select(0, block_groups).view(entries, kv_heads, -1, dim)
    lowest = torch.finfo(torch.float32).min
    scores = (query @ key.transpose(-1, -2)).float().masked_fill(unused.transpose(-1, -2), lowest)

    owns = block_groups == torch.arange(rows, dtype=torch.int32, device=q.device)[:, None]  # bool [R, F]
    owns = owns & (block_usage > 0)
    block_top = scores.amax(-1).view(entries, heads)
    row_top = block_top.masked_fill(~owns[:, :, None], lowest).amax(1)  # over [R, F, H]
    shift = row_top.index_select(0, block_groups).view(entries, kv_heads, -1, 1)
    probs = torch.exp(scores - shift).masked_fill(unused.transpose(-1, -2), 0.0)

    one_hot = owns.float()
    total = one_hot @ probs.sum(-1).view(entries, heads)
    weighted = (probs.to(value.dtype) @ value).float()
    acc = (one_hot @ weighted.view(entries, heads * dim)).view(rows, heads, dim)
    empty = ~owns.any(1)[:, None, None]
    return (acc / total.masked_fill(empty[..., 0], 1.0)[..., None]).masked_fill(empty, 0.0).to(q.dtype)


# ----------------------------------------------------------------------------------------------------------------------


def gather_context(cache: torch.Tensor, block_table: torch.Tensor, heads: int, kernel_block: int) -> torch.Tensor:
    """All rows the tables reach, [N, H, M * kernel_block, D] in the cache dtype, kv heads repeated per query head."""
    paged = cache.unflatten(0, (-1, kernel_block))
    rows = paged.index_select(0, block_table.flatten()).view(block_table.shape[0], -1, *cache.shape[1:])
    return rows.transpose(1, 2).repeat_interleave(heads // cache.shape[1], dim=1)


def visibility_bias(num_computed_tokens: torch.Tensor, queries: int, context: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, 1, queries, context]: 0 where key position j <= num_computed_tokens + i, -inf elsewhere."""
    position = torch.arange(context, dtype=torch.int32, device=num_computed_tokens.device)
    query = num_computed_tokens.int()[:, None] + torch.arange(
        queries, dtype=torch.int32, device=num_computed_tokens.device
    )
    bias = torch.zeros(query.shape[0], 1, queries, context, dtype=dtype, device=num_computed_tokens.device)
    return bias.masked_fill(position > query[:, None, :, None], float("-inf"))
