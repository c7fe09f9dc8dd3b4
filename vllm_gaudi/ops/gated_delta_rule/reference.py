# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule by definition: one token after the other, in float64. Tests compare the variants with it.

Owns: the recurrence of the package's docstring, word for word. Never: runs in an engine, rounds a state.
Ordering rule: decay, then the update against the decayed state, then the read.
"""

import torch

from vllm_gaudi.ops.gated_delta_rule import L2_EPS


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as of `ChunkGatedDeltaRule`, without padding; all arithmetic in `dtype`.

    Returns (out [N, T, Hv, Dv], states [N, T, Hv, Dk, Dv]: after every token). Nothing is mutated.
    """
    group = v.shape[2] // q.shape[2]
    q, k, v, g, beta, state = (x.to(dtype) for x in (q, k, v, g, beta, state))
    q = l2_normalise(q).repeat_interleave(group, 2) / q.shape[-1] ** 0.5
    k = l2_normalise(k).repeat_interleave(group, 2)
    out, states = [], []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        update = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhkv,nhk->nhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * update[:, :, None]
        out.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t]))
        states.append(state)
    return torch.stack(out, 1), torch.stack(states, 1)


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
