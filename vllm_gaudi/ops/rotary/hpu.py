# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding for Gaudi: through the bridge's kernel.

Owns: the tables in the kernel's form, one cosine and one sine per rotary dimension.
Never: gives the kernel more than the rotary part: it rotates the whole last dimension that it is given.
Ordering rule: cut, rotate, put together.

Unproved until it has run on a device: the order of the kernel's arguments as used here, and its accuracy.
"""

import torch


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """`RotaryEmbedding`."""
    from vllm_gaudi.device import kernels

    kernel = kernels()
    mode = kernel.RotaryPosEmbeddingMode.BLOCKWISE if is_neox else kernel.RotaryPosEmbeddingMode.PAIRWISE
    size = 2 * cos.shape[-1]
    # x, cos, sin, position ids (none: the tables are by token already), offset, mode
    turned = kernel.apply_rotary_pos_emb(
        x[..., :size].contiguous(), _per_dimension(cos, is_neox), _per_dimension(sin, is_neox), None, 0, mode
    )
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)


def _per_dimension(table: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """[T, R / 2] -> [T, 1, R]: the value of each dimension's pair."""
    wide = torch.cat((table, table), dim=-1) if is_neox else table.repeat_interleave(2, dim=-1)
    return wide[:, None].contiguous()
