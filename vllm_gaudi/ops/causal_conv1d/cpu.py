# SPDX-License-Identifier: Apache-2.0
"""The depthwise causal convolution and SiLU in front of Gated DeltaNet, in plain torch.

Owns: y_t = SiLU(bias + sum_j w[:, j] * m_{t-K+1+j}) with m = [conv_state | x], and the conv_state a later step starts
from. Never: calls `F.conv1d` (its algorithm depends on the shape); keeps anything but exact copies of inputs in a
conv_state; reads padding. Ordering rule: taps are added oldest first, always, in float32, so a token's bits do not
depend on what surrounds it.
"""

import torch

from vllm_gaudi.ops.causal_conv1d.boundaries import conv_states_of
from vllm_gaudi.ops.pointwise import silu

SEGMENT_ELEMENTS = 2**16  # float32 temporaries of this size stay in cache; all is elementwise, so no bit changes


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
    """`CausalConv1dPrefill`, segment by segment."""
    if conv_state.dtype != x.dtype:
        raise ValueError(f"conv state is {conv_state.dtype} but its inputs are {x.dtype}: they must be equal")
    batch, num_tokens, channels = x.shape
    history = weight.shape[1] - 1
    inputs = torch.cat((conv_state, x), dim=1)  # row history + t is token t

    is_padding = torch.arange(num_tokens, dtype=query_lens.dtype, device=query_lens.device) >= query_lens[:, None]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    segment = max(1, SEGMENT_ELEMENTS // (batch * channels))
    for start in range(0, num_tokens, segment):
        stop = min(start + segment, num_tokens)
        taps = _taps([inputs[:, start + j : stop + j] for j in range(history + 1)], weight, bias)
        y[:, start:stop] = taps.masked_fill_(is_padding[:, start:stop, None], 0.0)

    return y, *conv_states_of(inputs, history, query_lens, boundary_offset, boundary_interval)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`CausalConv1dUpdate`. Bit for bit what `causal_conv1d_prefill` gives for the same token."""
    if conv_state.dtype != x.dtype:
        raise ValueError(f"conv state is {conv_state.dtype} but its inputs are {x.dtype}: they must be equal")
    inputs = torch.cat((conv_state, x[:, None]), dim=1)
    return _taps(list(inputs.unbind(1)), weight, bias).to(x.dtype), inputs[:, 1:].contiguous()


# ----------------------------------------------------------------------------------------------------------------------


def _taps(shifted: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """SiLU(bias + sum_j weight[:, j] * shifted[j]) in float32; every shifted[j] [..., C], oldest first."""
    columns = weight.float().t().contiguous()
    acc = shifted[0].float() * columns[0]
    for j in range(1, len(shifted)):
        acc.addcmul_(shifted[j].float(), columns[j])
    if bias is not None:
        acc += bias.float()
    return silu(acc)
