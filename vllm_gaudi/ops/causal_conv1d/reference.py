# SPDX-License-Identifier: Apache-2.0
"""The causal convolution by definition: one token after the other, in float64. Tests compare the variants with it.

Owns: the formula of the package's docstring. Never: runs in an engine.
Ordering rule: a token's window is complete before its conv_state is handed on.
"""

import torch


def causal_conv1d(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as of `CausalConv1dPrefill`, without padding; all arithmetic in `dtype`.

    Returns (y [N, T, C] in `dtype`, conv_states [N, T, K - 1, C] in x.dtype: after every token). Nothing is mutated.
    """
    y, conv_states = [], []
    for t in range(x.shape[1]):
        window = torch.cat((conv_state, x[:, t, None]), dim=1)
        total = torch.einsum("nkc,ck->nc", window.to(dtype), weight.to(dtype))
        total = total if bias is None else total + bias.to(dtype)
        y.append(total / (1 + torch.exp(-total)))
        conv_state = window[:, 1:]
        conv_states.append(conv_state)
    return torch.stack(y, 1), torch.stack(conv_states, 1)
