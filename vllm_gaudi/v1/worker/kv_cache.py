# SPDX-License-Identifier: Apache-2.0
"""The tensors behind the cache: attention pages by position, live GDN state by layer and slot.

Owns: allocation, binding to the layers, the reserved rows, and what it all costs in bytes.
Never: what a step zeroes or moves (``gdn_checkpoint``).

Ordering rule: the reserved rows are zeroed by writing after the last run on padding and before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_gaudi.v1.core.sched.block_size import (
    attention_block_size,
    gdn_chunk_size,
    is_gdn_group,
    kernel_block_size,
)
from vllm_gaudi.v1.worker.gdn_checkpoint.layout import StateShape
from vllm_gaudi.v1.worker.state_slots import NUM_RESERVED_ROWS


@dataclass(frozen=True)
class CacheGeometry:
    """The numbers of a KV cache config that the worker needs. Built once, before any tensor."""

    num_blocks: int
    block_size: int  # B, tokens
    kernel_block: int  # tokens
    attention_group: int
    gdn_groups: tuple[int, ...]
    attention_layers: tuple[str, ...]  # by position
    gdn_layers: tuple[tuple[str, ...], ...]  # per GDN group, by position
    page_bytes: int  # K and V of one block at one position

    @property
    def kernel_blocks_per_block(self) -> int:
        return self.block_size // self.kernel_block

    @property
    def num_kernel_blocks(self) -> int:
        return self.num_blocks * self.kernel_blocks_per_block

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds; the rows after them are the padding kernel block's."""
        return self.num_blocks * self.block_size

    @property
    def padding_block(self) -> int:
        """Kernel block id of the padding block: the last one, which no block of the pool covers."""
        return self.num_kernel_blocks

    @property
    def gdn_chunk(self) -> int:
        """Tokens of a GDN chunk."""
        return gdn_chunk_size(self.block_size)

    @property
    def num_groups(self) -> int:
        return 1 + len(self.gdn_groups)

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.page_bytes * len(self.attention_layers)

    @classmethod
    def from_config(cls, kv_cache_config: Any) -> CacheGeometry:
        """Read vLLM's ``KVCacheConfig``. Raises RuntimeError on groups that the plugin does not support."""
        groups = kv_cache_config.kv_cache_groups
        block_size = attention_block_size(kv_cache_config)
        gdn = [g for g, group in enumerate(groups) if is_gdn_group(group)]
        attention = next(g for g, group in enumerate(groups) if not is_gdn_group(group))
        positions = len(groups[attention].layer_names)
        for g in gdn:
            if len(groups[g].layer_names) > positions:
                raise RuntimeError(
                    f"KV cache group {g} has {len(groups[g].layer_names)} GDN layers but the attention group has only "
                    f"{positions}: their positions do not line up; use a model with at least one attention layer per "
                    "GDN layer of a group"
                )
        spec = groups[attention].kv_cache_spec
        return cls(
            num_blocks=kv_cache_config.num_blocks,
            block_size=block_size,
            kernel_block=kernel_block_size(block_size),
            attention_group=attention,
            gdn_groups=tuple(gdn),
            attention_layers=tuple(groups[attention].layer_names),
            gdn_layers=tuple(tuple(groups[g].layer_names) for g in gdn),
            page_bytes=spec.page_size_bytes,
        )


class KVCaches:
    """One allocation per tensor: K and V for every position, conv and SSM state for every GDN layer.

    k, v: [P] tensors [num_tokens + kernel_block, kv_heads, head], one row per token; conv: [L] tensors [rows,
    kernel - 1, conv_dim]; ssm: [L] tensors [rows, v heads, k dim, v dim], where rows = num_slots + NUM_RESERVED_ROWS +
    num_staging: the staging rows take the states of boundaries that a forward runs over, until they are saved.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        kv_cache_config: Any,
        layers: Mapping[str, torch.nn.Module],
        num_slots: int,
        num_staging: int,
        device: torch.device,
        poison: bool = False,
    ):
        """``poison``: fill with NaN what a step must have zeroed before it reads it (hybrid models only)."""
        self.geometry = geometry
        self.zero_row = num_slots
        self.trash_row = num_slots + 1
        self.first_staging_row = num_slots + NUM_RESERVED_ROWS
        rows = self.first_staging_row + num_staging
        groups = kv_cache_config.kv_cache_groups
        spec = groups[geometry.attention_group].kv_cache_spec
        page_shape = (geometry.num_tokens + geometry.kernel_block, spec.num_kv_heads, spec.head_size)
        self.k = [torch.zeros(page_shape, dtype=spec.dtype, device=device) for _ in geometry.attention_layers]
        self.v = [torch.zeros(page_shape, dtype=spec.dtype, device=device) for _ in geometry.attention_layers]
        for name, k, v in zip(geometry.attention_layers, self.k, self.v, strict=True):
            layers[name].kv_cache = (k, v)  # type: ignore[assignment]
        self.conv_states: list[torch.Tensor] = []
        self.ssm_states: list[torch.Tensor] = []
        for group, names in zip(geometry.gdn_groups, geometry.gdn_layers, strict=True):
            conv_dtype, ssm_dtype = groups[group].kv_cache_spec.dtypes
            for name in names:
                layer: Any = layers[name]
                conv = torch.zeros(
                    (rows, layer.conv_kernel_size - 1, layer.local_conv_dim), dtype=conv_dtype, device=device
                )
                ssm = torch.zeros(
                    (rows, layer.num_local_v_heads, layer.head_k_dim, layer.head_v_dim), dtype=ssm_dtype, device=device
                )
                layer.bind_state(conv, ssm, geometry.gdn_chunk)
                self.conv_states.append(conv)
                self.ssm_states.append(ssm)
        if poison and geometry.gdn_groups:
            for tensor in (*self.k, *self.v, *self.conv_states, *self.ssm_states):
                tensor.fill_(float("nan"))
            self.zero_reserved()

    @property
    def state_shape(self) -> StateShape:
        """Shape of one GDN layer's live state; all layers are alike."""
        conv, ssm = self.conv_states[0], self.ssm_states[0]
        return StateShape(tuple(conv.shape[1:]), conv.element_size(), tuple(ssm.shape[1:]), ssm.element_size())

    @property
    def state_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.conv_states, *self.ssm_states))

    def zero_reserved(self) -> None:
        """Write zeros over what padding reads and writes: null block, padding kernel block, ZERO and TRASH."""
        for tensor in (*self.k, *self.v):
            tensor[: self.geometry.block_size].zero_()
            tensor[self.geometry.num_tokens :].zero_()
        for tensor in (*self.conv_states, *self.ssm_states):
            tensor[self.zero_row :].zero_()
