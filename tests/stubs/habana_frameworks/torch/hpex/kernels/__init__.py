# SPDX-License-Identifier: Apache-2.0
"""Attention and rotary kernels, by their public names."""

from __future__ import annotations

import enum
from typing import Any

import torch

from habana_frameworks.calls import check


class FusedSDPA(torch.autograd.Function):
    """``apply`` takes positional arguments only, as every autograd function does."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_sequence_lengths: torch.Tensor | None = None,
        padding_side: str = "left",
    ) -> torch.Tensor:
        check(type(is_causal) is bool, f"is_causal is {is_causal!r}")
        check(dropout_p == 0.0, "dropout at inference")
        check(softmax_mode in ("None", "fast", "fp32"), f"softmax_mode is {softmax_mode!r}")
        check(recompute_mode in (None, True, False), f"recompute_mode is {recompute_mode!r}")
        check(padding_side in ("left", "right"), f"padding_side is {padding_side!r}")
        check(not (is_causal and attn_mask is not None), "a mask together with is_causal")
        check(valid_sequence_lengths is None or is_causal, "valid_sequence_lengths without is_causal")
        return torch.ops.habana_stub.fused_sdpa(
            query, key, value, attn_mask, is_causal, scale, valid_sequence_lengths, padding_side, softmax_mode
        )


class RotaryPosEmbeddingMode(enum.Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(
    p: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> torch.Tensor:
    check(isinstance(mode, RotaryPosEmbeddingMode), f"mode is {mode!r}")
    check(offset == 0 and position_ids is None, "the stub takes cos and sin by token")
    return torch.ops.habana_stub.rotary(p, cos, sin, mode is RotaryPosEmbeddingMode.BLOCKWISE)


class RotaryPosEmbeddingHelperV2(torch.autograd.Function):
    """Blockwise only, the tables gathered by ``position_ids``."""

    @staticmethod
    def forward(
        ctx: Any,
        p: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return apply_rotary_pos_emb(p, cos, sin, position_ids)
