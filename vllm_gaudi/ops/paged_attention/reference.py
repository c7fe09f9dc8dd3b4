# SPDX-License-Identifier: Apache-2.0
"""Attention by definition: one softmax over all visible keys, in float64. Tests compare the variants with it.

Owns: softmax(q K^T * scale) V with the hidden keys at minus infinity. Never: pages, runs in an engine.
Ordering rule: none; a pure function of its arguments.
"""

import torch


def attention(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [Q, H, D], key and value [L, Hkv, D], visible bool [Q, L] -> [Q, H, D] float64.

    Query head h reads kv head h // (H // Hkv). Nothing is mutated.
    """
    group = q.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,lhd->hql", q.double(), key) * scale
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hql,lhd->qhd", probs, value)
