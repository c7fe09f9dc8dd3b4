# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation, with the residual sum in front of it.

Owns: the contract; `cpu.py` and `hpu.py` are what runs, and vLLM's own layers are the definition.
Never: picks a variant; `vllm_gaudi.ops.registry` does.
Ordering rule: none; a pure function of its arguments.
"""

from typing import Protocol

import torch


class RMSNorm(Protocol):
    """y = s / sqrt(mean(s^2) + epsilon) * weight over the last dimension, s = x or x + residual.

    x [..., H] any float dtype; weight [H], float32 or x's dtype; residual like x. Returns (y in x.dtype, s in x.dtype,
    or None where there is no residual). Nothing is mutated.
    """

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
