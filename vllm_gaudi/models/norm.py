# SPDX-License-Identifier: Apache-2.0
"""vLLM's RMS norms on Gaudi, by the op behind the registry.

Owns: the two classes that stand in for vLLM's, with its weights. Registered on Gaudi only: on a host vLLM's own classes
run as they are, bit for bit.
Never: the gated norm of a GDN layer, or a norm without a weight or over a part of its input: those stay vLLM's.

Ordering rule: registered before a model is built.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from vllm_gaudi.ops.registry import load_ops


@RMSNorm.register_oot
class HPURMSNorm(RMSNorm):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ops = load_ops()

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``x`` [..., hidden], or of ``x + residual`` together with that sum."""
        if not self.has_weight or self.variance_size_override is not None:
            return self.forward_native(x, residual)
        normed, summed = self._ops.rms_norm(x, self.weight, self.variance_epsilon, residual)
        return normed if summed is None else (normed, summed)


@GemmaRMSNorm.register_oot
class HPUGemmaRMSNorm(GemmaRMSNorm):
    """Its weight is an offset from one, added in float32."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ops = load_ops()

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``x`` [..., hidden], or of ``x + residual`` together with that sum."""
        normed, summed = self._ops.rms_norm(x, self.weight.float() + 1.0, self.variance_epsilon, residual)
        return normed if summed is None else (normed, summed)
