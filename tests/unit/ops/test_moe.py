# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: right against a float64 loop over rows, and a row's bits depend on the row alone."""

import pytest
import torch

from tests.unit.ops.oracles import NAN, error
from vllm_gaudi.ops.moe import experts, route

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
@pytest.mark.parametrize("tile", [0, 16])
def test_experts_are_their_weighted_sum(num_experts, top_k, hidden, inner, dtype, tile):
    x, (w13, w2) = torch.randn(11, hidden).to(dtype), weights_of(num_experts, hidden, inner, dtype)
    weights, ids = route(torch.randn(11, num_experts), top_k, True)
    out = experts(x, w13, w2, weights, ids, row_tile=tile)
    assert out.dtype == dtype
    want = torch.zeros(11, hidden, dtype=torch.float64)
    for row in range(11):
        for weight, expert in zip(weights[row].double(), ids[row].long(), strict=True):
            gate, up = (w13[expert].double() @ x[row].double()).chunk(2)
            want[row] += weight * (w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    assert error(out, want) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(
    ("threads", "num_experts", "top_k", "hidden", "inner"),
    [(1, *shape) for shape in SHAPES] + [(2, 4, 2, 16, 8)],
    indirect=["threads"],
)
@dtypes
def test_bits_do_not_depend_on_the_other_rows(threads, num_experts, top_k, hidden, inner, dtype):
    x, (w13, w2) = torch.randn(70, hidden).to(dtype), weights_of(num_experts, hidden, inner, dtype)
    logits = torch.randn(70, num_experts)
    x[40], logits[40] = NAN, 0.0  # a poisoned row harms nobody else

    def run(rows):
        weights, ids = route(logits[rows].clone(), top_k, False)
        return experts(x[rows].clone(), w13, w2, weights, ids, row_tile=16)

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
    out = experts(x, w13, w2, torch.full((2, 2), 0.5), ids, row_tile=0)
    assert bool(out.isfinite().all())
