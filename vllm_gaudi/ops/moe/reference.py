# SPDX-License-Identifier: Apache-2.0
"""The experts by definition: one row after the other, one expert after the other, in float64. For the tests.

Owns: the formula of the `Experts` contract. Never: runs in an engine. Ordering rule: none.
"""

import torch


def experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """x [T, H]; w13 [E, 2I, H]; w2 [E, H, I]; weights, ids [T, k] -> [T, H] float64. Nothing is mutated."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for weight, expert in zip(weights[row].double(), ids[row].long(), strict=True):
            gate, up = (w13[expert].double() @ x[row].double()).chunk(2)
            out[row] += weight * (w2[expert].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return out
