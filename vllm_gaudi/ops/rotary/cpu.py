# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding in plain torch, over the first part of each head.

Owns: the rotation of pairs, in the dtype of the heads.
Never: positions or tables: the layer hands each token's cosines and sines in.
Ordering rule: dimensions beyond the rotary ones pass unchanged, after the rotated ones.
"""

import torch


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """`RotaryEmbedding`."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if is_neox:
        one, other = turned[..., :half], turned[..., half:]
        return torch.cat((one * cos - other * sin, other * cos + one * sin, rest), dim=-1)
    one, other = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((one * cos - other * sin, other * cos + one * sin), dim=-1)
    return torch.cat((pairs.flatten(-2), rest), dim=-1)
