# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged K/V cache: insert, prefill, decode.

Owns: the contract. A cache is [(num_kernel_blocks + 1) * kernel_block, Hkv, D], one row per token. Its LAST kernel
block is the spare one: padding tokens write there and padding table entries point there, so every index is a real row.
Rows are flat because they are written as rows: Gaudi's compiler keeps a write in place only when what is written is the
tensor itself and not a view of it. Kernel blocks are read through views, which is free. `reference.py` is the
definition; `cpu.py` and `hpu.py` are what runs.
Never: picks a variant; `vllm_gaudi.ops.registry` does. Zeroes a page: prefill needs finite numbers in every row that a
block table reaches, padding block included, because a masked key still multiplies (0 x NaN); new blocks are zeroed
before the step. Ordering rule: insert, then attend: the tokens of the running chunk are read back from the cache.
"""

from typing import Protocol

import torch


class ReshapeAndCache(Protocol):
    """Write T tokens into the cache, in place.

    k_cache, v_cache  [(num_kernel_blocks + 1) * kernel_block, Hkv, D]: MUTATED at the given slots only
    key, value        [T, Hkv, D], cast to the cache dtype
    slot_mapping      [T] int32 or int64, tokens: kernel block * kernel_block + offset; padding lies in the padding
                      block, live slots are distinct

    Raises RuntimeError (torch) for a slot outside the cache.
    """

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None: ...


class PagedPrefillAttention(Protocol):
    """Causal attention of a chunk of queries over context and chunk, both read from the cache.

    q            [N, Q, H, D]  H a multiple of Hkv; query head h reads kv head h // (H // Hkv)
    caches       see the module docstring; only read, finite wherever the table points
    block_table  [N, M] int32  kernel block ids by position, padding = the padding block
    num_computed_tokens  [N] int32  position (tokens) of q[:, 0], >= 0; query i sees key position j iff j is at most
                 num_computed_tokens + i
    scale        factor on the scores
    kernel_block tokens of a kernel block

    Returns [N, Q, H, D] in q.dtype; rows of padding queries are finite garbage. Nothing is mutated. A query's bits
    depend neither on N, Q and M, nor on how the sequence was cut.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        scale: float,
        *,
        kernel_block: int,
    ) -> torch.Tensor: ...


class PagedDecodeAttention(Protocol):
    """One query per row over a flat list of kernel blocks; the token itself is already in the cache.

    q           [R, H, D]  H a multiple of Hkv
    caches      see the module docstring; only read; tokens after a block's length may hold anything, also NaN
    block_list  [F] int32  kernel block ids; the entries of one row are contiguous and in position order
    block_groups  [F] int32  owning row of each entry, in 0..R-1
    block_usage  [F] int32  valid tokens of each entry, 0..kernel_block
    first_block   [R] int32  index of each row's first entry, in 0..F-1
    scale       factor on the scores
    kernel_block  tokens of a kernel block

    Padding: block_list = the padding block, block_usage = 0, block_groups = any row in range (R - 1 by convention),
    behind all live entries. An empty entry changes nothing, by selection, whichever row it names. A row without blocks
    may name any entry in first_block (0 by convention): unless that entry is live and its own, the row's result is
    zeros.

    Returns [R, H, D] in q.dtype. Nothing is mutated. Each entry gives (maximum, sum, weighted values); then log2(F)
    exponential_buckets steps merge entry i with entry i + 2^s of the same row. So the order of merging depends on the
    offset inside the row alone, and a row's bits depend neither on the other rows nor on R and F.
    """

    def __call__(
        self,
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
    ) -> torch.Tensor: ...
