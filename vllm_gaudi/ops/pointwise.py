# SPDX-License-Identifier: Apache-2.0
"""Sigmoid, SiLU and softplus whose bits do not depend on where an element sits in its tensor.

Owns: the three activations every op in this folder uses.
Never: calls `torch.sigmoid`, `F.silu` or `F.softplus`. On CPU those run a vector kernel over the bulk and a scalar
kernel over what is left at the end of each thread's range, and the two round differently (measured: the same value
changed bits in 30 to 70 % of the shifted slices tried). `exp`, `log1p`, `+`, `*`, `/` and
`addcmul` (one rounding) do not have that property, so everything here is made of them.
Ordering rule: all of it in float32; the caller casts the result back.
"""

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), float32, same shape as `x`. Nothing is mutated."""
    return torch.exp(-x.float()).add_(1.0).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) computed as x / (1 + exp(-x)), float32, same shape as `x`. Nothing is mutated."""
    x = x.float()
    return x / torch.neg(x).exp_().add_(1.0)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), float32: no overflow, no threshold. Nothing is mutated."""
    x = x.float()
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0.0)
