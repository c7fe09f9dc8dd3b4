# SPDX-License-Identifier: Apache-2.0
"""Block size B and GDN chunk C, read from the KV cache config. Never torch, never the worker: another process.

Owns: the two numbers that scheduler and worker must agree on, and the kernel block that follows from B.
Never: ``cache_config.block_size``, which vLLM re-derives on the live config after start-up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

DEFAULT_GDN_CHUNK = 64
"""Tokens of a GDN chunk where the block size allows it."""

MAX_KERNEL_BLOCK = 128
"""Most tokens of a kernel block; Gaudi's only size."""


def gdn_chunk_size(block_size: int) -> int:
    """Tokens of a GDN chunk: the largest divisor of ``block_size`` that also divides ``DEFAULT_GDN_CHUNK``."""
    return math.gcd(block_size, DEFAULT_GDN_CHUNK)


def kernel_block_size(block_size: int) -> int:
    """Tokens of a kernel block: the largest divisor of ``block_size`` that divides ``MAX_KERNEL_BLOCK``."""
    return gdn_chunk_size(block_size) if block_size % MAX_KERNEL_BLOCK else MAX_KERNEL_BLOCK


def is_gdn_group(group: KVCacheGroupSpec) -> bool:
    """Whether a KV cache group holds recurrent state (its spec names a kind of Mamba) rather than keys and values."""
    return getattr(group.kv_cache_spec, "mamba_type", None) is not None


def attention_block_size(kv_cache_config: KVCacheConfig) -> int:
    """B: tokens per block of the attention group. Raises RuntimeError unless there is exactly one attention group."""
    sizes = [g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups if not is_gdn_group(g)]
    if len(sizes) != 1:
        raise RuntimeError(
            f"the KV cache config has {len(sizes)} attention groups (blocks of {sizes} tokens) and the plugin supports "
            "exactly one; use a model whose attention layers are all alike"
        )
    return sizes[0]


def check_groups(kv_cache_config: KVCacheConfig) -> int:
    """B, where GDN blocks are cached: every group must have blocks of it.

    Raises RuntimeError on groups of different block sizes and on vLLM's opt-in Mamba features that resume mid-block.
    """
    block_size = attention_block_size(kv_cache_config)
    for g, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if spec.block_size != block_size:
            raise RuntimeError(
                f"KV cache group {g} has blocks of {spec.block_size} tokens and the attention group of {block_size}: a "
                "checkpoint needs one block size for all; remove --mamba-block-size"
            )
        if is_gdn_group(group) and spec.num_prefill_checkpoint_blocks > 0:
            raise RuntimeError(
                f"KV cache group {g} reserves {spec.num_prefill_checkpoint_blocks} prefill checkpoint blocks, which "
                "resume off a boundary; use a model whose GDN layers ask for none, or --no-enable-prefix-caching"
            )
        if is_gdn_group(group) and spec.num_speculative_blocks > 0:
            raise RuntimeError(
                f"KV cache group {g} reserves {spec.num_speculative_blocks} speculative blocks; remove "
                "--speculative-config"
            )
    return block_size


def checkpoint_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one boundary's checkpoint on one rank: the unpadded state of every GDN layer."""
    return sum(
        len(group.layer_names) * math.prod(shape) * dtype.itemsize
        for group in kv_cache_config.kv_cache_groups
        if is_gdn_group(group)
        for shape, dtype in zip(group.kv_cache_spec.shapes, group.kv_cache_spec.dtypes, strict=True)
    )
