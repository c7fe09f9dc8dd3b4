# SPDX-License-Identifier: Apache-2.0
"""vLLM's rotary embeddings, by the op of the registry.

Owns: looking each token's angles up, which position axis each angle belongs to, and the two classes that stand in for
vLLM's: plain and multimodal (three position axes).
Never: the tables (vLLM computes them) or a scaled variant (Llama 3, YaRN, ...): those have classes of their own, which
keep vLLM's plain torch.

Ordering rule: registered before a model is built.

Registered on a host too, with the bits of vLLM's own classes: vLLM works the axes out at every call, in int64, and so a
host would run other operators than a Gaudi may be asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding

from vllm_gaudi.ops.registry import OpsMixin

Rotated = tuple[torch.Tensor, torch.Tensor | None]


@RotaryEmbedding.register_oot
class HPURotaryEmbedding(OpsMixin, RotaryEmbedding):
    def forward_oot(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Rotated:
        """``positions`` [T]; ``query`` and ``key`` [T, heads * head_size]; only their rotary dimensions turn."""
        table = self._match_cos_sin_cache_dtype(query).index_select(0, positions.flatten())
        return _rotate(self, query, key, *table.chunk(2, dim=-1))


@MRotaryEmbedding.register_oot
class HPUMRotaryEmbedding(OpsMixin, MRotaryEmbedding):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.mrope_section:
            # A row of the table is all cosines, then all sines.
            axes = torch.tensor(2 * axes_of_angles(self.mrope_section, self.mrope_interleaved))
            self.register_buffer("_is_second_axis", axes == 1, persistent=False)
            self.register_buffer("_is_third_axis", axes == 2, persistent=False)

    def forward_oot(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> Rotated:
        """As the plain one; ``positions`` [T], or [3, T] where each angle belongs to one of three axes."""
        table = self._match_cos_sin_cache_dtype(query).index_select(0, positions.flatten())
        if positions.ndim == 2:
            first, second, third = table.view(*positions.shape, -1).unbind(0)
            table = torch.where(self._is_second_axis, second, first)
            table = torch.where(self._is_third_axis, third, table)
        return _rotate(self, query, key, *table.chunk(2, dim=-1))


def axes_of_angles(section: Sequence[int], is_interleaved: bool) -> list[int]:
    """The position axis, 0..2, of each angle; ``section[axis]`` angles belong to ``axis``.

    Axis after axis, or interleaved: 0, 1, 2, 0, 1, 2, ..., where the first axis takes the turns of one that has had all
    of its own.
    """
    if is_interleaved:
        turns = [angle % 3 for angle in range(sum(section))]
        return [axis if angle < 3 * section[axis] else 0 for angle, axis in enumerate(turns)]
    return [axis for axis, num_angles in enumerate(section) for _ in range(num_angles)]


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
