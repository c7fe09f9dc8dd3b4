# SPDX-License-Identifier: Apache-2.0
"""The causal convolution for Gaudi: functional and in one piece.

Owns: the same shifted multiply-adds without a write into a slice. It all runs on CPU too, where the tests compare it.
Never: boolean indexing, integer `where`, int64 indices.
Ordering rule: taps are added oldest first, as on the CPU.

Unproved until it has run on a device: that the compiler fuses the taps; that index_select keeps every bit of a
conv_state.
"""

import torch

from vllm_gaudi.ops.causal_conv1d.boundaries import conv_states_of
from vllm_gaudi.ops.pointwise import silu


def causal_conv1d_prefill(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    query_lens: torch.Tensor,
    *,
    boundary_offset: torch.Tensor | None = None,
    boundary_interval: int = 0,
) -> tuple[torch.Tensor, ...]:
    """`CausalConv1dPrefill`."""
    if conv_state.dtype != x.dtype:
        raise ValueError(f"conv state is {conv_state.dtype} but its inputs are {x.dtype}: they must be equal")
    num_tokens = x.shape[1]
    history = weight.shape[1] - 1
    inputs = torch.cat((conv_state, x), dim=1)
    token = torch.arange(num_tokens, dtype=torch.int32, device=x.device)
    y = _taps([inputs[:, j : j + num_tokens] for j in range(history + 1)], weight, bias)
    y = y.masked_fill((token >= query_lens[:, None])[:, :, None], 0.0).to(x.dtype)
    return y, *conv_states_of(inputs, history, query_lens, boundary_offset, boundary_interval)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`CausalConv1dUpdate`."""
    if conv_state.dtype != x.dtype:
        raise ValueError(f"conv state is {conv_state.dtype} but its inputs are {x.dtype}: they must be equal")
    inputs = torch.cat((conv_state, x[:, None]), dim=1)
    return _taps(list(inputs.unbind(1)), weight, bias).to(x.dtype), inputs[:, 1:].contiguous()


def _taps(shifted: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    acc = shifted[0].float() * weight[:, 0].float()
    for j in range(1, len(shifted)):
        acc = acc + shifted[j].float() * weight[:, j].float()
    return silu(acc if bias is None else acc + bias.float())
