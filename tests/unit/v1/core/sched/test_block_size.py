# SPDX-License-Identifier: Apache-2.0
"""Block size B and GDN chunk C: one definition for scheduler and worker, read from the KV cache config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi.v1.core.sched.block_size import (
    DEFAULT_GDN_CHUNK,
    attention_block_size,
    gdn_chunk_size,
    is_gdn_group,
)

ATTENTION = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=48, mamba_type=None))
PLAIN = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))
GDN = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=8192, mamba_type="gdn_attention"))


def config(*groups):
    return SimpleNamespace(kv_cache_groups=list(groups))


@pytest.mark.parametrize(
    ("block_size", "chunk"),
    [(16, 16), (32, 32), (48, 16), (64, 64), (96, 32), (128, 64), (640, 64), (784, 16), (896, 64), (1152, 64), (12, 4)],
)
def test_the_chunk_of_known_block_sizes(block_size, chunk):
    assert gdn_chunk_size(block_size) == chunk


@given(st.integers(1, 4096))
def test_the_chunk_divides_the_block_and_the_largest_chunk(block_size):
    chunk = gdn_chunk_size(block_size)
    assert block_size % chunk == 0 == DEFAULT_GDN_CHUNK % chunk
    assert not any(block_size % d == 0 == DEFAULT_GDN_CHUNK % d for d in range(chunk + 1, DEFAULT_GDN_CHUNK + 1))


def test_a_group_with_a_kind_of_mamba_is_a_gdn_group():
    assert is_gdn_group(GDN)
    assert not is_gdn_group(ATTENTION)
    assert not is_gdn_group(PLAIN)


@pytest.mark.parametrize("groups", [(ATTENTION, GDN, GDN), (GDN, GDN, ATTENTION), (ATTENTION,)])
def test_b_is_that_of_the_attention_group_wherever_it_stands(groups):
    assert attention_block_size(config(*groups)) == 48


@pytest.mark.parametrize(("groups", "said"), [((), "0 attention groups"), ((GDN,), "0 attention groups")])
def test_no_attention_group_is_refused(groups, said):
    with pytest.raises(RuntimeError, match=said):
        attention_block_size(config(*groups))


def test_two_attention_groups_are_refused_with_their_sizes():
    with pytest.raises(RuntimeError, match=r"2 attention groups \(blocks of \[48, 32\] tokens\).*exactly one"):
        attention_block_size(config(ATTENTION, GDN, PLAIN))
