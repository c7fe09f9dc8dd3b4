# SPDX-License-Identifier: Apache-2.0
"""The fused RMS norm, by its public name."""

from __future__ import annotations

from typing import Any

import torch

from habana_frameworks.calls import check


class FusedRMSNorm(torch.autograd.Function):
    """``apply`` takes positional arguments only, as every autograd function does."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> torch.Tensor:
        check(type(eps) is float, f"eps is {eps!r}")
        return torch.ops.habana_stub.rms_norm(inputs, weight, eps)
