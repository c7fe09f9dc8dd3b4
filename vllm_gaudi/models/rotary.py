# SPDX-License-Identifier: Apache-2.0
"""vLLM's rotary embeddings on Gaudi, by the op behind the registry.

Owns: looking each token's angles up and the two classes that stand in for vLLM's: plain and multimodal (three position
axes). Registered on Gaudi only: on a host vLLM's own classes run as they are, bit for bit.
Never: the tables (vLLM computes them) or a scaled variant (Llama 3, YaRN, ...): those have classes of their own, which
keep vLLM's plain torch.

Ordering rule: registered before a model is built.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope

from vllm_gaudi.ops.registry import UsesOps

Rotated = tuple[torch.Tensor, torch.Tensor | None]


@RotaryEmbedding.register_oot
class HPURotaryEmbedding(UsesOps, RotaryEmbedding):
    def forward_oot(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Rotated:
        """``positions`` [T]; ``query`` and ``key`` [T, heads * head_size]; only their rotary dimensions turn."""
        table = self._match_cos_sin_cache_dtype(query).index_select(0, positions.flatten())
        return _rotate(self, query, key, *table.chunk(2, dim=-1))


@MRotaryEmbedding.register_oot
class HPUMRotaryEmbedding(UsesOps, MRotaryEmbedding):
    def forward_oot(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> Rotated:
        """As the plain one; ``positions`` [T], or [3, T] where each angle belongs to one of three axes."""
        table = self._match_cos_sin_cache_dtype(query).index_select(0, positions.flatten())
        cos, sin = table.view(*positions.shape, -1).chunk(2, dim=-1)
        if positions.ndim == 2:
            cos, sin = self._by_axis(cos), self._by_axis(sin)
        return _rotate(self, query, key, cos, sin)

    def _by_axis(self, table: torch.Tensor) -> torch.Tensor:
        """[3, T, R / 2] -> [T, R / 2]: each angle from its own axis."""
        assert self.mrope_section is not None
        if self.mrope_interleaved:
            return apply_interleaved_rope(table, self.mrope_section)
        parts = table.split(self.mrope_section, dim=-1)
        return torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)


def _rotate(layer: Any, query: torch.Tensor, key: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
    rotated = [
        None
        if x is None
        else layer._ops.rotary_embedding(
            x.reshape(cos.shape[0], -1, layer.head_size), cos, sin, layer.is_neox_style
        ).reshape(x.shape)
        for x in (query, key)
    ]
    return rotated[0], rotated[1]  # type: ignore[return-value]
