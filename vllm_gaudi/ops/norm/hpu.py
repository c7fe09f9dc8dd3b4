# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation for Gaudi: through the bridge's fused kernel.

Owns: one call of `FusedRMSNorm`, which takes input and weight of one dtype.
Never: rounds a float32 weight to the input's dtype: Gemma's 1 + w would lose what training put into w.
Ordering rule: the residual sum is plain torch, in float32; the kernel sees it in the weight's dtype.

Unproved until it has run on a device: the kernel's accuracy, in bfloat16 most of all.
"""

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`RMSNorm`; with a weight in bfloat16 the sum is rounded before it is normalised."""
    from vllm_gaudi.device import normalization

    total, summed = x, None
    if residual is not None:
        total = x.float() + residual.float()
        summed = total.to(x.dtype)
    normed = normalization().FusedRMSNorm.apply(total.to(weight.dtype).contiguous(), weight, epsilon)
    return normed.to(x.dtype), summed
