# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in plain torch: routing and the experts' MLPs.

Owns: static shapes (every expert sees every row) and the order of the sum.
Never: sorts or groups tokens (row counts per expert are data, and a GEMM's rows decide its bits); drops a token.
Order: expert 0 first, always, accumulated in float32; an expert a row did not choose is left out by selection.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_gaudi.ops.linear import Pieces, row_tiled_linear
from vllm_gaudi.ops.pointwise import silu


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax routing: the top_k experts of each row.

    router_logits [T, E] any float dtype. Returns (weights [T, k] float32, softmax over all E, divided by their sum when
    `renormalize`; ids [T, k] int32, most likely first). Nothing is mutated.
    """
    shifted = router_logits.float()
    shifted = torch.exp(shifted - shifted.amax(-1, keepdim=True))
    weights, ids = torch.topk(shifted / shifted.sum(-1, keepdim=True), top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.int()


Prepared = Sequence[Any]
"""Tensors in a form that is a variant's own; here w13 and w2 as they are."""


def prepare_experts(w13: torch.Tensor, w2: torch.Tensor) -> Prepared:
    """The weights in the form that `experts` of the same variant takes; called once, when they are loaded.

    w13 [E, 2I, H], gate rows then up rows; w2 [E, H, I]. Nothing is copied: what is returned shares their memory, so a
    write into them is seen, and another tensor in their place is not.
    """
    return w13, w2


def experts(
    x: torch.Tensor,
    prepared: Prepared,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    row_tile: int,
    pieces: Pieces | None = None,
) -> torch.Tensor:
    """sum over a row's chosen experts e of weight_e * W2_e (SiLU(gate_e x) * (up_e x)).

    x [T, H]; prepared: by `prepare_experts` of the same variant; weights [T, k] float32; ids [T, k] int32 in 0..E-1,
    distinct within a row; row_tile and pieces as in `row_tiled_linear`. Returns [T, H] in x.dtype. Nothing is mutated.
    """
    w13, w2 = prepared
    inner = w2.shape[2]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        chosen = ids == expert  # [T, k], at most one true per row
        weight = torch.where(chosen, weights, 0.0).sum(-1, keepdim=True)
        gate_up = row_tiled_linear(x, w13[expert], None, row_tile, pieces=pieces)
        hidden = (silu(gate_up[:, :inner]) * gate_up[:, inner:].float()).to(x.dtype)
        y = row_tiled_linear(hidden, w2[expert], None, row_tile, pieces=pieces).float()
        out = torch.where(chosen.any(-1, keepdim=True), out + y * weight, out)
    return out.to(x.dtype)
