# SPDX-License-Identifier: Apache-2.0
"""vLLM's RMS norms on Gaudi, by the op of the registry.

Owns: the two classes that stand in for vLLM's, with its weights. Registered on Gaudi only: on a host vLLM's own classes
run as they are, bit for bit.
Never: the gated norm of a GDN layer, or a norm without a weight or over a part of its input: those stay vLLM's.

Ordering rule: registered before a model is built.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from vllm_gaudi.ops.registry import OpsMixin

Normed: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@RMSNorm.register_oot
class HPURMSNorm(OpsMixin, RMSNorm):
    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """The norm of ``x`` [..., hidden], or of ``x + residual`` together with that sum."""
        if not self.has_weight or self.variance_size_override is not None:
            return self.forward_native(x, residual)
        return _normed(self, x, self.weight, residual)


@GemmaRMSNorm.register_oot
class HPUGemmaRMSNorm(OpsMixin, GemmaRMSNorm):
    """Its weight is an offset from one, added in float32."""

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """The norm of ``x`` [..., hidden], or of ``x + residual`` together with that sum."""
        return _normed(self, x, self.weight.float() + 1.0, residual)


def _normed(layer: Any, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> Normed:
    normed, summed = layer._ops.rms_norm(x, weight, layer.variance_epsilon, residual)
    return normed if summed is None else (normed, summed)
