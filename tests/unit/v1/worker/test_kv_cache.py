# SPDX-License-Identifier: Apache-2.0
"""Geometry from literal groups, and tensors that are zeroed by writing: NaN goes, and nothing else is touched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_gaudi.v1.core.sched.block_size import MAX_KERNEL_BLOCK, kernel_block_size
from vllm_gaudi.v1.worker.kv_cache import CacheGeometry, KVCaches
from vllm_gaudi.v1.worker.state_slots import NUM_RESERVED_ROWS

NUM_SLOTS = 3
NUM_STAGING = 2
CONV = (3, 10)  # kernel - 1, conv_dim
SSM = (2, 4, 5)  # v heads, k dim, v dim


def attention_group(*names, block_size=256, dtype=torch.bfloat16):
    spec = SimpleNamespace(block_size=block_size, num_kv_heads=2, head_size=8, dtype=dtype, page_size_bytes=16384)
    return SimpleNamespace(layer_names=list(names), kv_cache_spec=spec)


def gdn_group(*names, dtypes=(torch.bfloat16, torch.float32)):
    spec = SimpleNamespace(block_size=512, mamba_type="gdn_attention", shapes=(CONV, SSM), dtypes=dtypes)
    return SimpleNamespace(layer_names=list(names), kv_cache_spec=spec)


def config(*groups, num_blocks=5):
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=list(groups))


HYBRID = config(gdn_group("g0", "g4"), attention_group("a3", "a7"), gdn_group("g1", "g5"), gdn_group("g2"))
PLAIN = config(attention_group("a0", "a1", "a2", block_size=16, dtype=torch.float32), num_blocks=7)


class FakeLayer:
    """What ``KVCaches`` asks a layer for, and what it binds to it."""

    conv_kernel_size = CONV[0] + 1
    local_conv_dim = CONV[1]
    num_local_v_heads, head_k_dim, head_v_dim = SSM
    kv_cache = None

    def bind_state(self, conv, ssm, chunk_size):
        self.state, self.chunk_size = (conv, ssm), chunk_size


def build(kv_config=HYBRID, poison=True):
    layers = {name: FakeLayer() for group in kv_config.kv_cache_groups for name in group.layer_names}
    geometry = CacheGeometry.from_config(kv_config)
    return KVCaches(geometry, kv_config, layers, NUM_SLOTS, NUM_STAGING, torch.device("cpu"), poison), layers


def tensors_of(caches):
    return [*caches.k, *caches.v, *caches.conv_states, *caches.ssm_states]


class TestGeometry:
    def test_of_a_hybrid(self):
        geometry = CacheGeometry.from_config(HYBRID)
        assert (geometry.num_blocks, geometry.block_size, geometry.kernel_block) == (5, 256, 128)
        assert (geometry.attention_group, geometry.gdn_groups) == (1, (0, 2, 3))
        assert geometry.attention_layers == ("a3", "a7")
        assert geometry.gdn_layers == (("g0", "g4"), ("g1", "g5"), ("g2",))
        assert geometry.kernel_blocks_per_block == 2
        assert geometry.num_kernel_blocks == 10
        assert geometry.gdn_chunk == 64
        assert geometry.num_groups == 4
        assert geometry.pool_bytes == 5 * 16384 * 2

    def test_of_plain_attention(self):
        geometry = CacheGeometry.from_config(PLAIN)
        assert (geometry.attention_group, geometry.gdn_groups, geometry.gdn_layers) == (0, (), ())
        assert (geometry.num_groups, geometry.kernel_block, geometry.num_kernel_blocks) == (1, 16, 7)

    @pytest.mark.parametrize("kv_config", [HYBRID, PLAIN])
    def test_the_spare_block_is_behind_every_block_of_the_pool(self, kv_config):
        geometry = CacheGeometry.from_config(kv_config)
        last = (geometry.num_blocks - 1) * geometry.kernel_blocks_per_block + geometry.kernel_blocks_per_block - 1
        assert geometry.padding_block == last + 1

    @pytest.mark.parametrize(
        ("groups", "said"),
        [
            ((), "0 attention groups"),
            ((gdn_group("g0"),), "0 attention groups"),
            ((attention_group("a0"), attention_group("a1")), "2 attention groups"),
            (
                (attention_group("a0"), gdn_group("g0"), gdn_group("g1", "g2")),
                "group 2 has 2 GDN layers but the attention group has only 1",
            ),
        ],
    )
    def test_groups_that_do_not_fit_are_refused(self, groups, said):
        with pytest.raises(RuntimeError, match=said):
            CacheGeometry.from_config(config(*groups))

    @pytest.mark.parametrize(
        ("block_size", "kernel_block"),
        [(16, 16), (32, 32), (48, 16), (64, 64), (96, 32), (128, 128), (192, 64), (256, 128), (640, 128), (896, 128)],
    )
    def test_the_kernel_block_divides_block_and_largest_kernel_block(self, block_size, kernel_block):
        assert kernel_block_size(block_size) == kernel_block
        assert block_size % kernel_block == 0 == MAX_KERNEL_BLOCK % kernel_block


class TestTensors:
    def test_shapes_and_dtypes(self):
        caches, _ = build()
        for page in (*caches.k, *caches.v):
            assert (tuple(page.shape), page.dtype) == ((11 * 128, 2, 8), torch.bfloat16)
        rows = NUM_SLOTS + NUM_RESERVED_ROWS + NUM_STAGING
        assert [(tuple(t.shape), t.dtype) for t in caches.conv_states] == [((rows, *CONV), torch.bfloat16)] * 5
        assert [(tuple(t.shape), t.dtype) for t in caches.ssm_states] == [((rows, *SSM), torch.float32)] * 5
        assert (len(caches.k), len(caches.v)) == (2, 2)
        assert (caches.zero_row, caches.trash_row) == (NUM_SLOTS, NUM_SLOTS + 1)
        assert caches.first_staging_row == NUM_SLOTS + 2
        assert caches.state_bytes == 5 * (30 * 2 + 40 * 4) * rows

    def test_every_tensor_is_an_allocation_of_its_own(self):
        """Slices of one buffer are bound to the wrong place on a Gaudi."""
        caches, _ = build()
        tensors = tensors_of(caches)
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
        assert all(tensor.storage_offset() == 0 and tensor.is_contiguous() for tensor in tensors)
        assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() for tensor in tensors)

    def test_each_layer_is_bound_to_its_own_tensors(self):
        caches, layers = build()
        for position, name in enumerate(("a3", "a7")):
            assert layers[name].kv_cache[0] is caches.k[position]
            assert layers[name].kv_cache[1] is caches.v[position]
        for index, name in enumerate(("g0", "g4", "g1", "g5", "g2")):
            assert layers[name].state[0] is caches.conv_states[index]
            assert layers[name].state[1] is caches.ssm_states[index]
            assert layers[name].chunk_size == 64

    def test_poison_fills_everything_but_what_pads_touch(self):
        caches, _ = build()
        for tensor in (*caches.k, *caches.v):
            is_zero = ~tensor.view(11, -1).isnan().any(1)
            assert is_zero.nonzero().flatten().tolist() == [0, 1, 10]  # the null block and the padding kernel block
            kernel_blocks = tensor.view(11, -1)
            assert kernel_blocks[~is_zero].isnan().all() and not kernel_blocks[is_zero].any()
        for tensor in (*caches.conv_states, *caches.ssm_states):
            assert tensor[:NUM_SLOTS].isnan().all()
            assert not tensor[NUM_SLOTS:].any()

    @pytest.mark.parametrize(("kv_config", "poison"), [(HYBRID, False), (PLAIN, True), (PLAIN, False)])
    def test_without_poison_and_on_plain_attention_everything_starts_as_zero(self, kv_config, poison):
        caches, _ = build(kv_config, poison)
        assert not any(tensor.any() for tensor in tensors_of(caches))

    def test_reserved_rows_are_zeroed_in_place(self):
        caches, layers = build()
        for tensor in tensors_of(caches):
            tensor.fill_(float("inf"))
        pointers = [tensor.data_ptr() for tensor in tensors_of(caches)]
        caches.zero_reserved()
        assert [tensor.data_ptr() for tensor in tensors_of(caches)] == pointers
        for tensor in (*caches.k, *caches.v):
            assert tensor.view(11, -1).isinf().all(1).nonzero().flatten().tolist() == list(range(2, 10))
        for tensor in (*caches.conv_states, *caches.ssm_states):
            assert tensor.flatten(1).isinf().all(1).nonzero().flatten().tolist() == [0, 1, 2]
        assert not layers["a3"].kv_cache[0][:256].any()
