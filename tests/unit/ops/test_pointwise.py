# SPDX-License-Identifier: Apache-2.0
"""Activations: right against float64, and blind to an element's place in its tensor."""

import pytest
import torch

from vllm_gaudi.ops import pointwise

#          name, float64 formula
TABLE = {
    "sigmoid": lambda x: torch.sigmoid(x),
    "silu": lambda x: x * torch.sigmoid(x),
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}
names = pytest.mark.parametrize("name", TABLE)


@names
def test_formula(name):
    x = torch.cat((torch.linspace(-120, 120, 4801), torch.tensor([-1e30, -3e4, -0.0, 1e-30, 3e4, 1e30])))
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        out = getattr(pointwise, name)(given)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), TABLE[name](given.double()), rtol=2e-6, atol=1e-36)


@names
def test_bits_do_not_depend_on_the_place(threads, name):
    """torch.sigmoid, F.silu and F.softplus all fail this on CPU: they treat the end of a thread's range differently."""
    x = torch.randn(100003) * 4
    want = getattr(pointwise, name)(x)
    for length in (1, 3, 15, 31, 33, 1000, 66001):
        for start in (0, 1, 13, 777):
            piece = x[start : start + length]
            for given in (piece, piece.clone()):
                assert torch.equal(getattr(pointwise, name)(given), want[start : start + length])
    square = x[:90000].view(300, 300)
    assert torch.equal(getattr(pointwise, name)(square.t()), want[:90000].view(300, 300).t())


def test_addcmul_has_the_bits_of_any_place(threads):
    """The convolution adds its taps with it, over rows that a thread's range may cut anywhere."""
    x, y, z = torch.randn(3, 100003).unbind()
    want = torch.addcmul(x, y, z)
    for length in (1, 3, 15, 31, 33, 1000, 66001):
        for start in (0, 1, 13, 777):
            where = slice(start, start + length)
            assert torch.equal(torch.addcmul(x[where], y[where].clone(), z[where]), want[where])
