# SPDX-License-Identifier: Apache-2.0
"""The causal convolution: right against a float64 sum, its state an exact copy, its bits those of the unsplit run."""

import pytest
import torch

from tests.unit.ops.oracles import NAN, VARIANTS, error, lengths_of
from vllm_gaudi.ops.causal_conv1d.reference import causal_conv1d
from vllm_gaudi.ops.registry import resolve

KERNELS = [2, 3, 4]
variants = pytest.mark.parametrize("variant", VARIANTS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
biases = pytest.mark.parametrize("with_bias", [False, True], ids=["nobias", "bias"])


def inputs(batch, tokens, channels, kernel, dtype, with_bias=False):
    x, conv_state = torch.randn(batch, tokens, channels).to(dtype), torch.randn(batch, kernel - 1, channels).to(dtype)
    weight = torch.randn(channels, kernel).to(dtype)
    return x, conv_state, weight, torch.randn(channels).to(dtype) if with_bias else None


@variants
@biases
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_short_length_gives_the_sum_and_the_last_real_inputs(variant, with_bias, kernel):
    tokens = kernel + 4
    x, conv_state, weight, bias = inputs(tokens + 1, tokens, 5, kernel, torch.float32, with_bias)
    query_lens = torch.arange(tokens + 1, dtype=torch.int32)  # 0..T
    poisoned = x.clone()
    for n in range(tokens + 1):
        poisoned[n, n:] = NAN
    y, new_conv_state = resolve("causal_conv1d_prefill", variant)(poisoned, conv_state, weight, bias, query_lens)
    want, _ = causal_conv1d(x, conv_state, weight, bias)
    for n in range(tokens + 1):
        if n:
            assert error(y[n, :n], want[n, :n]) < 3e-7
        assert torch.equal(y[n, n:], torch.zeros_like(y[n, n:]))
        assert torch.equal(new_conv_state[n], torch.cat((conv_state[n], x[n, :n]))[-(kernel - 1) :])


@variants
@dtypes
def test_update_is_prefill_of_one_token(variant, dtype):
    x, conv_state, weight, bias = inputs(7, 1, 33, 4, dtype, True)
    y, new_conv_state = resolve("causal_conv1d_prefill", variant)(
        x, conv_state, weight, bias, torch.ones(7, dtype=torch.int32)
    )
    one, one_conv_state = resolve("causal_conv1d_update", variant)(x[:, 0], conv_state, weight, bias)
    assert torch.equal(one, y[:, 0])
    assert torch.equal(one_conv_state, new_conv_state)
    assert (one.dtype, one_conv_state.dtype) == (dtype, dtype)
    assert torch.equal(one_conv_state[:, -1], x[:, 0])


@pytest.mark.parametrize(
    ("threads", "variant", "dtype", "with_bias"),
    [
        (1, "cpu", torch.float32, False),
        (1, "cpu", torch.bfloat16, True),
        (1, "hpu", torch.float32, True),
        (1, "hpu", torch.bfloat16, False),
        (2, "cpu", torch.float32, True),
    ],
    indirect=["threads"],
)
def test_any_cut_changes_no_bit(threads, variant, dtype, with_bias):
    tokens, channels = 600, 66
    prefill = resolve("causal_conv1d_prefill", variant)
    x, first_tail, weight, bias = inputs(1, tokens, channels, 4, dtype, with_bias)
    want, want_tail = prefill(x, first_tail, weight, bias, lengths_of(tokens))
    for cuts in ([0, 1, 2, 3, 600], [0, 2, 599, 600], [0, 256, 512, 600], [0, 137, 600]):
        conv_state, outs = first_tail, []
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            y, conv_state = prefill(x[:, start:stop].contiguous(), conv_state, weight, bias, lengths_of(stop - start))
            outs.append(y)
        assert torch.equal(torch.cat(outs, 1), want)
        assert torch.equal(conv_state, want_tail)


@pytest.mark.parametrize(("threads", "variant"), [(1, "cpu"), (1, "hpu"), (2, "cpu")], indirect=["threads"])
def test_a_ragged_batch_and_its_padding_change_no_bit(threads, variant):
    prefill = resolve("causal_conv1d_prefill", variant)
    x, conv_state, weight, _ = inputs(4, 521, 66, 4, torch.bfloat16)
    query_lens = lengths_of(521, 2, 0, 100)
    for n, length in enumerate(query_lens):
        x[n, length:] = NAN
    y, new_conv_state = prefill(x, conv_state, weight, None, query_lens)
    assert bool(y.isfinite().all())
    for n, length in enumerate(query_lens):
        alone, alone_tail = prefill(
            x[n : n + 1, :length].contiguous(), conv_state[n : n + 1], weight, None, lengths_of(int(length))
        )
        assert torch.equal(y[n : n + 1, :length], alone)
        assert torch.equal(new_conv_state[n : n + 1], alone_tail)


@variants
def test_the_tail_keeps_every_bit_pattern(variant):
    patterns = torch.tensor([-0.0, 1e-45, -1e-45, float("inf"), -float("inf"), NAN, 3.4e38])
    conv_state = patterns.expand(1, 3, -1).contiguous()
    x = torch.randn(1, 2, 7)
    _, new_conv_state = resolve("causal_conv1d_prefill", variant)(x, conv_state, torch.randn(7, 4), None, lengths_of(1))
    assert torch.equal(new_conv_state[0, :2].view(torch.int32), conv_state[0, 1:].view(torch.int32))


@variants
def test_a_rounded_tail_is_refused(variant):
    x, conv_state, weight, bias = inputs(1, 4, 3, 4, torch.float32)
    for name, args in (("causal_conv1d_prefill", (lengths_of(4),)), ("causal_conv1d_update", ())):
        with pytest.raises(ValueError, match="torch.bfloat16 but its inputs are torch.float32"):
            resolve(name, variant)(x if args else x[:, 0], conv_state.bfloat16(), weight, bias, *args)


@variants
def test_inputs_are_not_written(variant):
    args = (*inputs(2, 6, 3, 4, torch.float32, True), lengths_of(6, 3))
    before = [x.clone() for x in args]
    resolve("causal_conv1d_prefill", variant)(*args)
    assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True))


def test_no_unwritten_scratch_is_read(poisoned_empty):
    x, conv_state, weight, _ = inputs(2, 600, 5, 4, torch.float32)
    y, new_conv_state = resolve("causal_conv1d_prefill", "cpu")(x, conv_state, weight, None, lengths_of(600, 10))
    assert bool(y.isfinite().all())
    assert bool(new_conv_state.isfinite().all())


#    tokens every query_lens        first boundary of each sequence
BOUNDARIES = [
    (20, 8, (20,), (8,)),
    (24, 8, (24,), (8,)),  # the last boundary is the end
    (21, 8, (21, 2, 0), (1, 2, 8)),  # boundaries inside the first conv_state, and past the ends
    (10, 64, (10, 5, 10), (3, 5, 64)),  # one run, longer than T
    (9, 1, (9, 4, 1), (1, 1, 1)),
]


@variants
@dtypes
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("tokens", "every", "query_lens", "first"), BOUNDARIES)
def test_a_boundary_tail_is_the_new_tail_of_a_run_that_ends_there(
    variant, dtype, kernel, tokens, every, query_lens, first
):
    prefill = resolve("causal_conv1d_prefill", variant)
    x, conv_state, weight, bias = inputs(len(query_lens), tokens, 5, kernel, dtype, True)
    for n, length in enumerate(query_lens):
        x[n, length:] = NAN
    plain = prefill(x, conv_state, weight, bias, lengths_of(*query_lens))
    *same, conv_states = prefill(
        x,
        conv_state,
        weight,
        bias,
        lengths_of(*query_lens),
        boundary_offset=lengths_of(*first),
        boundary_interval=every,
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    assert conv_states.shape == (len(query_lens), -(-tokens // every), kernel - 1, 5)
    assert conv_states.dtype == dtype
    assert bool(conv_states.isfinite().all())
    ends = [(n, i, f + i * every) for n, f in enumerate(first) for i in range(conv_states.shape[1])]
    reached = [(n, i, end) for n, i, end in ends if end <= query_lens[n]]
    assert reached
    for n, i, end in reached:
        alone = x[n : n + 1], conv_state[n : n + 1]
        _, split = prefill(alone[0][:, :end].contiguous(), alone[1], weight, bias, lengths_of(end))
        assert torch.equal(conv_states[n : n + 1, i], split)
        _, early = prefill(*alone, weight, bias, lengths_of(end - 1))
        assert not torch.equal(conv_states[n : n + 1, i], early)  # one token off would show


@variants
def test_no_first_boundary_leads_out_of_range(variant):
    x, conv_state, weight, _ = inputs(3, 10, 5, 4, torch.float32)
    *_, conv_states = resolve("causal_conv1d_prefill", variant)(
        x,
        conv_state,
        weight,
        None,
        lengths_of(10, 0, 10),
        boundary_offset=lengths_of(0, -9, 10**6),
        boundary_interval=8,
    )
    assert conv_states.shape == (3, 2, 3, 5)
    assert bool(conv_states.isfinite().all())


@variants
@pytest.mark.parametrize("every", [0, -4])
def test_boundaries_without_a_distance_are_refused(variant, every):
    x, conv_state, weight, _ = inputs(1, 4, 3, 4, torch.float32)
    with pytest.raises(ValueError, match=f"boundary_interval is {every}: it must be positive"):
        resolve("causal_conv1d_prefill", variant)(
            x, conv_state, weight, None, lengths_of(4), boundary_offset=lengths_of(1), boundary_interval=every
        )
