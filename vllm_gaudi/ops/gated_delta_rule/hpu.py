# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule for Gaudi: written for a graph compiler.

Owns: the same recurrence in purely functional torch: no `out=`, no write into a slice or an argument, no integer
`where`, int32 indices, one unrolled loop of static length. It all runs on CPU too, where the tests compare it.
Never: polynomial inverses (they overflow on repeated tokens); a bf16 matmul operand; a state write outside the result.
Ordering rule: as on the CPU, the state is rounded to its dtype at every chunk boundary.

Unproved until it has run on a device: that float32 matmuls keep float32 accuracy on the MME; that the l2 norm written
out below compiles correctly (upstream had to keep its own out of compiled graphs); that rows do not depend on the
bucket; the speed of anything.
"""

import torch
import torch.nn.functional as F

from vllm_gaudi.ops.gated_delta_rule import L2_EPS
from vllm_gaudi.ops.gated_delta_rule.boundaries import boundary_chunks


def chunk_gated_delta_rule(
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
) -> tuple[torch.Tensor, ...]:
    """`ChunkGatedDeltaRule`; equal to the CPU's within float32 rounding, not bit for bit."""
    batch, num_tokens, k_heads, k_dim = q.shape
    v_heads, v_dim = v.shape[-2:]
    if v_heads % k_heads:
        raise ValueError(f"{v_heads} value heads cannot share {k_heads} key heads evenly")
    num_chunks = -(-num_tokens // chunk_size)
    grouped = (batch, k_heads, v_heads // k_heads, num_chunks, chunk_size)

    token = torch.arange(num_chunks * chunk_size, dtype=torch.int32, device=q.device)
    is_padding = token >= query_lens[:, None]  # bool [N, chunks * C]
    key = _l2_normalise(_to_chunks(k, is_padding, num_chunks))  # [N, H, chunks, C, D]
    query = _l2_normalise(_to_chunks(q, is_padding, num_chunks)) * k_dim**-0.5
    value = _to_chunks(v, is_padding, num_chunks).reshape(*grouped, v_dim)
    beta = _to_chunks(beta[..., None], is_padding, num_chunks).reshape(*grouped, 1)
    log_decay = _to_chunks(g[..., None], is_padding, num_chunks).reshape(grouped).cumsum(-1)

    row = torch.arange(chunk_size, dtype=torch.int32, device=q.device)
    ratio = log_decay[..., :, None] - log_decay[..., None, :]
    ratio = torch.exp(ratio.masked_fill(row[:, None] < row, float("-inf")))
    key, query = key[:, :, None], query[:, :, None]  # one head, broadcast over its value heads
    strict = (key @ key.transpose(-1, -2) * ratio * beta).masked_fill(row[:, None] <= row, 0.0)
    scores = query @ key.transpose(-1, -2) * ratio

    solve = unit_lower_inverse(strict)
    decay = torch.exp(log_decay)[..., None]
    value_part = solve @ (value * beta)
    key_part = solve @ (key * (beta * decay))
    query_in = query * decay
    key_out = key * torch.exp(log_decay[..., -1:] - log_decay)[..., None]
    read = torch.cat((key_part, query_in), dim=-2).reshape(batch, v_heads, num_chunks, 2 * chunk_size, k_dim)
    key_out = key_out.reshape(batch, v_heads, num_chunks, chunk_size, k_dim).transpose(-1, -2)
    value_part = value_part.reshape(batch, v_heads, num_chunks, chunk_size, v_dim)
    chunk_decay = decay[..., -1, :].reshape(batch, v_heads, num_chunks, 1, 1)

    state = initial_state.float()
    updates, reads, states = [], [], []
    for c in range(num_chunks):
        both = read[:, :, c] @ state
        update = value_part[:, :, c] - both[..., :chunk_size, :]
        new = state * chunk_decay[:, :, c] + key_out[:, :, c] @ update
        ended = is_padding[:, c * chunk_size, None, None, None]
        state = torch.where(ended, state, new.to(initial_state.dtype).float())
        updates.append(update)
        reads.append(both[..., chunk_size:, :])
        states.append(state)

    out = torch.stack(reads, 2) + scores.reshape(batch, v_heads, num_chunks, chunk_size, -1) @ torch.stack(updates, 2)
    out = out.permute(0, 2, 3, 1, 4).reshape(batch, -1, v_heads, v_dim).masked_fill(is_padding[..., None, None], 0.0)
    result = out[:, :num_tokens].to(v.dtype), state.to(initial_state.dtype)
    if boundary_offset is None:
        return result
    ends = boundary_chunks(boundary_offset, boundary_interval, chunk_size, num_chunks)  # [N, S]
    rows = ends + torch.arange(batch, dtype=torch.int32, device=q.device)[:, None] * num_chunks
    kept = torch.stack(states, 1).flatten(0, 1).index_select(0, rows.flatten())
    return (*result, kept.unflatten(0, ends.shape).to(initial_state.dtype))


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`RecurrentGatedDeltaRule`; equal to the CPU's within float32 rounding, not bit for bit."""
    rows, k_heads, k_dim = q.shape
    v_heads, v_dim = v.shape[-2:]
    if v_heads % k_heads:
        raise ValueError(f"{v_heads} value heads cannot share {k_heads} key heads evenly")
    old = state.float().reshape(rows, k_heads, -1, k_dim, v_dim)
    key = _l2_normalise(k.float())[:, :, None]  # [N, Hk, 1, Dk]
    query = _l2_normalise(q.float())[:, :, None] * k_dim**-0.5
    decay = torch.exp(g.float()).reshape(rows, k_heads, -1, 1)

    read = torch.stack((key, query), dim=-2) @ old  # [N, Hk, r, 2, Dv]
    update = v.float().reshape(rows, k_heads, -1, v_dim) - read[..., 0, :] * decay
    update = update * beta.float().reshape(rows, k_heads, -1, 1)
    out = read[..., 1, :] * decay + update * (key * query).sum(-1, keepdim=True)
    new = old * decay[..., None] + key[..., None] * update[..., None, :]
    return out.reshape(v.shape).to(v.dtype), new.reshape(state.shape).to(state.dtype)


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 for strictly lower triangular A [..., C, C], by block exponential_buckets with whole C x C products.

    With X the inverses of the diagonal blocks of size s, X <- X - X A_s X inverts those of size 2s, where A_s keeps the
    part of A that couples the two halves of each 2s block. The masks are constants: no slicing, which the MME has no
    small tiles for. Only true sub-inverses are formed. Nothing is mutated.
    """
    size = strict.shape[-1]
    row = torch.arange(size, dtype=torch.int32, device=strict.device)
    inverse = (row[:, None] == row).float().expand(strict.shape)
    half = 1
    while half < size:
        block = row // half
        couples = (row[:, None] // (2 * half) == row // (2 * half)) & (block[:, None] == block + 1)
        inverse = inverse - inverse @ strict.masked_fill(~couples, 0.0) @ inverse
        half *= 2
    return inverse


# ----------------------------------------------------------------------------------------------------------------------


def _to_chunks(x: torch.Tensor, is_padding: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """x [N, T, H, D] -> float32 [N, H, chunks, C, D], zero by selection where is_padding [N, chunks * C]."""
    x = (
        F.pad(x, (0, 0, 0, 0, 0, is_padding.shape[1] - x.shape[1]))
        .float()
        .masked_fill(is_padding[..., None, None], 0.0)
    )
    return x.unflatten(1, (num_chunks, -1)).permute(0, 3, 1, 2, 4)


def _l2_normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
