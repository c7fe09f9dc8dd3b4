# SPDX-License-Identifier: Apache-2.0
"""The experts for Gaudi: the contract of `moe.experts` through the bridge's fused operator.

Owns: one call of `torch.ops.hpu.mixture_of_experts`. Routing has no variant of its own: `moe.route` runs there too.
Never: groups tokens on the host.
Order: none beyond the operator's own; its sum over a row's experts is not promised to be in expert order.

Unproved until it has run on a device: the operator's argument names as used here, that it takes gate-then-up weights in
[out, in] layout, its accuracy, and whether a row's bits depend on the number of rows.
"""

import torch


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    row_tile: int,
) -> torch.Tensor:
    """The contract of `moe.experts`, except its bitwise promise; row_tile is unused."""
    return torch.ops.hpu.mixture_of_experts(
        hidden_states=x,
        expert_routing_table=ids,
        router_weights=weights.to(x.dtype),
        w12=list(w13.unbind(0)),
        w3=list(w2.unbind(0)),
        permuted_weights=True,
        activation="silu",
        experts_min=0,
        experts_max=w13.shape[0] - 1,
    )
