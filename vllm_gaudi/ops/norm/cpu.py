# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation in plain torch, with the residual sum in front of it.

Owns: the arithmetic that vLLM's layers have without a kernel: float32 inside, the weight's product in its own dtype.
Never: the `+ 1` of Gemma's weight; the layer adds it, in float32, before it calls.
Ordering rule: sum, then round the sum for the residual stream, then normalise what was not rounded.
"""

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`RMSNorm`."""
    total = x.float()
    summed = None
    if residual is not None:
        total = total + residual.float()
        summed = total.to(x.dtype)
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    return (normed.to(weight.dtype) * weight).to(x.dtype), summed
