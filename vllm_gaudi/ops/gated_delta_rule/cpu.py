# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain torch: gates, the chunk form for prefill, the one-token form for decode.

Owns: the float32 mathematics of the recurrence (Gated Delta Networks, arXiv 2412.06464), per value head with state S
[Dk, Dv]:
    S' = exp(g_t) S_{t-1};   u_t = beta_t (v_t - S'^T k_t);   S_t = S' + k_t u_t^T;   o_t = S_t^T q_t
Never: sees a slot, a block or a request; writes into its inputs; reads a value back to the host.
Ordering rule: chunk c's state is rounded to the state dtype before chunk c + 1 reads it, so a step that ends on any
chunk boundary hands over exactly what an unsplit run would have kept.

Bitwise rules (design.md section 7): every matmul is one [C, .] product per sequence and head, batched only over a
count; the only reductions are over the head dim and inside a chunk; padding is removed by selection.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vllm_gaudi.ops.gated_delta_rule import L2_EPS
from vllm_gaudi.ops.gated_delta_rule.boundaries import boundary_chunks

SEGMENT_TOKENS = 256  # temporaries of this many tokens stay in cache; a segment always ends on the chunk grid
BASE_BLOCK = 16  # largest diagonal block inverted by forward substitution


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
    """`ChunkGatedDeltaRule`, bit for bit the same for every split on the chunk grid and every batch."""
    batch, num_tokens, k_heads, k_dim = q.shape
    v_heads, v_dim = v.shape[-2:]
    if v_heads % k_heads:
        raise ValueError(f"{v_heads} value heads cannot share {k_heads} key heads evenly")

    num_chunks = -(-num_tokens // chunk_size)
    out = v.new_empty(batch, num_chunks * chunk_size, v_heads, v_dim)
    state = initial_state.float().reshape(batch * v_heads, k_dim, v_dim)
    chunks_per_segment = max(1, SEGMENT_TOKENS // chunk_size)
    ring = state.new_empty(max(1, min(chunks_per_segment, num_chunks)), *state.shape)  # one segment's states
    boundaries = ends = None
    if boundary_offset is not None:
        ends = boundary_chunks(boundary_offset, boundary_interval, chunk_size, num_chunks)
        if num_chunks > chunks_per_segment:
            boundaries = _BoundaryStates(ring, ends, boundary_interval // chunk_size, num_chunks)

    for first in range(0, num_chunks, chunks_per_segment):
        last = min(first + chunks_per_segment, num_chunks)
        span = slice(first * chunk_size, min(last * chunk_size, num_tokens))
        seg_out, state = _run_segment(
            q[:, span],
            k[:, span],
            v[:, span],
            g[:, span],
            beta[:, span],
            state,
            query_lens - first * chunk_size,
            chunk_size,
            last - first,
            initial_state.dtype,
            ring[: last - first],
        )
        if boundaries is not None:
            boundaries.keep_(first, last)
        out[:, first * chunk_size : last * chunk_size].unflatten(1, (last - first, chunk_size)).copy_(seg_out)

    out = out[:, :num_tokens].contiguous()
    out.masked_fill_(_is_padding(query_lens, num_tokens)[:, :, None, None], 0.0)
    final_state = state.reshape(initial_state.shape).to(initial_state.dtype, copy=True)
    if ends is None:
        return out, final_state
    kept = _states_after(ring, ends) if boundaries is None else boundaries.gather()
    return out, final_state, kept.unflatten(-1, initial_state.shape[1:]).to(initial_state.dtype)


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`RecurrentGatedDeltaRule`. A row's bits do not depend on N."""
    terms = _step_terms(q, k, v, g, beta)
    new = state.to(torch.float32, copy=True).flatten(0, 1)
    out = _step_([term.flatten(0, 1) for term in terms], new)
    return out.reshape(v.shape).to(v.dtype), new.reshape(state.shape).to(state.dtype)


def recurrent_gated_delta_rule_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: Sequence[torch.Tensor],
) -> torch.Tensor:
    """`recurrent_gated_delta_rule` bit for bit, on states where they lie: each is read and written once.

    states: of the first rows, each [Hv, Dk, Dv], distinct and contiguous; MUTATED. Rows after them are padding. Returns
    out [N, Hv, Dv] in v.dtype, zero for padding. For a host: a loop over the rows.
    """
    terms = _step_terms(q, k, v, g, beta)
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    for row, state in enumerate(states):
        new = state.float()  # the state itself when it is float32
        out[row] = _step_([term[row] for term in terms], new)
        if new is not state:
            state.copy_(new)
    return out.to(v.dtype)


# ----------------------------------------------------------------------------------------------------------------------


def _step_terms(q, k, v, g, beta):
    """What one token brings, float32: key and query [N, Hv, 2, Dk], q.k [N, Hv, 1], e^g, v and beta alike.

    Raises ValueError when Hv is not a multiple of Hk.
    """
    k_heads, k_dim = q.shape[1:]
    v_heads = v.shape[1]
    if v_heads % k_heads:
        raise ValueError(f"{v_heads} value heads cannot share {k_heads} key heads evenly")
    group = v_heads // k_heads
    key = _l2_normalise(k.float())
    query = _l2_normalise(q.float()) * k_dim**-0.5
    key_query = torch.stack((key, query), dim=2).repeat_interleave(group, dim=1)
    overlap = (key * query).sum(-1, keepdim=True).repeat_interleave(group, dim=1)
    return key_query, overlap, torch.exp(g.float()).unsqueeze(-1), v.float(), beta.float().unsqueeze(-1)


def _step_(terms, state):
    """One token of each head: terms as above without their rows, state [heads, Dk, Dv] float32, MUTATED. Returns o."""
    key_query, overlap, decay, value, beta = terms
    read = torch.bmm(key_query, state)
    update = (value - read[:, 0] * decay) * beta
    out = read[:, 1] * decay + update * overlap
    state.mul_(decay[:, :, None]).baddbmm_(key_query[:, 0, :, None], update[:, None, :])
    return out


def _run_segment(q, k, v, g, beta, state, query_lens, chunk_size, num_chunks, state_dtype, ring):
    """`num_chunks` consecutive chunks of every sequence; the arguments are slices of the public op's.

    state [N * Hv, Dk, Dv] float32 (entry); query_lens [N], counted from this segment's first token, may be negative.
    Writes the state after chunk c to ring[c], [num_chunks, N * Hv, Dk, Dv] float32; rows past a sequence's end are
    unspecified, but finite when its state is.
    Returns (out [N, num_chunks, C, Hv, Dv] float32, a strided view; exit state like `state`).
    """
    batch, _, k_heads, k_dim = q.shape
    v_heads, v_dim = v.shape[-2:]
    grouped = (num_chunks, batch, k_heads, v_heads // k_heads, chunk_size)

    # What does not depend on the running state: leading dims [chunk, sequence, key head, value head in the group].
    is_padding = _is_padding(query_lens, num_chunks * chunk_size).view(batch, num_chunks, chunk_size).transpose(0, 1)
    key = _l2_normalise(_to_chunks(k, is_padding))
    query = _l2_normalise(_to_chunks(q, is_padding)).mul_(k_dim**-0.5)
    value = _to_chunks(v, is_padding)
    beta = _to_chunks(beta.unsqueeze(-1), is_padding).view(grouped)
    log_decay = _to_chunks(g.unsqueeze(-1), is_padding).view(grouped).cumsum(-1)

    square = grouped[:3] + (1, chunk_size, chunk_size)
    key_key = torch.bmm(key.flatten(0, 2), key.flatten(0, 2).transpose(1, 2)).view(square)
    query_key = torch.bmm(query.flatten(0, 2), key.flatten(0, 2).transpose(1, 2)).view(square)
    ratio = log_decay[..., :, None] - log_decay[..., None, :]
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu_(1)
    ratio.masked_fill_(future, 0.0).exp_()  # <= 1 below the diagonal; the rest never reaches exp and is cut away below
    strict = (key_key * ratio).mul_(beta[..., None]).tril_(-1)
    scores = ratio.mul_(query_key).tril_().flatten(0, 3)

    solve = unit_lower_inverse(strict.flatten(0, 3))
    decay = torch.exp(log_decay)
    key = key.unsqueeze(3)
    value_part = torch.bmm(solve, value.view(grouped + (v_dim,)).mul_(beta[..., None]).flatten(0, 3))
    key_part = torch.bmm(solve, (key * (beta * decay)[..., None]).flatten(0, 3))
    query_in = (query.unsqueeze(3) * decay[..., None]).flatten(0, 3)
    key_out = (key * torch.exp(log_decay[..., -1:] - log_decay)[..., None]).flatten(0, 3)

    # The serial part: two products into the chunk, one product out of it.
    per_chunk = (num_chunks, batch * v_heads)
    update, key_part, query_in, key_out = (x.unflatten(0, per_chunk) for x in (value_part, key_part, query_in, key_out))
    chunk_decay = decay[..., -1].reshape(per_chunk + (1, 1))
    out = torch.empty_like(update)
    entry = state
    for c in range(num_chunks):
        torch.bmm(query_in[c], state, out=out[c])
        update[c].baddbmm_(key_part[c], state, alpha=-1.0)
        state = torch.mul(state, chunk_decay[c], out=ring[c])
        state.baddbmm_(key_out[c].transpose(1, 2), update[c])
        if state_dtype != torch.float32:
            state.copy_(state.to(state_dtype))
    out.flatten(0, 1).baddbmm_(scores, update.flatten(0, 1))

    # A sequence leaves with its state after the last chunk that has a real token; one that ended before, as it came.
    # One selection per segment is cheaper than one per chunk, and a product with exp(0) would not keep every bit.
    last = ((query_lens - 1) // chunk_size).clamp(0, num_chunks - 1)
    state = _states_after(ring, last).view_as(entry)
    ended = (query_lens <= 0).repeat_interleave(v_heads)[:, None, None]
    torch.where(ended, entry, state, out=state)
    return out.view(num_chunks, batch, v_heads, chunk_size, v_dim).permute(1, 0, 3, 2, 4), state


def _states_after(ring, chunk):
    """A copy [N, ..., Hv * Dk * Dv] of the states of sequence n after chunk[n] of the ring [chunks, N * Hv, Dk, Dv]."""
    batch = chunk.shape[0]
    row = chunk
    if batch > 1:
        sequence = torch.arange(batch, dtype=chunk.dtype, device=chunk.device)
        row = chunk * batch + sequence.view(-1, *[1] * (chunk.dim() - 1))
    states = ring.view(ring.shape[0] * batch, -1).index_select(0, row.flatten())
    return states if chunk.dim() == 1 else states.unflatten(0, chunk.shape)


class _BoundaryStates:
    """The boundary states of one call, out of a ring [chunks, N * Hv, Dk, Dv] that each segment overwrites.

    A run is `period` chunks and holds one boundary of each sequence, in one of the few segments that it meets. Which
    one is data, so each of them leaves a candidate: the state in the ring where the boundary would be. `gather` picks.
    """

    def __init__(self, ring: torch.Tensor, ends: torch.Tensor, period: int, num_chunks: int):
        """ends int32 [N, S] from `boundary_chunks`; one ring is one segment, the last of num_chunks may be shorter."""
        batch, num_runs = ends.shape
        state_size = ring.shape[1:].numel() // batch
        self.period, self.per_segment = period, max(1, ring.shape[0])
        shares = min(-(-period // self.per_segment) + 1, -(-num_chunks // self.per_segment))  # segments a run can meet
        sequence = torch.arange(batch, dtype=ends.dtype, device=ends.device)[:, None]
        run = torch.arange(num_runs, dtype=ends.dtype, device=ends.device)
        self.ring = ring.view(-1, state_size)
        self.candidates = ring.new_empty(num_runs, shares, batch, state_size)
        self.ring_row = (ends % self.per_segment * batch + sequence).t().contiguous()  # [S, N]
        share = ends // self.per_segment - run * period // self.per_segment
        self.candidate_row = (run * shares + share) * batch + sequence  # [N, S]

    def keep_(self, first: int, last: int) -> None:
        """Takes the candidates of the segment of chunks first..last - 1, which the ring holds now."""
        for run in range(first // self.period, -(-last // self.period)):
            share = first // self.per_segment - run * self.period // self.per_segment
            torch.index_select(self.ring, 0, self.ring_row[run], out=self.candidates[run, share])

    def gather(self) -> torch.Tensor:
        """float32 [N, S, Hv * Dk * Dv]."""
        picked = self.candidates.flatten(0, 2).index_select(0, self.candidate_row.flatten())
        return picked.unflatten(0, self.candidate_row.shape)


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 for strictly lower triangular A [B, C, C] float32, by block exponential_buckets. Nothing is mutated.

    Diagonal blocks of at most 16 rows (the largest divisor of C that leaves a power of two; an odd factor above 16
    stays whole) are inverted by forward substitution, then neighbours are merged: the corner of [[L1, 0], [A21, L2]]^-1
    is -L2^-1 A21 L1^-1. Only true sub-inverses are ever formed; they stay of order 1 for keys the polynomial inverses
    blow up on (repeated tokens).
    """
    num, size, _ = strict.shape
    base = size
    while base > BASE_BLOCK and base % 2 == 0:
        base //= 2

    inverse = _forward_substitution(_blocks(strict, base, 0, 0, base))
    while base < size:
        pairs = inverse.view(num, -1, 2, base, base)
        upper, lower = pairs[:, :, 0].reshape(-1, base, base), pairs[:, :, 1].reshape(-1, base, base)
        corner = torch.bmm(lower, torch.bmm(_blocks(strict, base, 1, 0, 2 * base), upper))
        merged = strict.new_zeros(upper.shape[0], 2 * base, 2 * base)
        merged[:, :base, :base] = upper
        merged[:, base:, base:] = lower
        merged[:, base:, :base] = corner.neg_()  # an `out=` that is a view breaks a compiled graph
        inverse, base = merged, 2 * base
    return inverse.view(num, size, size)


def _blocks(matrix: torch.Tensor, size: int, row: int, column: int, step: int) -> torch.Tensor:
    """Block (row, column), [size, size], of every step x step diagonal square: [B * C / step, size, size]."""
    num, edge, _ = matrix.shape
    squares = matrix.view(num, edge // step, step, edge // step, step).diagonal(dim1=1, dim2=3)  # [B, step, step, .]
    picked = squares[:, row * size : (row + 1) * size, column * size : (column + 1) * size]
    return picked.permute(0, 3, 1, 2).reshape(-1, size, size)


def _forward_substitution(strict: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 for small strictly lower A [M, b, b]: b - 1 rank-one updates, elementwise, M being the vector lane."""
    num, size, _ = strict.shape
    lanes = strict.permute(1, 2, 0).contiguous()
    inverse = torch.eye(size, dtype=strict.dtype, device=strict.device)[..., None].repeat(1, 1, num)
    for j in range(size - 1):
        inverse[j + 1 :, : j + 1] -= lanes[j + 1 :, j, None] * inverse[None, j, : j + 1]
    return inverse.permute(2, 0, 1).contiguous()


def _to_chunks(x: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    """x [N, L, H, D] -> float32 copy [chunks, N, H, C, D], zero by selection where is_padding [chunks, N, C]."""
    num_chunks, batch, chunk_size = is_padding.shape
    short = num_chunks * chunk_size - x.shape[1]
    if short:
        x = F.pad(x, (0, 0, 0, 0, 0, short))
    chunks = torch.empty(num_chunks, batch, x.shape[2], chunk_size, x.shape[3], dtype=torch.float32, device=x.device)
    chunks.copy_(x.unflatten(1, (num_chunks, chunk_size)).permute(1, 0, 3, 2, 4))
    return chunks.masked_fill_(is_padding[:, :, None, :, None], 0.0)


def _is_padding(query_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """bool [N, num_tokens]: the token lies at or after its sequence's end."""
    return torch.arange(num_tokens, dtype=query_lens.dtype, device=query_lens.device) >= query_lens[:, None]


def _l2_normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
