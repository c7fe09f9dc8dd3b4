# SPDX-License-Identifier: Apache-2.0
"""The attention backend: inserts before it attends, leaves nothing unwritten, refuses what it cannot do. Needs vLLM."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch

from vllm_gaudi import capabilities
from vllm_gaudi.attention.metadata import DecodeAttention, HPUAttentionMetadata, PrefillAttention
from vllm_gaudi.v1.core.sched.block_size import MAX_KERNEL_BLOCK

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it

HEADS, KV_HEADS, HEAD = 4, 2, 8
KERNEL, SPARE = 4, 5


@pytest.fixture(scope="module")
def backend():
    from vllm_gaudi.attention import backend

    return backend


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def longs(*values):
    return torch.tensor(values)


def prefill(batch, query, table, starts, query_lens, places):
    return HPUAttentionMetadata(
        batch=batch,
        query=query,
        kernel_block=KERNEL,
        slot_mapping=longs(*places),
        state_indices_in=longs(*range(batch)),
        state_indices_out=longs(*range(batch)),
        prefill=PrefillAttention(torch.tensor(table, dtype=torch.int32), ints(*starts), ints(*query_lens)),
    )


def decode(batch, places, block_list, block_groups, block_usage, first_block):
    return HPUAttentionMetadata(
        batch=batch,
        query=1,
        kernel_block=KERNEL,
        slot_mapping=longs(*places),
        state_indices_in=longs(*range(batch)),
        state_indices_out=longs(*range(batch)),
        decode=DecodeAttention(ints(*block_list), ints(*block_groups), ints(*block_usage), ints(*first_block)),
    )


def pages():
    shape = ((SPARE + 1) * KERNEL, KV_HEADS, HEAD)
    return torch.zeros(shape), torch.zeros(shape)


def plain_attention(query, keys, values):
    """[heads, head] over [n, kv heads, head], by definition."""
    out = []
    for head in range(HEADS):
        key, value = keys[:, head * KV_HEADS // HEADS], values[:, head * KV_HEADS // HEADS]
        weights = torch.softmax(key.double() @ query[head].double() * 0.5, dim=0)
        out.append(weights @ value.double())
    return torch.stack(out).float()


@pytest.fixture
def run(backend):
    impl = backend.HPUAttentionImpl(HEADS, HEAD, 0.5, KV_HEADS)

    def run(meta, rows, cache):
        generator = torch.Generator().manual_seed(rows)
        query = torch.randn(rows, HEADS, HEAD, generator=generator)
        key, value = (torch.randn(rows, KV_HEADS, HEAD, generator=generator) for _ in range(2))
        output = torch.full((rows, HEADS, HEAD), float("nan"))
        assert impl.forward(None, query, key, value, cache, meta, output) is output
        return query, key, value, output

    return run


class TestForward:
    def test_a_row_of_a_prefill_reads_its_own_chunk_from_the_cache(self, run):
        cache = pages()
        meta = prefill(1, 5, [[3, 1]], [0], [5], [12, 13, 14, 15, 4])
        query, key, value, output = run(meta, 5, cache)
        for row in range(5):
            torch.testing.assert_close(output[row], plain_attention(query[row], key[: row + 1], value[: row + 1]))
        assert torch.equal(cache[0][[12, 13, 14, 15, 4]], key)
        assert torch.equal(cache[1][[12, 13, 14, 15, 4]], value)

    def test_a_row_reads_a_block_that_another_sequence_of_the_forward_fills(self, run):
        """Two requests share a prefix whose block is being computed by the first of them."""
        meta = prefill(2, 4, [[2, SPARE], [2, 3]], [0, 4], [4, 1], [8, 9, 10, 11, 12, 20, 21, 22])
        query, key, value, output = run(meta, 8, pages())
        keys, values = torch.cat((key[:4], key[4:5])), torch.cat((value[:4], value[4:5]))
        torch.testing.assert_close(output[4], plain_attention(query[4], keys, values))

    def test_decodes_read_what_they_insert(self, run):
        cache = pages()
        for part in cache:
            part[KERNEL : 2 * KERNEL] = torch.randn(KERNEL, KV_HEADS, HEAD)
        meta = decode(2, [8, 13], [1, 2, 3, SPARE], [0, 0, 1, 1], [4, 1, 2, 0], [0, 2])
        query, key, value, output = run(meta, 2, cache)
        for row, (blocks, seen) in enumerate((([1, 2], 5), ([3], 2))):
            keys, values = (part.view(-1, KERNEL, KV_HEADS, HEAD)[blocks].flatten(0, 1)[:seen] for part in cache)
            torch.testing.assert_close(output[row], plain_attention(query[row], keys, values))

    @pytest.mark.parametrize("pads", [0, 1, 14])
    def test_rows_behind_the_batch_are_zero(self, run, pads):
        """They go through the layers after this one; what was in the output buffer must not."""
        meta = decode(2, [4, 8], [1, 2], [0, 1], [1, 1], [0, 1])
        cache = pages()
        *_, output = run(meta, 2 + pads, cache)
        assert output[:2].isfinite().all() and output[:2].any()
        assert torch.equal(output[2:], torch.zeros(pads, HEADS, HEAD))
        written = cache[0].view(SPARE + 1, -1).any(1).nonzero().flatten().tolist()
        assert written == [1, 2], "rows behind the batch have no place in the cache"

    def test_keys_and_values_of_all_rows_are_in_the_cache_before_any_row_attends(self, backend):
        impl, log = backend.HPUAttentionImpl(HEADS, HEAD, 0.5, KV_HEADS), []

        def attend(query, *_, kernel_block, num_computed_range=None):
            assert kernel_block == KERNEL
            log.append("attend")
            return query

        impl._ops = SimpleNamespace(
            reshape_and_cache=lambda k_cache, v_cache, key, value, places: log.append(f"insert {len(key)}"),
            paged_prefill_attention=attend,
            paged_decode_attention=attend,
        )
        query, key = torch.zeros(6, HEADS, HEAD), torch.zeros(6, KV_HEADS, HEAD)
        meta = prefill(2, 2, [[1], [2]], [0, 0], [2, 2], [4, 5, 8, 9])
        impl.forward(None, query, key, key, pages(), meta, torch.zeros(6, HEADS, HEAD))
        meta = decode(3, [4, 8, 12], [1, 2, 3], [0, 1, 2], [1, 1, 1], [0, 1, 2])
        impl.forward(None, query, key, key, pages(), meta, torch.zeros(6, HEADS, HEAD))
        assert log == ["insert 4", "attend", "insert 3", "attend"]


class TestBackend:
    def test_its_name_is_one_that_vllm_knows(self, backend):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        assert backend.HPUAttentionBackend.get_name() in AttentionBackendEnum.__members__
        assert backend.HPUAttentionBackend.get_impl_cls() is backend.HPUAttentionImpl

    def test_metadata_is_not_built_here(self, backend):
        with pytest.raises(NotImplementedError, match=r"v1\.worker\.inputs"):
            backend.HPUAttentionBackend.get_builder_cls()

    @pytest.mark.parametrize(("is_hpu", "granule"), [(False, 16), (True, 128)])
    def test_the_granule_of_block_sizes(self, backend, monkeypatch, is_hpu, granule):
        from vllm.v1.attention.backend import MultipleOf

        monkeypatch.setattr(backend.device, "is_hpu", lambda: is_hpu)
        assert capabilities.block_size_granule() == granule
        (size,) = backend.HPUAttentionBackend.get_supported_kernel_block_sizes()
        assert (size.base if isinstance(size, MultipleOf) else size) == granule
        assert backend.HPUAttentionBackend.get_preferred_block_size(16) % granule == 0

    def test_the_default_block_is_the_largest_kernel_block(self, backend):
        """The rooms keep the constant apart: attention never imports ``v1``, which has the kernel block."""
        assert backend.DEFAULT_BLOCK_SIZE == MAX_KERNEL_BLOCK

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"alibi_slopes": [0.5]}, "alibi slopes"),
            ({"sliding_window": 128}, "sliding window"),
            ({"logits_soft_cap": 30.0}, "soft cap"),
            ({"attn_type": "encoder_only"}, "attention of type encoder_only"),
            ({"kv_sharing_target_layer_name": "a0"}, "KV sharing"),
            ({"sinks": 1}, r"arguments \['sinks'\]"),
            ({"alibi_slopes": [0.5], "sliding_window": 128}, "alibi slopes, a sliding window"),
        ],
    )
    def test_what_it_cannot_do_is_refused_when_the_layer_is_built(self, backend, arguments, said):
        with pytest.raises(NotImplementedError, match=said):
            backend.HPUAttentionImpl(HEADS, HEAD, 0.5, KV_HEADS, **arguments)

    def test_without_kv_heads_every_head_has_its_own(self, backend):
        assert backend.HPUAttentionImpl(HEADS, HEAD, 0.5).num_kv_heads == HEADS


def test_metadata_is_built_once():
    meta = decode(1, [4], [1], [0], [1], [0])
    assert meta.num_rows == 1
    with pytest.raises(FrozenInstanceError):
        meta.batch = 2
    assert prefill(2, 3, [[1], [2]], [0, 0], [1, 1], [0] * 6).num_rows == 6
