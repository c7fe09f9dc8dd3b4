# SPDX-License-Identifier: Apache-2.0
"""Routing: which experts a token row chooses, and with which weights. One form for every device.

Owns: softmax routing. Never: the experts. Ordering rule: the softmax is over all experts, before the choice.
"""

import torch


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
