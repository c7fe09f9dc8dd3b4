# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in plain torch.

Owns: static shapes (every expert sees every row) and the order of the sum.
Never: sorts or groups tokens (row counts per expert are data, and a GEMM's rows decide its bits); drops a token.
Ordering rule: expert 0 first, always, accumulated in float32; an expert a row did not choose is left out by selection.
"""

import torch

from vllm_gaudi.ops.linear import GemmRows, row_tiled_linear
from vllm_gaudi.ops.moe import Prepared
from vllm_gaudi.ops.pointwise import silu


def prepare_experts(w13: torch.Tensor, w2: torch.Tensor) -> Prepared:
    """`PrepareExperts`: w13 and w2 as they are."""
    return w13, w2


def experts(
    x: torch.Tensor,
    prepared: Prepared,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    gemm_rows: GemmRows | None = None,
) -> torch.Tensor:
    """`Experts`, expert 0 first, always, accumulated in float32; with `gemm_rows` a row's bits depend on it alone."""
    w13, w2 = prepared
    inner = w2.shape[2]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        chosen = ids == expert  # [T, k], at most one true per row
        weight = torch.where(chosen, weights, 0.0).sum(-1, keepdim=True)
        gate_up = row_tiled_linear(x, w13[expert], None, gemm_rows)
        hidden = (silu(gate_up[:, :inner]) * gate_up[:, inner:].float()).to(x.dtype)
        y = row_tiled_linear(hidden, w2[expert], None, gemm_rows).float()
        out = torch.where(chosen.any(-1, keepdim=True), out + y * weight, out)
    return out.to(x.dtype)
