# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: right against a float64 recurrence, and the same bits however a sequence arrives."""

import pytest
import torch

from tests.unit.ops.oracles import NAN, VARIANTS, delta_rule_inputs, error, lengths_of
from vllm_gaudi.ops.gated_delta_rule import cpu, hpu
from vllm_gaudi.ops.gated_delta_rule.gating import gdn_gating
from vllm_gaudi.ops.gated_delta_rule.reference import gated_delta_rule
from vllm_gaudi.ops.registry import resolve

# Error allowed, as a multiple of the float32 token recurrence's own error against float64, plus one float32 ulp or so.
RATIO, FLOOR = 1.5, 1.2e-7

#            Hk Hv Dk  Dv  C
SHAPES = [
    (2, 2, 16, 16, 16),
    (1, 3, 16, 24, 12),
    (2, 4, 32, 16, 8),
    (1, 2, 24, 32, 20),
]


def every_chunk(batch, chunk):
    """The arguments that ask for the state after every chunk."""
    return {"boundary_offset": torch.full((batch,), chunk, dtype=torch.int32), "boundary_interval": chunk}


def bound(args, expected, pick):
    return RATIO * error(pick(gated_delta_rule(*args, dtype=torch.float32)), expected) + FLOOR


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("k_heads", "v_heads", "k_dim", "v_dim", "chunk"), SHAPES)
def test_every_length_up_to_three_chunks_and_five_follows_the_recurrence(
    variant, k_heads, v_heads, k_dim, v_dim, chunk
):
    tokens = 3 * chunk + 5
    args = delta_rule_inputs(tokens, tokens, k_heads, v_heads, k_dim, v_dim)  # sequence n has n + 1 tokens
    query_lens = torch.arange(1, tokens + 1, dtype=torch.int32)
    out, state = resolve("chunk_gated_delta_rule", variant)(*args, query_lens, chunk_size=chunk)
    want_out, want_states = gated_delta_rule(*args)
    got_out, got_states = gated_delta_rule(*args, dtype=torch.float32)
    for n in range(tokens):
        used = slice(0, n + 1)
        assert error(out[n, used], want_out[n, used]) <= RATIO * error(got_out[n, used], want_out[n, used]) + FLOOR
        assert error(state[n], want_states[n, n]) <= RATIO * error(got_states[n, n], want_states[n, n]) + FLOOR
        assert torch.equal(out[n, n + 1 :], torch.zeros_like(out[n, n + 1 :]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 34, 48, 64, 128])
def test_chunk_sizes_agree_with_the_recurrence(variant, chunk):
    args = delta_rule_inputs(1, 150, 2, 4, 32, 32)
    out, state = resolve("chunk_gated_delta_rule", variant)(*args, lengths_of(150), chunk_size=chunk)
    want_out, want_states = gated_delta_rule(*args)
    assert error(out, want_out) <= bound(args, want_out, lambda r: r[0])
    assert error(state, want_states[:, -1]) <= bound(args, want_states[:, -1], lambda r: r[1][:, -1])


def hard_keys(cosine: float, tokens: int):
    """Keys of a repeated prompt: pairwise cosine as given, writes at full strength, almost no decay."""
    q, k, v, g, beta, state = delta_rule_inputs(1, tokens, 1, 2, 32, 32)
    same = torch.nn.functional.normalize(k[:, :1], dim=-1)
    k = cosine**0.5 * same + (1 - cosine) ** 0.5 * torch.nn.functional.normalize(k, dim=-1)
    return q, k, v, torch.full_like(g, -1e-6), torch.full_like(beta, 0.9995), state


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cosine", [0.6, 0.99, 1.0])
@pytest.mark.parametrize("chunk", [48, 64, 128])
def test_repeated_tokens_stay_accurate(variant, cosine, chunk):
    args = hard_keys(cosine, 260)
    out, state = resolve("chunk_gated_delta_rule", variant)(*args, lengths_of(260), chunk_size=chunk)
    want_out, want_states = gated_delta_rule(*args)
    assert error(out, want_out) <= bound(args, want_out, lambda r: r[0])
    assert error(state, want_states[:, -1]) <= bound(args, want_states[:, -1], lambda r: r[1][:, -1])


@pytest.mark.parametrize("module", [cpu, hpu], ids=VARIANTS)
@pytest.mark.parametrize("size", [1, 5, 8, 12, 16, 32, 48, 64, 80, 128])
@pytest.mark.parametrize("kind", ["random", "identical"])
def test_triangular_inverse(module, size, kind):
    entries = torch.randn(3, size, size) * 0.3 if kind == "random" else torch.full((3, size, size), 0.9995)
    strict = entries.tril(-1)
    want = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + strict.double())
    assert error(module.unit_lower_inverse(strict), want) < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_strong_decay_forgets_without_overflow(variant):
    q, k, v, g, beta, state = delta_rule_inputs(1, 100, 1, 2, 16, 16)
    args = q, k, v, g * 400, beta, state
    out, final = resolve("chunk_gated_delta_rule", variant)(*args, lengths_of(100))
    want_out, want_states = gated_delta_rule(*args)
    assert error(out, want_out) < 1e-6
    assert error(final, want_states[:, -1]) < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("k_heads", "v_heads"), [(1, 1), (2, 6), (4, 4)])
def test_one_token_form_follows_the_recurrence(variant, k_heads, v_heads):
    q, k, v, g, beta, state = args = delta_rule_inputs(5, 1, k_heads, v_heads, 32, 48)
    step = resolve("recurrent_gated_delta_rule", variant)
    out, new = step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
    want_out, want_states = gated_delta_rule(*args)
    assert error(out, want_out[:, 0]) <= bound(args, want_out, lambda r: r[0])
    assert error(new, want_states[:, 0]) <= bound(args, want_states, lambda r: r[1])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_untouched_inputs(variant, dtype, state_dtype):
    args = (*delta_rule_inputs(2, 20, 1, 2, 16, 16, dtype, state_dtype), lengths_of(20, 7))
    before = [x.clone() for x in args]
    out, state, kept = resolve("chunk_gated_delta_rule", variant)(*args, chunk_size=8, **every_chunk(2, 8))
    assert (out.dtype, state.dtype, kept.dtype) == (dtype, state_dtype, state_dtype)
    assert (out.shape, state.shape, kept.shape) == ((2, 20, 2, 16), (2, 2, 16, 16), (2, 3, 2, 16, 16))
    one_out, one_state = resolve("recurrent_gated_delta_rule", variant)(*(x[:, 0] for x in args[:5]), args[5])
    assert (one_out.dtype, one_state.dtype) == (dtype, state_dtype)
    assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True))
    assert state.untyped_storage().data_ptr() != args[5].untyped_storage().data_ptr()
    want_out, want_states = gated_delta_rule(*args[:6])
    tolerance = 2e-2 if torch.bfloat16 in (dtype, state_dtype) else 1e-6
    assert error(state[0], want_states[0, 19]) < tolerance
    assert error(state[1], want_states[1, 6]) < tolerance
    assert error(kept[0, :2], want_states[0, [7, 15]]) < tolerance
    assert error(out[0], want_out[0]) < tolerance


def test_uneven_heads_are_refused():
    args = delta_rule_inputs(1, 4, 2, 3, 8, 8)
    for variant in VARIANTS:
        with pytest.raises(ValueError, match="3 value heads cannot share 2 key heads"):
            resolve("chunk_gated_delta_rule", variant)(*args, lengths_of(4))
        with pytest.raises(ValueError, match="3 value heads cannot share 2 key heads"):
            resolve("recurrent_gated_delta_rule", variant)(*(x[:, 0] for x in args[:5]), args[5])


def test_gates_against_their_formula():
    a, b = torch.randn(3, 5, 4) * 30, torch.randn(3, 5, 4) * 30
    A_log, dt_bias = torch.randn(4), torch.randn(4)
    g, beta = gdn_gating(A_log, a.bfloat16(), b.bfloat16(), dt_bias)
    x = a.bfloat16().double() + dt_bias.double()
    assert (g.dtype, beta.dtype) == (torch.float32, torch.float32)
    assert bool((g <= 0).all())
    torch.testing.assert_close(g.double(), -A_log.double().exp() * torch.logaddexp(x, x * 0), rtol=3e-6, atol=1e-30)
    torch.testing.assert_close(beta.double(), b.bfloat16().double().sigmoid(), rtol=1e-6, atol=1e-30)


# The bitwise promises are the CPU variant's. --------------------------------------------------------------------------

#         tokens C   Hk Hv Dk  Dv  activations     state
BITWISE = [
    (77, 16, 2, 2, 16, 16, torch.float32, torch.float32),
    (77, 16, 1, 3, 32, 16, torch.bfloat16, torch.float32),
    (77, 12, 2, 4, 16, 24, torch.float32, torch.bfloat16),
    (700, 64, 1, 2, 32, 32, torch.bfloat16, torch.bfloat16),
    (700, 128, 2, 4, 32, 32, torch.float32, torch.float32),
]
bitwise_shapes = pytest.mark.parametrize(
    ("threads", "tokens", "chunk", "k_heads", "v_heads", "k_dim", "v_dim", "dtype", "state_dtype"),
    [(1, *shape) for shape in BITWISE] + [(2, 205, 64, 1, 2, 64, 64, torch.float32, torch.float32)],
    indirect=["threads"],
)


def whole(args, chunk, **kwargs):
    return cpu.chunk_gated_delta_rule(
        *args, torch.full((args[0].shape[0],), args[0].shape[1], dtype=torch.int32), chunk_size=chunk, **kwargs
    )


def cut(args, start, stop, state):
    return (*(x[:, start:stop].contiguous() for x in args[:5]), state)


@bitwise_shapes
def test_splits_on_the_chunk_grid_change_no_bit(
    threads, tokens, chunk, k_heads, v_heads, k_dim, v_dim, dtype, state_dtype
):
    args = delta_rule_inputs(1, tokens, k_heads, v_heads, k_dim, v_dim, dtype, state_dtype)
    want_out, want_state, chunk_states = whole(args, chunk, **every_chunk(1, chunk))
    for pieces in ([1, 1, 1], [2], [1, 2], [tokens // chunk]):
        state, start, outs = args[5], 0, []
        for length in [p * chunk for p in pieces] + [tokens]:
            stop = min(start + length, tokens)
            out, state = whole(cut(args, start, stop, state), chunk)
            if stop < tokens:
                assert torch.equal(state, chunk_states[:, stop // chunk - 1])
            outs.append(out)
            start = stop
        assert torch.equal(torch.cat(outs, 1), want_out)
        assert torch.equal(state, want_state)


@bitwise_shapes
def test_padding_changes_no_bit_even_if_it_is_nan(
    threads, tokens, chunk, k_heads, v_heads, k_dim, v_dim, dtype, state_dtype
):
    args = delta_rule_inputs(1, tokens, k_heads, v_heads, k_dim, v_dim, dtype, state_dtype)
    want_out, want_state, want_chunks = whole(args, chunk, **every_chunk(1, chunk))
    num_whole = tokens // chunk
    for padded in (tokens + 1, (tokens // chunk + 1) * chunk, (tokens // chunk + 3) * chunk + 2):
        for filler in (0.0, NAN):
            bucket = [torch.full((1, padded, *x.shape[2:]), filler, dtype=x.dtype) for x in args[:5]]
            for full, real in zip(bucket, args[:5], strict=True):
                full[:, :tokens] = real
            out, state, chunk_states = cpu.chunk_gated_delta_rule(
                *bucket, args[5], lengths_of(tokens), chunk_size=chunk, **every_chunk(1, chunk)
            )
            assert torch.equal(out[:, :tokens], want_out)
            assert torch.equal(out[:, tokens:], torch.zeros_like(out[:, tokens:]))
            assert torch.equal(state, want_state)
            assert torch.equal(chunk_states[:, :num_whole], want_chunks[:, :num_whole])
            assert bool(chunk_states.isfinite().all())


@bitwise_shapes
def test_a_ragged_batch_changes_no_bit(threads, tokens, chunk, k_heads, v_heads, k_dim, v_dim, dtype, state_dtype):
    args = delta_rule_inputs(4, tokens, k_heads, v_heads, k_dim, v_dim, dtype, state_dtype)
    query_lens = lengths_of(tokens, 1, 0, 2 * chunk + 3)
    poisoned = [x.clone() for x in args]
    for n, length in enumerate(query_lens):
        for x in poisoned[:5]:
            x[n, length:] = NAN
    out, state = cpu.chunk_gated_delta_rule(*poisoned, query_lens, chunk_size=chunk)
    for n, length in enumerate(query_lens):
        alone = [x[n : n + 1] for x in args]
        want_out, want_state = whole(cut(alone, 0, int(length), alone[5]), chunk)
        assert torch.equal(out[n : n + 1, :length], want_out)
        assert torch.equal(state[n : n + 1], want_state)
    assert bool(out.isfinite().all())
    assert torch.equal(state[2], args[5][2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_finished_sequence_keeps_every_bit_of_its_state(variant):
    """Also the sign of zero and values that a product with exp(0) or a sum with 0 would touch."""
    q, k, v, g, beta, state = delta_rule_inputs(1, 40, 1, 1, 8, 8)
    state[0, 0, 0] = torch.tensor([-0.0, 0.0, NAN, float("inf"), -float("inf"), 1e-45, -1e-45, 3.4e38])
    out, final = resolve("chunk_gated_delta_rule", variant)(q, k, v, g, beta, state, lengths_of(0), chunk_size=16)
    assert torch.equal(final.view(torch.int32), state.view(torch.int32))
    assert torch.equal(out, torch.zeros_like(out))


def test_no_tokens_at_all_copy_the_state():
    args = delta_rule_inputs(2, 0, 1, 1, 8, 8)
    out, final, chunk_states = whole(args, 16, **every_chunk(2, 16))
    assert (out.shape, chunk_states.shape) == ((2, 0, 1, 8), (2, 0, 1, 8, 8))
    assert torch.equal(final, args[5])
    assert final.data_ptr() != args[5].data_ptr()


def test_one_token_form_is_independent_of_its_batch(threads):
    q, k, v, g, beta, state = delta_rule_inputs(37, 1, 2, 4, 64, 64)
    rows = [x[:, 0] for x in (q, k, v, g, beta)] + [state]
    out, new = cpu.recurrent_gated_delta_rule(*rows)
    for start, stop in ((0, 1), (3, 5), (7, 23), (36, 37)):
        some_out, some_new = cpu.recurrent_gated_delta_rule(*(x[start:stop].clone() for x in rows))
        assert torch.equal(some_out, out[start:stop])
        assert torch.equal(some_new, new[start:stop])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_states_updated_where_they_lie_are_those_of_the_one_token_form(threads, state_dtype):
    q, k, v, g, beta, _ = (x[:, 0] for x in delta_rule_inputs(6, 1, 2, 4, 64, 64))
    pool = torch.randn(9, 4, 64, 64).to(state_dtype)
    before, rows = pool.clone(), [7, 0, 3, 8]
    args = (q, k, v, g, beta)
    out = cpu.recurrent_gated_delta_rule_(*args, [pool[row] for row in rows])
    want_out, want = cpu.recurrent_gated_delta_rule(*(x[:4] for x in args), before[rows])
    assert torch.equal(out[:4], want_out) and torch.equal(pool[rows], want)
    assert not out[4:].any(), "pads"
    untouched = [row for row in range(9) if row not in rows]
    assert torch.equal(pool[untouched], before[untouched])


def test_gates_are_independent_of_their_batch(threads):
    a, b, A_log, dt_bias = torch.randn(3001, 5), torch.randn(3001, 5), torch.randn(5), torch.randn(5)
    g, beta = gdn_gating(A_log, a, b, dt_bias)
    for start, stop in ((0, 1), (1, 4), (5, 900), (2999, 3001)):
        some_g, some_beta = gdn_gating(A_log, a[start:stop].clone(), b[start:stop].clone(), dt_bias)
        assert torch.equal(some_g, g[start:stop])
        assert torch.equal(some_beta, beta[start:stop])


def test_no_unwritten_scratch_is_read(poisoned_empty):
    args = delta_rule_inputs(2, 75, 1, 2, 16, 16)
    for every in (16, 32, 48, 64, 160):
        results = cpu.chunk_gated_delta_rule(
            *args, lengths_of(75, 20), chunk_size=16, boundary_offset=lengths_of(16, every), boundary_interval=every
        )
        assert all(bool(x.isfinite().all()) for x in results)


# Boundaries. ----------------------------------------------------------------------------------------------------------

#    tokens C    every query_lens        first boundary of each sequence
BOUNDARIES = [
    (77, 16, 16, (77,), (16,)),  # T is no multiple; the last boundary lies past it
    (96, 16, 32, (96,), (32,)),  # the last boundary is the end
    (96, 16, 32, (90, 3, 0), (16, 32, 16)),  # boundaries past the ends
    (40, 16, 160, (40, 17, 40), (16, 32, 160)),  # one run, longer than T
    (1100, 64, 2**30, (1100, 1000, 5), (1024, 512, 64)),  # one run without end: no memory in proportion to it
    (700, 64, 128, (700, 512, 640), (128, 64, 128)),  # several runs to a segment of 512 tokens
    (1100, 64, 192, (1100, 1, 577), (64, 128, 192)),  # runs that segments cut
    (1200, 64, 576, (1200, 1152, 600), (64, 576, 512)),  # a run a little longer than a segment
    (2100, 64, 1024, (2100, 1500, 2048), (1024, 448, 64)),  # a run of several segments
    (1300, 600, 600, (1300, 1200, 600), (600, 600, 600)),  # a segment of one chunk
    (1300, 130, 260, (1300, 905, 260), (130, 260, 130)),  # a segment of three chunks
]
boundaries = pytest.mark.parametrize(("tokens", "chunk", "every", "query_lens", "first"), BOUNDARIES)


def inside(query_lens, first, every, tokens):
    """(sequence, entry, tokens before it) of every boundary that its sequence reaches."""
    entries = range(-(-tokens // every))
    reached = [
        (n, i, f + i * every)
        for n, f in enumerate(first)
        for i in entries
        if f + i * every <= min(query_lens[n], tokens)
    ]
    assert reached
    return reached


@boundaries
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_boundary_state_is_the_final_state_of_a_run_that_ends_there(
    state_dtype, tokens, chunk, every, query_lens, first
):
    args = delta_rule_inputs(len(query_lens), tokens, 1, 2, 16, 16, torch.float32, state_dtype)
    plain = cpu.chunk_gated_delta_rule(*args, lengths_of(*query_lens), chunk_size=chunk)
    *same, kept = cpu.chunk_gated_delta_rule(
        *args, lengths_of(*query_lens), chunk_size=chunk, boundary_offset=lengths_of(*first), boundary_interval=every
    )
    assert all(torch.equal(x, y) for x, y in zip(plain, same, strict=True))
    assert kept.shape == (len(query_lens), -(-tokens // every), 2, 16, 16)
    assert kept.dtype == state_dtype
    assert bool(kept.isfinite().all())
    for n, i, end in inside(query_lens, first, every, tokens):
        alone = [x[n : n + 1] for x in args]
        assert torch.equal(kept[n : n + 1, i], whole(cut(alone, 0, end, alone[5]), chunk)[1])
        if end == query_lens[n]:
            assert torch.equal(kept[n, i], same[1][n])
        for other in (end - chunk, min(end + chunk, tokens)):  # one chunk off would show
            if other != end:
                assert not torch.equal(kept[n : n + 1, i], whole(cut(alone, 0, other, alone[5]), chunk)[1])


# A chunk of 600 takes as long as all others together, and it is there for the CPU's segments.
@pytest.mark.parametrize(
    ("tokens", "chunk", "every", "query_lens", "first"),
    [pytest.param(*row, marks=pytest.mark.soak if row[1] == 600 else ()) for row in BOUNDARIES],
)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_boundary_states_for_gaudi_agree_with_its_own_split_runs(state_dtype, tokens, chunk, every, query_lens, first):
    args = delta_rule_inputs(len(query_lens), tokens, 1, 2, 16, 16, torch.float32, state_dtype)
    asked = {"boundary_offset": lengths_of(*first), "boundary_interval": every}
    plain = hpu.chunk_gated_delta_rule(*args, lengths_of(*query_lens), chunk_size=chunk)
    *same, kept = hpu.chunk_gated_delta_rule(*args, lengths_of(*query_lens), chunk_size=chunk, **asked)
    want = cpu.chunk_gated_delta_rule(*args, lengths_of(*query_lens), chunk_size=chunk, **asked)[2]
    assert all(torch.equal(x, y) for x, y in zip(plain, same, strict=True))
    assert (kept.shape, kept.dtype) == (want.shape, want.dtype)
    assert bool(kept.isfinite().all())
    tolerance = 1e-6 if state_dtype == torch.float32 else 1e-2
    for n, i, end in inside(query_lens, first, every, tokens):
        alone = [x[n : n + 1] for x in args]
        split = hpu.chunk_gated_delta_rule(*cut(alone, 0, end, alone[5]), lengths_of(end), chunk_size=chunk)[1]
        assert error(kept[n : n + 1, i], split) < tolerance
        assert error(kept[n, i], want[n, i]) < tolerance
        if end > chunk:  # one chunk off would show
            early = hpu.chunk_gated_delta_rule(*cut(alone, 0, end - chunk, alone[5]), lengths_of(end - chunk))[1]
            assert error(kept[n : n + 1, i], early) > 0.1


def test_padding_changes_no_bit_of_a_boundary_state(threads):
    args = delta_rule_inputs(2, 700, 1, 2, 32, 32)
    poisoned = [x.clone() for x in args]
    for x in poisoned[:5]:
        x[0, 650:], x[1, 130:] = NAN, NAN
    asked = {"boundary_offset": lengths_of(64, 128), "boundary_interval": 128}
    clean = whole(args, 64, **asked)[2]
    kept = cpu.chunk_gated_delta_rule(*poisoned, lengths_of(650, 130), **asked)[2]
    assert torch.equal(kept[0, :5], clean[0, :5])  # boundaries 64, 192, .. 576
    assert torch.equal(kept[1, :1], clean[1, :1])
    assert bool(kept.isfinite().all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_first_boundary_leads_out_of_range(variant):
    args = delta_rule_inputs(4, 50, 1, 1, 8, 8)
    *_, kept = resolve("chunk_gated_delta_rule", variant)(
        *args,
        lengths_of(50, 50, 0, 50),
        chunk_size=16,
        boundary_offset=lengths_of(0, -64, 0, 10**6),
        boundary_interval=32,
    )
    assert kept.shape == (4, 2, 1, 8, 8)
    assert bool(kept.isfinite().all())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("every", [0, -16, 8, 24])
def test_boundaries_off_the_chunk_grid_are_refused(variant, every):
    args = delta_rule_inputs(1, 20, 1, 1, 8, 8)
    with pytest.raises(
        ValueError, match=f"boundary_interval is {every}: it must be a positive multiple of chunk_size 16"
    ):
        resolve("chunk_gated_delta_rule", variant)(
            *args, lengths_of(20), chunk_size=16, boundary_offset=lengths_of(16), boundary_interval=every
        )
