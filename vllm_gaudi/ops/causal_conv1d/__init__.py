# SPDX-License-Identifier: Apache-2.0
"""The depthwise causal convolution and SiLU in front of Gated DeltaNet.

Owns: the contract of y_t = SiLU(bias + sum_j w[:, j] * m_{t-K+1+j}) with m = [conv_state | x], and of the conv_state
that a later step starts from. `reference.py` is the definition, token by token; `cpu.py` and `hpu.py` are what runs.
Never: picks a variant; `vllm_gaudi.ops.registry` does. Ordering rule: taps are added oldest first, always, in float32,
so a token's bits do not depend on what surrounds it.
"""

from typing import Protocol

import torch


class CausalConv1dPrefill(Protocol):
    """Convolve T tokens of every sequence, continuing from its conv_state.

    x        [N, T, C]      pre-activation inputs, tokens >= query_lens may hold anything (also NaN)
    conv_state  [N, K - 1, C]  the K - 1 inputs before x, same dtype as x (zeros for a new sequence)
    weight   [C, K]         tap K - 1 meets the current token;  bias [C] or None
    query_lens  [N] int32      real tokens, 0..T
    boundary_offset [N] int32  tokens from a sequence's first token to its first boundary, 1..boundary_interval; None:
                              no boundary is asked for
    boundary_interval            tokens from one boundary to the next

    Returns (y [N, T, C] in x.dtype, zero at tokens >= query_lens; new_conv_state [N, K - 1, C]: the last K - 1 real
    inputs, gathered from [conv_state | x] at rows query_lens..query_lens + K - 2, bit for bit) and, with
    `boundary_offset`, also boundary_conv_states [N, ceil(T / boundary_interval), K - 1, C]: entry i is the
    new_conv_state of a run that ends after boundary_offset + i * boundary_interval tokens. An entry past its sequence's
    end is unspecified, but finite when the real inputs are. Nothing is mutated.

    Raises ValueError when conv_state.dtype != x.dtype (a rounded conv_state would make a split sequence differ from a
    whole one) and, with `boundary_offset`, when boundary_interval is not positive.
    """

    def __call__(
        self,
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        query_lens: torch.Tensor,
        *,
        boundary_offset: torch.Tensor | None = None,
        boundary_interval: int = 0,
    ) -> tuple[torch.Tensor, ...]: ...


class CausalConv1dUpdate(Protocol):
    """One token per row: x [N, C], conv_state [N, K - 1, C] of the same dtype, weight [C, K], bias [C] or None.

    Returns (y [N, C] in x.dtype, new_conv_state [N, K - 1, C] = conv_state without its oldest row, then x). Nothing is
    mutated. Bit for bit what `causal_conv1d_prefill` gives for the same token. Raises ValueError when conv_state.dtype
    != x.dtype.
    """

    def __call__(
        self,
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
