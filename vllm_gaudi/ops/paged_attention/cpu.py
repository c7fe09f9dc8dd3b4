# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged K/V cache in plain torch: insert, prefill, decode.

Owns: the float32 online softmax (Milakov & Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691) over
pieces of fixed size in a fixed order. A cache is [(num_kernel_blocks + 1) * kernel_block, Hkv, D], one row per token.
Its LAST kernel block is the spare one: pad tokens write there and padding table entries point there, so every index is
a real row. Rows stand flat because they are written as rows: Gaudi's compiler keeps a write in place only when what is
written is the tensor itself and not a view of it. Kernel blocks are read through views, which is free. Never: zeroes a
page. Prefill needs finite numbers in every row a block table reaches, padding block included, because a masked key
still multiplies (0 x NaN): new blocks are zeroed before the step. Decode knows each block's length and selects what
lies behind it away. Ordering rule: insert, then attend: the tokens of the running chunk are read back from the cache.

Bitwise rules (design.md section 7): query rows are cut into tiles of QUERY_TILE, context into tiles of `tile_tokens`
(prefill) or kernel blocks (decode); merging a piece without a visible key returns the other side by selection.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

QUERY_TILE = 64  # query rows per GEMM and head
ENTRIES_AT_ONCE = 32  # kernel blocks whose float32 copies are alive together in decode; changes no bit
_NEVER = float("-inf")


def reshape_and_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`ReshapeAndCache`."""
    index = slot_mapping.long()  # CPU index_copy_ takes no int32 index
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.index_copy_(0, index, new.to(cache.dtype))


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    scale: float,
    *,
    kernel_block: int,
    tile_tokens: int = 256,
    num_computed_range: tuple[int, int] | None = None,
) -> torch.Tensor:
    """`PagedPrefillAttention`. A query's bits depend neither on N, Q and M, nor on how the sequence was split.

    tile_tokens         context tokens per online-softmax step; equal in all calls that must agree bitwise
    num_computed_range  the least and the largest of num_computed_tokens; with it, steps that no query sees are left
                        out, and those that every query sees have no mask, which changes no bit. None: not known
    """
    batch, num_queries, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    rows_per_gemm = heads // kv_heads * QUERY_TILE
    num_tiles = -(-num_queries // QUERY_TILE)
    table_tokens = block_table.shape[1] * kernel_block

    # One GEMM per (sequence, kv head) and query tile, its rows ordered (query, query head of the group).
    query = F.pad(q, (0, 0, 0, 0, 0, num_tiles * QUERY_TILE - num_queries)).float() * scale
    query = query.view(batch, num_tiles, QUERY_TILE, kv_heads, -1, dim).permute(1, 0, 3, 2, 4, 5)
    query = query.reshape(num_tiles, batch * kv_heads, rows_per_gemm, dim)
    offset = torch.arange(num_tiles * QUERY_TILE, dtype=torch.int32, device=q.device)
    sees = (num_computed_tokens.int()[:, None] + offset).view(batch, num_tiles, QUERY_TILE).transpose(0, 1)
    sees = sees[:, :, None, :, None].expand(-1, -1, kv_heads, -1, heads // kv_heads)
    sees = sees.reshape(num_tiles, batch * kv_heads, rows_per_gemm, 1)

    first, last = num_computed_range or (-1 - tile_tokens * num_tiles, table_tokens)
    running: list[_Softmax | None] = [None] * num_tiles
    for start in range(0, table_tokens, tile_tokens):
        if start >= last + num_tiles * QUERY_TILE:
            break
        position = torch.arange(start, start + tile_tokens, dtype=torch.int32, device=q.device)
        key, value = (_gather_step(c, block_table, position, tile_tokens, kernel_block) for c in (k_cache, v_cache))
        # The first query that may see this far stands in the first of these.
        for tile in range(max(0, start - last) // QUERY_TILE, num_tiles):
            scores = torch.bmm(query[tile], key.transpose(1, 2))
            is_seen_by_all = start + tile_tokens - 1 <= first + tile * QUERY_TILE
            if not is_seen_by_all:
                scores.masked_fill_(position > sees[tile], _NEVER)
            piece = _piece(scores, value)
            so_far = running[tile]
            # Position 0 is visible to every query, so the first tile always leaves a finite maximum.
            if so_far is not None:
                piece = _merge(so_far, piece, None if is_seen_by_all else start <= sees[tile])
            running[tile] = piece

    done = torch.stack([state.acc / state.total for state in running if state is not None])
    done = done.view(num_tiles, batch, kv_heads, QUERY_TILE, -1, dim).permute(1, 0, 3, 2, 4, 5)
    return done.reshape(batch, -1, heads, dim)[:, :num_queries].to(q.dtype).contiguous()


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
    """`PagedDecodeAttention`. A row's bits depend neither on the other rows nor on R and F."""
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    num_entries = block_list.shape[0]
    query = (q.float() * scale).index_select(0, block_groups).view(num_entries, kv_heads, -1, dim)
    unused = torch.arange(kernel_block, dtype=block_usage.dtype, device=q.device) >= block_usage[:, None]

    pieces = []
    for start in range(0, num_entries, ENTRIES_AT_ONCE):
        some = slice(start, start + ENTRIES_AT_ONCE)
        hidden = unused[some]
        # A key behind the length spoils its own score alone, which is hidden; a value would spoil them all.
        key = _gather_blocks(k_cache, block_list[some], kernel_block)
        value = _gather_blocks(v_cache, block_list[some], kernel_block).masked_fill_(hidden[:, :, None, None], 0.0)
        # Head by head the gathered blocks are read where they lie.
        scores = [torch.bmm(query[some, h], key[:, :, h].transpose(1, 2)) for h in range(kv_heads)]
        whole = [_piece(s.masked_fill_(hidden[:, None], _NEVER), value[:, :, h]) for h, s in enumerate(scores)]
        pieces.append([torch.stack(part, dim=1) for part in zip(*whole, strict=True)])
    top, total, acc = (torch.cat([p[i] for p in pieces]).view(num_entries, heads, -1) for i in range(3))
    merged = _Softmax(top, total, acc)

    live = block_usage > 0
    entry = torch.arange(num_entries, dtype=torch.int32, device=q.device)
    step = 1
    while step < num_entries:
        same_row = (block_groups == block_groups.roll(-step)) & (entry < num_entries - step)
        joined = same_row & live.roll(-step)
        merged = _merge(merged, _Softmax(*(x.roll(-step, 0) for x in merged)), joined[:, None, None])
        live = live | joined
        step *= 2

    row = torch.arange(rows, dtype=block_groups.dtype, device=q.device)
    own = (block_groups.index_select(0, first_block) == row) & live.index_select(0, first_block)
    out = merged.acc.index_select(0, first_block) / merged.total.index_select(0, first_block)
    return out.masked_fill_(~own[:, None, None], 0.0).to(q.dtype)


# ----------------------------------------------------------------------------------------------------------------------


class _Softmax(NamedTuple):
    """A softmax over some of the keys, not yet divided by its sum. Leading dims are those of the GEMM's rows."""

    top: torch.Tensor  # [..., 1] float32 maximum score, -inf when no key was visible
    total: torch.Tensor  # [..., 1] float32 sum of exp(score - top)
    acc: torch.Tensor  # [..., D] float32 sum of exp(score - top) * value


def _piece(scores: torch.Tensor, value: torch.Tensor) -> _Softmax:
    """scores [B, rows, L] float32, hidden keys at -inf, OVERWRITTEN; value [B, L, D] float32."""
    top = scores.amax(-1, keepdim=True)
    probs = scores.sub_(top.clamp(min=torch.finfo(torch.float32).min)).exp_()  # a row without keys: all zeros, not NaN
    return _Softmax(top, probs.sum(-1, keepdim=True), torch.bmm(probs, value))


def _merge(one: _Softmax, other: _Softmax, where: torch.Tensor | None) -> _Softmax:
    """The softmax over both sets of keys where `where` (bool, broadcast) holds, `one` bit for bit elsewhere.

    None: it holds everywhere.
    """
    top = torch.maximum(one.top, other.top)
    shrink, grow = torch.exp(one.top - top), torch.exp(other.top - top)  # NaN only where both are empty: not selected
    if where is None:
        return _Softmax(top, one.total * shrink + other.total * grow, one.acc * shrink + other.acc * grow)
    return _Softmax(
        torch.where(where, top, one.top),
        torch.where(where, one.total * shrink + other.total * grow, one.total),
        torch.where(where, one.acc * shrink + other.acc * grow, one.acc),
    )


def _gather_step(
    cache: torch.Tensor, block_table: torch.Tensor, position: torch.Tensor, num_tokens: int, kernel_block: int
) -> torch.Tensor:
    """Cache rows at the table positions [L] (tokens, one after the other) as float32 [N * Hkv, L, D].

    Positions behind the table read some row of its last block; only padding query sees that far.
    """
    batch, num_blocks = block_table.shape
    if num_tokens % kernel_block == 0:  # whole blocks
        entry = (position[::kernel_block] // kernel_block).clamp(max=num_blocks - 1)
        rows = _gather_blocks(cache, block_table.index_select(1, entry).flatten(), kernel_block)
    else:
        position = position.clamp(max=num_blocks * kernel_block - 1)
        slots = block_table.index_select(1, position // kernel_block) * kernel_block + position % kernel_block
        rows = cache.index_select(0, slots.flatten()).to(torch.float32)
    return rows.view(batch, num_tokens, *cache.shape[1:]).transpose(1, 2).flatten(0, 1).contiguous()


def _gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, kernel_block: int) -> torch.Tensor:
    """A copy of whole kernel blocks, float32 [F, kernel_block, Hkv, D]."""
    return cache.unflatten(0, (-1, kernel_block)).index_select(0, blocks).to(torch.float32)
