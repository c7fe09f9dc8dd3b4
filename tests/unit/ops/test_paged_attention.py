# SPDX-License-Identifier: Apache-2.0
"""Paged attention: right against one float64 softmax, and the same bits however a sequence is cut or batched."""

import pytest
import torch

from tests.unit.ops.oracles import NAN, VARIANTS, error, lengths_of
from vllm_gaudi.ops.paged_attention import cpu as paged_attention
from vllm_gaudi.ops.paged_attention import hpu as paged_attention_hpu
from vllm_gaudi.ops.paged_attention.reference import attention
from vllm_gaudi.ops.registry import resolve

prefill_attention = resolve("paged_prefill_attention", "cpu")
SPARE = 40  # number of real kernel blocks, so the id of the spare one
SCALE = 0.2


class Pages:
    """A cache whose sequences lie in scattered blocks. Everything outside them holds `rest`."""

    def __init__(self, kernel_block, kv_heads, dim, lengths, dtype=torch.float32, rest=0.0):
        shape = ((SPARE + 1) * kernel_block, kv_heads, dim)
        self.k_cache, self.v_cache = (torch.full(shape, rest, dtype=dtype) for _ in range(2))
        free = iter(torch.randperm(SPARE).tolist())
        self.kernel_block, self.lengths = kernel_block, lengths
        self.blocks = [[next(free) for _ in range(-(-length // kernel_block))] for length in lengths]
        self.key, self.value = ([torch.randn(length, kv_heads, dim).to(dtype) for length in lengths] for _ in range(2))
        for n, length in enumerate(lengths):
            self.insert(n, length)

    def insert(self, n, length):
        size = self.kernel_block
        slots = torch.tensor([self.blocks[n][t // size] * size + t % size for t in range(length)], dtype=torch.int32)
        resolve("reshape_and_cache", "cpu")(self.k_cache, self.v_cache, self.key[n], self.value[n], slots)

    def tokens_of(self, block):
        return slice(block * self.kernel_block, (block + 1) * self.kernel_block)

    def prefill(self, q, table, starts, **tile):
        return prefill_attention(
            q, self.k_cache, self.v_cache, table, starts, SCALE, kernel_block=self.kernel_block, **tile
        )

    def decode(self, q, flat, variant="cpu", scale=SCALE):
        decode = resolve("paged_decode_attention", variant)
        return decode(q, self.k_cache, self.v_cache, *flat, scale, kernel_block=self.kernel_block)

    def table(self, members, width):
        return torch.tensor([(self.blocks[n] + [SPARE] * width)[:width] for n in members], dtype=torch.int32)

    def flat(self, members, pads=0, pad_row=None):
        """block_list, block_groups, block_usage, first_block of a decode over `members` (None: no blocks)."""
        blocks, rows, lens, first = [], [], [], []
        for row, n in enumerate(members):
            first.append(len(blocks) if n is not None else 0)
            for i, block in enumerate(self.blocks[n] if n is not None else []):
                blocks.append(block)
                rows.append(row)
                lens.append(min(self.kernel_block, self.lengths[n] - i * self.kernel_block))
        blocks += [SPARE] * pads
        rows += [len(members) - 1 if pad_row is None else pad_row] * pads
        lens += [0] * pads
        return tuple(torch.tensor(x, dtype=torch.int32) for x in (blocks, rows, lens, first))


#             kernel_block Hkv H  D   tile
GEOMETRIES = [(16, 1, 1, 16, 16), (16, 2, 6, 32, 128), (128, 1, 4, 16, 128), (32, 2, 2, 8, 16), (16, 1, 3, 24, 48)]
geometries = pytest.mark.parametrize(("kernel_block", "kv_heads", "heads", "dim", "tile"), GEOMETRIES)
geometries_and_threads = pytest.mark.parametrize(
    ("threads", "kernel_block", "kv_heads", "heads", "dim", "tile"),
    [(1, *geometry) for geometry in GEOMETRIES] + [(2, 16, 2, 6, 32, 128)],
    indirect=["threads"],
)


# The HPU variant passes the index through, and CPU index_copy_ takes no int32 one.
@pytest.mark.parametrize(("variant", "index_dtype"), [("cpu", torch.int32), ("cpu", torch.int64), ("hpu", torch.int64)])
def test_insert_writes_its_slots_and_nothing_else(variant, index_dtype):
    k_cache, v_cache = torch.full((20, 2, 3), NAN), torch.full((20, 2, 3), NAN)
    key, value = torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    slots = torch.tensor([6, 0, 15, 16], dtype=index_dtype)  # the last one is padding: block 4 is the spare one
    resolve("reshape_and_cache", variant)(k_cache, v_cache, key, value, slots)
    for rows, new in ((k_cache, key), (v_cache, value)):
        assert torch.equal(rows[slots.long()], new)
        untouched = torch.ones(20, dtype=torch.bool)
        untouched[slots.long()] = False
        assert bool(rows[untouched].isnan().all())


@geometries
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_is_one_causal_softmax(kernel_block, kv_heads, heads, dim, tile, dtype):
    lengths, starts, queries = [1, 70, 33, 128], [0, 3, 32, 62], 70
    pages = Pages(kernel_block, kv_heads, dim, lengths, dtype)
    q = torch.randn(4, queries, heads, dim).to(dtype)
    table = pages.table(range(4), -(-136 // kernel_block))
    out = pages.prefill(q, table, torch.tensor(starts, dtype=torch.int32), tile_tokens=tile)
    assert out.dtype == dtype
    assert bool(out.isfinite().all())
    for n, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        real = length - start
        visible = torch.arange(length) <= torch.arange(start, length)[:, None]
        want = attention(q[n, :real], pages.key[n], pages.value[n], visible, SCALE)
        assert error(out[n, :real], want) < (5e-7 if dtype == torch.float32 else 4e-3)


@geometries_and_threads
def test_prefill_bits_do_not_depend_on_cuts_buckets_or_batch(threads, kernel_block, kv_heads, heads, dim, tile):
    lengths = [150, 97, 12]
    pages = Pages(kernel_block, kv_heads, dim, lengths)
    q = torch.randn(3, 150, heads, dim)

    def run(members, start, stop, width, query_bucket):
        bucket = torch.zeros(len(members), query_bucket, heads, dim)
        for row, n in enumerate(members):
            bucket[row, : stop - start] = q[n, start:stop]
        return pages.prefill(
            bucket, pages.table(members, width), torch.full((len(members),), start, dtype=torch.int32), tile_tokens=tile
        )[:, : stop - start]

    narrow = -(-160 // kernel_block)
    want = run([0], 0, 150, narrow, 150)
    for width in (narrow, narrow + 1, narrow + 9):
        for bucket in (150, 192, 257):
            assert torch.equal(run([0], 0, 150, width, bucket), want)
    for cuts in ([0, 64, 150], [0, 128, 150], [0, 16, 48, 149, 150]):
        parts = [
            run([0], start, stop, -(-stop // kernel_block) + 2, stop - start + 5)
            for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        assert torch.equal(torch.cat(parts, 1), want)
    together = run([2, 0, 1], 0, 150, narrow, 192)
    assert torch.equal(together[1:2], want)
    assert torch.equal(together[:1, :12], run([2], 0, 12, narrow, 12))


@geometries
@pytest.mark.parametrize("starts", [(0, 0), (3, 70), (90, 0)])
def test_steps_that_no_query_sees_are_left_out_without_a_trace(
    kernel_block, kv_heads, heads, dim, tile, starts, monkeypatch
):
    steps, piece = [], paged_attention._piece
    monkeypatch.setattr(paged_attention, "_piece", lambda *args: steps.append(None) or piece(*args))
    pages = Pages(kernel_block, kv_heads, dim, [start + 130 for start in starts])
    q, table = torch.randn(2, 130, heads, dim), pages.table([0, 1], -(-400 // kernel_block))
    want, all_steps = pages.prefill(q, table, lengths_of(*starts), tile_tokens=tile), len(steps)
    for num_computed_range in ((min(starts), max(starts)), (0, max(starts)), (min(starts) // 2, max(starts) + 77)):
        steps.clear()
        got = pages.prefill(q, table, lengths_of(*starts), tile_tokens=tile, num_computed_range=num_computed_range)
        assert torch.equal(got, want)
        assert len(steps) < all_steps


def test_prefill_reads_no_block_outside_its_table():
    pages = Pages(16, 1, 8, [40], rest=NAN)
    for cache in (pages.k_cache, pages.v_cache):
        cache[pages.tokens_of(SPARE)] = 0.0  # the contract: finite wherever the table points
        cache[pages.tokens_of(pages.blocks[0][-1])][8:] = 0.0
    q = torch.randn(1, 40, 2, 8)
    out = pages.prefill(q, pages.table([0], 5), lengths_of(0))
    assert bool(out.isfinite().all())


def test_prefill_lets_nan_in_a_reachable_row_through():
    """The fault the zeroing of new blocks exists for must be visible, not papered over."""
    pages = Pages(16, 1, 8, [40])
    pages.v_cache[pages.tokens_of(pages.blocks[0][-1])][8:] = NAN
    q = torch.randn(1, 40, 2, 8)
    out = pages.prefill(q, pages.table([0], 5), lengths_of(0))
    assert not bool(out.isfinite().all())


@pytest.mark.parametrize("variant", VARIANTS)
@geometries
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_is_one_softmax(variant, kernel_block, kv_heads, heads, dim, tile, dtype):
    lengths = [1, 16, 75, 128, 17]
    pages = Pages(kernel_block, kv_heads, dim, lengths, dtype, rest=NAN)  # behind a length, and in the padding block
    q = torch.randn(5, heads, dim).to(dtype)
    out = pages.decode(q, pages.flat(range(5), pads=3), variant)
    assert out.dtype == dtype
    for n, length in enumerate(lengths):
        visible = torch.ones(1, length, dtype=torch.bool)
        want = attention(q[n : n + 1], pages.key[n], pages.value[n], visible, SCALE)[0]
        # Gaudi's variant multiplies in the cache's dtype: scores and weights are rounded, too.
        rounded = 4e-3 if variant == "cpu" else 1.2e-2
        assert error(out[n], want) < (5e-7 if dtype == torch.float32 else rounded)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pad_row", [0, 1, 3])
@pytest.mark.parametrize("pads", [0, 1, 6])
def test_decode_rows_without_blocks_are_zero_and_pads_disturb_nobody(variant, pads, pad_row):
    pages = Pages(16, 2, 8, [40, 5, 16])
    q = torch.randn(4, 4, 8)
    out = pages.decode(q, pages.flat([0, None, 1, 2], pads, pad_row), variant)
    want = pages.decode(q[[0, 2, 3]], pages.flat([0, 1, 2]), variant)
    assert torch.equal(out[1], torch.zeros(4, 8))
    if variant == "cpu":
        assert torch.equal(out[[0, 2, 3]], want)
    else:
        torch.testing.assert_close(out[[0, 2, 3]], want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_skips_empty_entries_inside_a_row(variant):
    pages = Pages(16, 1, 8, [40], rest=NAN)
    blocks, rows, lens, first = pages.flat([0])
    spare, empty = torch.tensor([SPARE], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    q = torch.randn(1, 2, 8)
    want = pages.decode(q, (blocks, rows, lens, first), variant)
    for at in (0, 1, 3):
        gap = [torch.cat((x[:at], y, x[at:])) for x, y in ((blocks, spare), (rows, empty), (lens, empty))]
        out = pages.decode(q, (*gap, first), variant)
        torch.testing.assert_close(out, want)


def test_decode_with_nothing_but_pads_is_zero():
    pages = Pages(16, 1, 8, [], rest=NAN)
    for variant in VARIANTS:
        out = pages.decode(torch.randn(2, 1, 8), pages.flat([None, None], 3), variant)
        assert torch.equal(out, torch.zeros(2, 1, 8))


@geometries_and_threads
def test_decode_bits_do_not_depend_on_the_other_rows(threads, kernel_block, kv_heads, heads, dim, tile):
    lengths = [131, 16, 75, 1, 140, 47]
    pages = Pages(kernel_block, kv_heads, dim, lengths)
    q = torch.randn(6, heads, dim)
    alone = [pages.decode(q[n : n + 1], pages.flat([n]))[0] for n in range(6)]
    for members in (range(6), [5, 4, 3, 2, 1, 0], [0, 2], [3, 0, 1]):
        for pads in (0, 1, 29):
            flat = pages.flat(members, pads)
            out = pages.decode(q[list(members)], flat)
            for row, n in enumerate(members):
                assert torch.equal(out[row], alone[n])


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_survives_large_scores(variant):
    pages = Pages(16, 1, 8, [40])
    pages.k_cache *= 300
    q = torch.randn(1, 2, 8) * 30
    out = pages.decode(q, pages.flat([0], 1), variant, scale=1.0)
    want = attention(q, pages.key[0] * 300, pages.value[0], torch.ones(1, 40, dtype=torch.bool), 1.0)
    assert error(out, want) < 1e-5


def test_inputs_are_not_written():
    pages = Pages(16, 2, 8, [40, 5])
    q = torch.randn(2, 40, 4, 8)
    before = [x.clone() for x in (q, pages.k_cache, pages.v_cache)]
    pages.prefill(q, pages.table([0, 1], 3), lengths_of(0, 0))
    pages.decode(q[:, 0], pages.flat([0, 1]))
    assert all(torch.equal(x, y) for x, y in zip((q, pages.k_cache, pages.v_cache), before, strict=True))


def test_no_unwritten_scratch_is_read(poisoned_empty):
    pages = Pages(16, 2, 8, [40, 5])
    q = torch.randn(2, 40, 4, 8)
    out = pages.prefill(q, pages.table([0, 1], 3), lengths_of(0, 0))
    assert bool(out.isfinite().all())
    out = pages.decode(q[:, 0], pages.flat([0, 1], 2))
    assert bool(out.isfinite().all())


@geometries
def test_what_the_hpu_prefill_feeds_its_kernel(kernel_block, kv_heads, heads, dim, tile):
    """torch's own SDPA over the HPU variant's gathered context and bias agrees with the CPU variant."""
    pages = Pages(kernel_block, kv_heads, dim, [90, 40])
    q, starts = torch.randn(2, 40, heads, dim), lengths_of(50, 0)
    table = pages.table([0, 1], -(-96 // kernel_block))
    key, value = (
        paged_attention_hpu.gather_context(c, table, heads, kernel_block) for c in (pages.k_cache, pages.v_cache)
    )
    bias = paged_attention_hpu.visibility_bias(starts, 40, key.shape[2], torch.float32)
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), key, value, bias, scale=SCALE)
    want = pages.prefill(q, table, starts, tile_tokens=tile)
    torch.testing.assert_close(out.transpose(1, 2), want)
