# SPDX-License-Identifier: Apache-2.0
"""The KV cache spec of a GDN group and its block manager, put in through vLLM's spec registry.

Owns: which boundaries of a request are published as checkpoints under vLLM's sparse retention.
Never: bytes, slots, or the pool; allocation and hit search are vLLM's own.

Ordering rule: publishing is vLLM's (at scheduling time); this only widens what is published, never before vLLM would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True)
class GDNCheckpointSpec(MambaSpec):
    """vLLM's Mamba spec under a name that the registry maps to our manager."""

    @classmethod
    def of(cls, spec: MambaSpec) -> GDNCheckpointSpec:
        return cls(**{field.name: getattr(spec, field.name) for field in fields(spec) if field.init})


class GDNCheckpointManager(MambaManager):
    """vLLM's manager, which under retention 0 (vLLM's default) also keeps the boundaries that decode reaches.

    vLLM keeps the prompt's last boundary and shared-prefix junctions alone, so the answer of turn N would be computed
    again in turn N + 1. An interval that the user sets, or None (dense), is followed as it is.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._published: list[Any] = []

    @classmethod
    def register(cls) -> None:
        """Map ``GDNCheckpointSpec`` to this manager; vLLM tolerates the same registration again."""
        KVCacheSpecRegistry.register(GDNCheckpointSpec, cls, uniform_type_base_spec=MambaSpec)

    def drain_published(self) -> list[Any]:
        """Hashes of the boundaries published since the last call."""
        published, self._published = self._published, []
        return published

    def cache_blocks(
        self,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        if retention_interval == 0:
            cached = self.num_cached_block.get(request.request_id, 0)
            first = max(cdiv(request.num_prompt_tokens, self.block_size), cached)
            decoded = range(first, num_tokens // self.block_size + 1)
            replay_boundaries = (*replay_boundaries, *(k * self.block_size for k in decoded))
        before = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(
            request, num_tokens, retention_interval=retention_interval, replay_boundaries=replay_boundaries
        )
        blocks = self.req_to_blocks[request.request_id]
        for i in range(before, self.num_cached_block.get(request.request_id, 0)):
            if blocks[i].block_hash is not None:
                self._published.append(request.block_hashes[i])
