# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: right against a float64 loop over rows, and a row's bits depend on the row alone."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.unit.ops.oracles import NAN, error
from vllm_gaudi.ops.linear import GemmRows
from vllm_gaudi.ops.moe import hpu as moe_hpu
from vllm_gaudi.ops.moe import reference
from vllm_gaudi.ops.moe.cpu import experts, prepare_experts
from vllm_gaudi.ops.moe.routing import route

#         E  k  H   I
SHAPES = [(4, 2, 16, 8), (8, 8, 24, 16), (5, 1, 16, 12)]
shapes = pytest.mark.parametrize(("num_experts", "top_k", "hidden", "inner"), SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def weights_of(num_experts, hidden, inner, dtype):
    w13 = torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5
    return w13.to(dtype), (torch.randn(num_experts, hidden, inner) * inner**-0.5).to(dtype)


@pytest.mark.parametrize("renormalize", [False, True])
@dtypes
def test_routing_is_a_softmax(renormalize, dtype):
    logits = (torch.randn(9, 7) * 5).to(dtype)
    weights, ids = route(logits, 3, renormalize)
    assert (weights.dtype, ids.dtype, weights.shape, ids.shape) == (torch.float32, torch.int32, (9, 3), (9, 3))
    probs = logits.double().softmax(-1)
    want = probs.gather(1, ids.long())
    assert torch.equal(want, probs.sort(-1, descending=True).values[:, :3])
    torch.testing.assert_close(
        weights.double(), want / want.sum(-1, keepdim=True) if renormalize else want, rtol=1e-6, atol=0
    )


@shapes
@dtypes
@pytest.mark.parametrize("gemm_rows", [None, GemmRows(16)], ids=["whole", "tiled"])
def test_experts_are_their_weighted_sum(num_experts, top_k, hidden, inner, dtype, gemm_rows):
    x, (w13, w2) = torch.randn(11, hidden).to(dtype), weights_of(num_experts, hidden, inner, dtype)
    weights, ids = route(torch.randn(11, num_experts), top_k, True)
    out = experts(x, prepare_experts(w13, w2), weights, ids, gemm_rows=gemm_rows)
    assert out.dtype == dtype
    assert error(out, reference.experts(x, w13, w2, weights, ids)) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(
    ("threads", "num_experts", "top_k", "hidden", "inner"),
    [(1, *shape) for shape in SHAPES] + [(2, 4, 2, 16, 8)],
    indirect=["threads"],
)
@dtypes
def test_bits_do_not_depend_on_the_other_rows(threads, num_experts, top_k, hidden, inner, dtype):
    x, (w13, w2) = torch.randn(70, hidden).to(dtype), weights_of(num_experts, hidden, inner, dtype)
    prepared, logits = prepare_experts(w13, w2), torch.randn(70, num_experts)
    x[40], logits[40] = NAN, 0.0  # a poisoned row harms nobody else

    def run(rows):
        weights, ids = route(logits[rows].clone(), top_k, False)
        return experts(x[rows].clone(), prepared, weights, ids, gemm_rows=GemmRows(16))

    want = run(slice(0, 70))
    for rows in (slice(0, 1), slice(3, 20), slice(39, 70), slice(69, 70)):
        torch.testing.assert_close(run(rows), want[rows], rtol=0, atol=0, equal_nan=True)
    finite = want.isfinite().all(-1)
    assert not finite[40]
    assert int(finite.sum()) == 69


def test_an_expert_nobody_chose_may_hold_anything():
    w13, w2 = weights_of(3, 8, 4, torch.float32)
    w13[1] = NAN
    x, ids = torch.randn(2, 8), torch.tensor([[0, 2], [2, 0]], dtype=torch.int32)
    out = experts(x, prepare_experts(w13, w2), torch.full((2, 2), 0.5), ids)
    assert bool(out.isfinite().all())


def test_for_gaudi_each_expert_is_a_view_and_calls_are_ranges_of_them():
    w13, w2 = weights_of(150, 8, 4, torch.float32)
    prepared = moe_hpu.prepare_experts(w13, w2)
    assert [(first, len(gate_up), len(down)) for first, gate_up, down in prepared] == [
        (0, 64, 64),
        (64, 64, 64),
        (128, 22, 22),
    ]
    for whole, which in ((w13, 1), (w2, 2)):
        parts = [part for call in prepared for part in call[which]]
        assert [part.data_ptr() for part in parts] == [row.data_ptr() for row in whole]
        assert all(part.is_contiguous() and torch.equal(part, row) for part, row in zip(parts, whole, strict=True))


@pytest.mark.parametrize("prepare", [prepare_experts, moe_hpu.prepare_experts], ids=["cpu", "hpu"])
def test_a_write_into_the_weights_is_seen_after_they_were_prepared(prepare):
    w13, w2 = weights_of(3, 8, 4, torch.float32)
    prepared = prepare(w13, w2)
    w13.fill_(2.0), w2.fill_(3.0)
    leaves = [x for x in tree_leaves(prepared) if isinstance(x, torch.Tensor)]
    assert sum(x.numel() for x in leaves) == w13.numel() + w2.numel()
    assert sum(float(x.sum()) for x in leaves) == 2 * w13.numel() + 3 * w2.numel()
