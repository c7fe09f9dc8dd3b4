# SPDX-License-Identifier: Apache-2.0
"""The row-tiled linear layer: a row's bits depend on the row alone."""

import pytest
import torch

from tests.unit.ops.oracles import error
from vllm_gaudi.ops.linear import GemmRows, columns_first, pack_weight, row_tiled_linear

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@dtypes
@pytest.mark.parametrize(
    ("threads", "tile", "width", "outputs"),
    [(1, 16, 100, 50), (1, 64, 256, 1000), (1, 16, 768, 129), (1, 64, 768, 129), (2, 16, 768, 129), (2, 64, 1000, 8)],
    indirect=["threads"],
)
def test_bits_do_not_depend_on_the_number_or_place_of_rows(threads, dtype, tile, width, outputs):
    x, weight, bias = torch.randn(150, width), torch.randn(outputs, width), torch.randn(outputs)
    x, weight, bias = (t.to(dtype) for t in (x, weight, bias))
    want = row_tiled_linear(x, weight, bias, GemmRows(tile))
    for start, stop in ((0, 1), (0, 2), (3, 5), (7, 16), (1, 65), (2, 66), (0, 149), (149, 150)):
        assert torch.equal(row_tiled_linear(x[start:stop].clone(), weight, bias, GemmRows(tile)), want[start:stop])


@dtypes
@pytest.mark.parametrize("tile", [None, 1, 7, 16, 150, 200])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 150])
def test_every_tile_computes_the_product(dtype, tile, rows):
    x, weight, bias = torch.randn(rows, 24).to(dtype), torch.randn(9, 24).to(dtype), torch.randn(9).to(dtype)
    for offset in (None, bias):
        out = row_tiled_linear(x, weight, offset, tile and GemmRows(tile))
        assert (out.shape, out.dtype) == ((rows, 9), dtype)
        want = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
        assert error(out, want) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_padding_rows_never_meet_real_ones(poisoned_empty):
    x = torch.randn(20, 8)
    x[3] = float("nan")
    out = row_tiled_linear(x, torch.randn(4, 8), None, GemmRows(16))
    assert out.isnan().all(-1).tolist() == [row == 3 for row in range(20)]


class TestGemmSlices:
    SLICES = ((0, 64), (64, 16), (80, 16), (128, 16))

    @pytest.mark.parametrize("is_packed", [False, True])
    @dtypes
    def test_a_slice_is_a_product_of_its_own_and_other_rows_are_zeros(self, dtype, is_packed):
        x, weight, bias = (t.to(dtype) for t in (torch.randn(192, 100), torch.randn(50, 100), torch.randn(50)))
        packed = pack_weight(weight, 16) if is_packed else None
        out = row_tiled_linear(x, weight, bias, GemmRows(64, self.SLICES), packed)
        left = torch.ones(192, dtype=torch.bool)
        for first, count in self.SLICES:
            rows = slice(first, first + count)
            left[rows] = False
            assert torch.equal(out[rows], row_tiled_linear(x[rows].clone(), weight, bias, GemmRows(count), packed))
        assert (out.shape, out.dtype) == ((192, 50), dtype)
        assert not out[left].any() and left.sum() == 80

    def test_rows_in_no_slice_are_never_read(self):
        x = torch.randn(192, 24)
        x[96:128], x[144:] = float("nan"), float("nan")
        assert row_tiled_linear(x, torch.randn(9, 24), None, GemmRows(64, self.SLICES)).isfinite().all()

    def test_no_slice_at_all(self):
        assert not row_tiled_linear(torch.randn(64, 24), torch.randn(9, 24), None, GemmRows(64, ())).any()


class TestLaidOutWeights:
    @pytest.mark.parametrize(
        ("threads", "width", "outputs"),
        [(1, 100, 50), (1, 512, 3072), (1, 64, 33), (1, 64, 1), (2, 768, 129), (2, 1000, 8)],
        indirect=["threads"],
    )
    @pytest.mark.parametrize("tile", [16, 64])
    @pytest.mark.parametrize("is_packed", [False, True])
    def test_bits_do_not_depend_on_the_number_or_place_of_rows(self, threads, tile, width, outputs, is_packed):
        x, weight, bias = torch.randn(150, width), columns_first(torch.randn(outputs, width)), torch.randn(outputs)
        packed = pack_weight(weight, tile) if is_packed else None
        want = row_tiled_linear(x, weight, bias, GemmRows(tile), packed)
        assert error(want, x.double() @ weight.double().t() + bias.double()) < 1e-6
        for start, stop in ((0, 1), (0, 2), (3, 5), (7, 16), (1, 65), (2, 66), (0, 149), (149, 150)):
            assert torch.equal(
                row_tiled_linear(x[start:stop].clone(), weight, bias, GemmRows(tile), packed), want[start:stop]
            )

    def test_a_packed_weight_serves_the_tiles_of_its_rows_alone(self):
        x, weight = torch.randn(40, 24), torch.randn(9, 24)
        other = pack_weight(torch.randn(9, 24), 16)
        assert torch.equal(
            row_tiled_linear(x, weight, None, GemmRows(64), other), row_tiled_linear(x, weight, None, GemmRows(64))
        )
        assert torch.equal(row_tiled_linear(x, weight, None, None, other), row_tiled_linear(x, weight, None, None))
        assert not torch.equal(
            row_tiled_linear(x, weight, None, GemmRows(16), other), row_tiled_linear(x, weight, None, GemmRows(16))
        )

    def test_only_float32_is_packed_and_only_for_some_rows(self):
        assert pack_weight(torch.randn(9, 24), 16) is not None
        assert pack_weight(torch.randn(9, 24).bfloat16(), 16) is None
        assert pack_weight(torch.randn(9, 24), 0) is None

    def test_columns_first_is_the_same_weight(self):
        weight = torch.randn(9, 24)
        laid_out = columns_first(weight)
        assert torch.equal(laid_out, weight) and laid_out.t().is_contiguous()
