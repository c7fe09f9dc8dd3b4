# SPDX-License-Identifier: Apache-2.0
"""Independent oracles and builders for the op tests.

Owns: the token-by-token recurrence, the attention written the naive way; random inputs; the relative error.
Never: calls an op of the package. Order: none; every function is pure.
"""

import torch

VARIANTS = ("reference", "hpu")
NAN = float("nan")


def normalise(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_rule(q, k, v, g, beta, state, dtype=torch.float64):
    """Out [N, T, Hv, Dv] and the states after every token [N, T, Hv, Dk, Dv], one token at a time in `dtype`."""
    group = v.shape[2] // q.shape[2]
    q, k, v, g, beta, state = (x.to(dtype) for x in (q, k, v, g, beta, state))
    q = normalise(q).repeat_interleave(group, 2) / q.shape[-1] ** 0.5
    k = normalise(k).repeat_interleave(group, 2)
    out, states = [], []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        update = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhkv,nhk->nhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * update[:, :, None]
        out.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t]))
        states.append(state)
    return torch.stack(out, 1), torch.stack(states, 1)


def delta_rule_inputs(batch, tokens, k_heads, v_heads, k_dim, v_dim, dtype=torch.float32, state=torch.float32, seed=0):
    """q, k, v, g, beta, initial_state of the chunk form: long memory (decay 0.005..0.2 per token)."""
    rng = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=rng)

    q, k = (randn(batch, tokens, k_heads, k_dim).to(dtype) for _ in range(2))
    v = randn(batch, tokens, v_heads, v_dim).to(dtype)
    g = -(0.005 + 0.195 * torch.rand(batch, tokens, v_heads, generator=rng))
    beta = torch.rand(batch, tokens, v_heads, generator=rng)
    return q, k, v, g, beta, randn(batch, v_heads, k_dim, v_dim).to(state)


def attention(q, key, value, visible, scale):
    """q [Q, H, D], key and value [L, Hkv, D], visible bool [Q, L] -> [Q, H, D] float64, one softmax over all keys."""
    group = q.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,lhd->hql", q.double(), key) * scale
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hql,lhd->qhd", probs, value)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Frobenius norm, in float64; NaN when anything is not finite."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def lengths_of(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)
