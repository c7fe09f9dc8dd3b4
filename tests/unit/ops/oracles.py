# SPDX-License-Identifier: Apache-2.0
"""Builders for the op tests: random inputs, the relative error.

Never: calls an op of the package. Ordering rule: none; every function is pure.
"""

import torch

VARIANTS = ("cpu", "hpu")
NAN = float("nan")


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


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Frobenius norm, in float64; NaN when anything is not finite."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def lengths_of(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)
