# SPDX-License-Identifier: Apache-2.0
"""The experts for Gaudi, through the bridge's fused operator.

Owns: the calls of `torch.ops.hpu.mixture_of_experts`, each over a range of experts. Routing has no variant of its own:
`routing.route` runs there too.
Never: groups tokens on the host; cuts weights up in a graph.
Ordering rule: ranges from expert 0 on, added up in float32; inside a call the operator promises no order of the sum.

Unproved until it has run on a device: that the operator takes gate-then-up weights in [out, in] layout under these
names and leaves ids outside its range out, its accuracy, whether a row's bits depend on the number of rows, how many
experts one call may have at what speed, and that a graph keeps hundreds of views of one tensor apart. They have a price
on the host: dynamo looks at each one at every call, which takes 0.2 ms for a layer of 512 experts.
"""

import torch

from vllm_gaudi.ops.moe import Prepared

EXPERTS_PER_CALL = 64  # two weights of each are arguments of one operator: 512 experts would be 1,024


def prepare_experts(w13: torch.Tensor, w2: torch.Tensor) -> Prepared:
    """`PrepareExperts`: a view per expert, so that a graph is given them and makes none.

    Returns, by call, its first expert and the lists of its experts' two weights.
    """
    gate_up, down = w13.unbind(0), w2.unbind(0)
    ranges = [slice(first, first + EXPERTS_PER_CALL) for first in range(0, len(down), EXPERTS_PER_CALL)]
    return [(some.start, list(gate_up[some]), list(down[some])) for some in ranges]


def experts(
    x: torch.Tensor,
    prepared: Prepared,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """`Experts`, except its bitwise promise."""
    routing, router_weights = ids.long(), weights.to(x.dtype)
    parts = [
        torch.ops.hpu.mixture_of_experts(
            hidden_states=x,
            expert_routing_table=routing,
            router_weights=router_weights,
            w12=gate_up,
            w3=down,
            permuted_weights=True,
            activation="silu",
            experts_min=first,
            experts_max=first + len(down) - 1,
        )
        for first, gate_up, down in prepared
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part.float() for part in parts]).sum(0).to(x.dtype)
