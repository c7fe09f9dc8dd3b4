# SPDX-License-Identifier: Apache-2.0
"""The gates of the gated delta rule: log decay and write strength of each token. One form for every device.

Owns: the formulas. Never: the recurrence. Ordering rule: computed in float32, before the chunk or one-token form runs.
"""

import torch

from vllm_gaudi.ops.pointwise import sigmoid, softplus


def gdn_gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and write strength of each token and value head (arXiv 2412.06464, section 3.1 with Mamba2's decay).

    A_log, dt_bias [Hv]; a, b [..., Hv]; any float dtype. Returns (g, beta), both float32 [..., Hv]:
    g = -exp(A_log) * softplus(a + dt_bias) <= 0 in nats, beta = sigmoid(b) in (0, 1). Nothing is mutated.
    """
    g = softplus(a.float() + dt_bias.float()) * -torch.exp(A_log.float())
    return g, sigmoid(b)
