# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet's recurrence (Gated Delta Networks, arXiv 2412.06464), per value head with state S [Dk, Dv]:

    S' = exp(g_t) S_{t-1};   u_t = beta_t (v_t - S'^T k_t);   S_t = S' + k_t u_t^T;   o_t = S_t^T q_t

Owns: the contract of the two forms, chunk by chunk for prefill and one token for decode. `reference.py` is the
definition, token by token; `cpu.py` and `hpu.py` are what runs.
Never: picks a variant; `vllm_gaudi.ops.registry` does.
Ordering rule: chunk c's state is rounded to the state dtype before chunk c + 1 reads it, so a step that ends on any
chunk boundary hands over exactly what an unsplit run would have kept.
"""

from typing import Protocol

import torch

L2_EPS = 1e-6
"""Added to the sum of squares of a key or query before its root is taken."""


class ChunkGatedDeltaRule(Protocol):
    """Run T tokens of every sequence through the rule, chunk by chunk (WY form of arXiv 2412.06464, section 3.3).

    q, k           [N, T, Hk, Dk]  any float dtype, not normalised: x / sqrt(sum x^2 + 1e-6) here, q also / sqrt(Dk)
    v              [N, T, Hv, Dv]  any float dtype; value head h reads key head h // (Hv // Hk)
    g, beta        [N, T, Hv]      float32, from `gdn_gating`; g <= 0
    initial_state  [N, Hv, Dk, Dv] any float dtype; the running state is rounded to it after every chunk
    query_lens        [N] int32       real tokens of each sequence, 0..T; later tokens are exact no-ops, also NaN ones
    chunk_size     tokens per chunk; the sequences start on the chunk grid. Any T works, the last chunk is padded here.
    boundary_offset [N] int32       tokens from a sequence's first token to its first boundary: 1..boundary_interval, a
                                   multiple of chunk_size; None when no boundaries are asked for
    boundary_interval tokens from one boundary to the next, a multiple of chunk_size

    Returns (out [N, T, Hv, Dv] in v.dtype, final_state [N, Hv, Dk, Dv] in initial_state.dtype) and, with
    `boundary_offset`, also boundary_states [N, ceil(T / boundary_interval), Hv, Dk, Dv] in initial_state.dtype: entry i
    is the state after boundary_offset + i * boundary_interval tokens, bit for bit the final_state of a run that ends
    there. An entry past its sequence's end is unspecified, but finite when the real inputs are. `out` is zero at tokens
    >= query_lens. Asking for boundaries changes no bit of the other results. Nothing is mutated.

    Raises ValueError when Hv is not a multiple of Hk and, with `boundary_offset`, when boundary_interval is not a
    positive multiple of chunk_size.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        query_lens: torch.Tensor,
        *,
        chunk_size: int = 64,
        boundary_offset: torch.Tensor | None = None,
        boundary_interval: int = 0,
    ) -> tuple[torch.Tensor, ...]: ...


class RecurrentGatedDeltaRule(Protocol):
    """One token per row: the recurrence of the module docstring, reading each state once.

    q, k [N, Hk, Dk]; v [N, Hv, Dv]; g, beta [N, Hv] float32; state [N, Hv, Dk, Dv] any float dtype. q and k are
    normalised here as in `chunk_gated_delta_rule`. Returns (out [N, Hv, Dv] in v.dtype, new_state in state.dtype);
    nothing is mutated. A row's bits do not depend on N. With X = [k; q]^T S: u = beta (v - e^g X_k), o = e^g X_q +
    (q.k) u, S <- e^g S + k u^T.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
