# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, over the first part of each head.

Owns: the contract; `cpu.py` and `hpu.py` are what runs, and vLLM's own layers are the definition.
Never: picks a variant; `vllm_gaudi.ops.registry` does.
Ordering rule: none; a pure function of its arguments.
"""

from typing import Protocol

import torch


class RotaryEmbedding(Protocol):
    """Rotate pair i of each head by the token's angle i.

    x [T, H, D]; cos, sin [T, R / 2] in x.dtype, R <= D even; is_neox: pair i is (i, i + R / 2), otherwise
    (2 i, 2 i + 1). Returns [T, H, D] in x.dtype. Nothing is mutated.
    """

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor: ...
