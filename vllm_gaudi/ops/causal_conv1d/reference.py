# SPDX-License-Identifier: Apache-2.0
"""The depthwise causal convolution and SiLU in front of Gated DeltaNet, in plain torch.

Owns: y_t = SiLU(bias + sum_j w[:, j] * m_{t-K+1+j}) with m = [tail | x], and the tail a later step starts from.
Never: calls `F.conv1d` (its algorithm depends on the shape); keeps anything but exact copies of inputs in a tail; reads
padding.
Order: taps are added oldest first, always, in float32, so a token's bits do not depend on what surrounds it.
"""

import torch

from vllm_gaudi.ops.pointwise import silu

SEGMENT_ELEMENTS = 2**16  # float32 temporaries of this size stay in cache; all is elementwise, so no bit changes


def causal_conv1d_prefill(
    x: torch.Tensor,
    tail: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: torch.Tensor,
    *,
    boundary_first: torch.Tensor | None = None,
    boundary_every: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Convolve T tokens of every sequence, continuing from its tail.

    x        [N, T, C]      pre-activation inputs, tokens >= lengths may hold anything (also NaN)
    tail     [N, K - 1, C]  the K - 1 inputs before x, same dtype as x (zeros for a new sequence)
    weight   [C, K]         tap K - 1 meets the current token;  bias [C] or None
    lengths  [N] int32      real tokens, 0..T
    boundary_first [N] int32  tokens from a sequence's first token to its first boundary, 1..boundary_every; None: no
                              boundary is asked for
    boundary_every            tokens from one boundary to the next

    Returns (y [N, T, C] in x.dtype, zero at tokens >= lengths; new_tail [N, K - 1, C]: the last K - 1 real inputs,
    gathered from [tail | x] at rows lengths..lengths + K - 2, bit for bit) and, with `boundary_first`, also
    boundary_tails [N, ceil(T / boundary_every), K - 1, C]: entry i is the new_tail of a run that ends after
    boundary_first + i * boundary_every tokens. An entry past its sequence's end is unspecified, but finite when the
    real inputs are. Nothing is mutated.

    Raises ValueError when tail.dtype != x.dtype (a rounded tail would make a split sequence differ from a whole one)
    and, with `boundary_first`, when boundary_every is not positive.
    """
    if tail.dtype != x.dtype:
        raise ValueError(f"conv tail is {tail.dtype} but its inputs are {x.dtype}: they must be equal")
    batch, num_tokens, channels = x.shape
    history = weight.shape[1] - 1
    inputs = torch.cat((tail, x), dim=1)  # row history + t is token t

    dead = torch.arange(num_tokens, dtype=lengths.dtype, device=lengths.device) >= lengths[:, None]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    segment = max(1, SEGMENT_ELEMENTS // (batch * channels))
    for start in range(0, num_tokens, segment):
        stop = min(start + segment, num_tokens)
        taps = _taps([inputs[:, start + j : stop + j] for j in range(history + 1)], weight, bias)
        y[:, start:stop] = taps.masked_fill_(dead[:, start:stop, None], 0.0)

    return y, *tails_of(inputs, history, lengths, boundary_first, boundary_every)


def causal_conv1d_update(
    x: torch.Tensor,
    tail: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row: x [N, C], tail [N, K - 1, C] of the same dtype, weight [C, K], bias [C] or None.

    Returns (y [N, C] in x.dtype, new_tail [N, K - 1, C] = tail without its oldest row, then x). Nothing is mutated. Bit
    for bit what `causal_conv1d_prefill` gives for the same token. Raises ValueError when tail.dtype != x.dtype.
    """
    if tail.dtype != x.dtype:
        raise ValueError(f"conv tail is {tail.dtype} but its inputs are {x.dtype}: they must be equal")
    inputs = torch.cat((tail, x[:, None]), dim=1)
    return _taps(list(inputs.unbind(1)), weight, bias).to(x.dtype), inputs[:, 1:].contiguous()


def tails_of(
    inputs: torch.Tensor, history: int, lengths: torch.Tensor, boundary_first: torch.Tensor | None, boundary_every: int
) -> tuple[torch.Tensor, ...]:
    """The new_tail and, with `boundary_first`, the boundary_tails of `causal_conv1d_prefill`, in one gather.

    inputs [N, history + T, C]: row history + t is token t; the other arguments are those of the op. An entry past its
    sequence's end repeats the new_tail. Raises ValueError when boundary_every is not positive.
    """
    ends = lengths[:, None]
    if boundary_first is None:
        return (_tails_after(inputs, ends, history)[:, 0],)
    if boundary_every <= 0:
        raise ValueError(f"boundary_every is {boundary_every}: it must be positive")
    num_tokens = inputs.shape[1] - history
    run = torch.arange(0, num_tokens, boundary_every, dtype=torch.int32, device=inputs.device)
    boundaries = torch.minimum((boundary_first[:, None] + run).clamp(min=0), ends)
    tails = _tails_after(inputs, torch.cat((ends, boundaries), dim=1), history)
    return tails[:, 0], tails[:, 1:]


# ----------------------------------------------------------------------------------------------------------------------


def _tails_after(inputs: torch.Tensor, ends: torch.Tensor, history: int) -> torch.Tensor:
    """The `history` rows of inputs [N, history + T, C] that end with token ends[n, i] - 1: [N, S, history, C], a copy.

    ends int32 [N, S] in 0..T; row history + t of `inputs` is token t.
    """
    first = ends
    if inputs.shape[0] > 1:
        sequence = torch.arange(inputs.shape[0], dtype=ends.dtype, device=ends.device)
        first = ends + sequence[:, None] * inputs.shape[1]
    rows = first[:, :, None] + torch.arange(history, dtype=ends.dtype, device=ends.device)
    return inputs.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)


def _taps(shifted: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """SiLU(bias + sum_j weight[:, j] * shifted[j]) in float32; every shifted[j] [..., C], oldest first."""
    columns = weight.float().t().contiguous()
    acc = shifted[0].float() * columns[0]
    for j in range(1, len(shifted)):
        acc.addcmul_(shifted[j].float(), columns[j])
    if bias is not None:
        acc += bias.float()
    return silu(acc)
