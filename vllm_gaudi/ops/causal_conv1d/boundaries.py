# SPDX-License-Identifier: Apache-2.0
"""The conv states at a sequence's end and at block boundaries, gathered from its inputs: what both variants share.

Owns: exact copies of input rows. Never: arithmetic on them. Ordering rule: none; a pure gather.
"""

import torch


def conv_states_of(
    inputs: torch.Tensor,
    history: int,
    query_lens: torch.Tensor,
    boundary_offset: torch.Tensor | None,
    boundary_interval: int,
) -> tuple[torch.Tensor, ...]:
    """The new_conv_state and, with `boundary_offset`, the boundary_conv_states of `causal_conv1d_prefill`, in one
    gather.

    inputs [N, history + T, C]: row history + t is token t; the other arguments are those of the op. An entry past its
    sequence's end repeats the new_conv_state. Raises ValueError when boundary_interval is not positive.
    """
    ends = query_lens[:, None]
    if boundary_offset is None:
        return (_conv_states_after(inputs, ends, history)[:, 0],)
    if boundary_interval <= 0:
        raise ValueError(f"boundary_interval is {boundary_interval}: it must be positive")
    num_tokens = inputs.shape[1] - history
    run = torch.arange(0, num_tokens, boundary_interval, dtype=torch.int32, device=inputs.device)
    boundaries = torch.minimum((boundary_offset[:, None] + run).clamp(min=0), ends)
    conv_states = _conv_states_after(inputs, torch.cat((ends, boundaries), dim=1), history)
    return conv_states[:, 0], conv_states[:, 1:]


def _conv_states_after(inputs: torch.Tensor, ends: torch.Tensor, history: int) -> torch.Tensor:
    """The `history` rows of inputs [N, history + T, C] that end with token ends[n, i] - 1: [N, S, history, C], a copy.

    ends int32 [N, S] in 0..T; row history + t of `inputs` is token t.
    """
    first = ends
    if inputs.shape[0] > 1:
        sequence = torch.arange(inputs.shape[0], dtype=ends.dtype, device=ends.device)
        first = ends + sequence[:, None] * inputs.shape[1]
    rows = first[:, :, None] + torch.arange(history, dtype=ends.dtype, device=ends.device)
    return inputs.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)
