# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose row results do not depend on how many rows there are.

Owns: the fixed GEMM shape. A BLAS picks its kernel by shape, so `F.linear` over 3 rows and over 300 rows may round a
row differently. And how a host lays a weight out for such products: `columns_first` for all of them, `pack_weight` for
those of few rows, where a BLAS spends a third of its time on rearranging the weight.
Never: computes anything else; the tile is a deployment constant, chosen by the caller, the same for a model's whole
life, and so is whether a weight is packed.
Ordering rule: tiles from the first row on; the last tile is filled with zero rows that are dropped afterwards. Zeros,
not scratch: measured with bf16 on AMX and a K that is no multiple of 8, a NaN row leaks into the row before it. Where
the host knows which rows are real it may name the products itself, as `GemmRows.slices`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class GemmRows(NamedTuple):
    """How a forward's token rows are cut into matrix products."""

    tile: int  # rows of every product
    slices: tuple[tuple[int, int], ...] | None = None  # instead: first row and rows of each, disjoint and in order


class PackedWeight(NamedTuple):
    """A copy of a weight in the BLAS's own layout, for products of exactly `rows` rows."""

    data: torch.Tensor  # opaque
    rows: int


def columns_first(weight: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] with its columns contiguous, as a product of rows reads it; same shape, a copy."""
    return weight.t().contiguous().t()


def pack_weight(weight: torch.Tensor, rows: int) -> PackedWeight | None:
    """Pack weight [N, K] for products of `rows` rows; None where nothing packs it: MKL does, float32 alone."""
    is_packable = weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkl.is_available()
    if not is_packable or rows <= 0:
        return None
    return PackedWeight(torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), rows), rows)


def row_tiled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gemm_rows: GemmRows | None,
    packed: PackedWeight | None = None,
) -> torch.Tensor:
    """x [rows, K] @ weight [N, K]^T + bias [N] or None -> [rows, N] in x.dtype. Nothing is mutated.

    gemm_rows: every GEMM has exactly `tile` rows, so a row's bits depend on the row alone; with `slices` these are run
    instead, and a row in none of them comes out as zeros. None: one F.linear. `packed` is the same weight and serves
    the products of its rows.
    """
    if gemm_rows is None:
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    row_tile, slices = gemm_rows
    if slices is not None:
        out = x.new_zeros(rows, weight.shape[0])
        for first, count in slices:
            out[first : first + count] = _product(x[first : first + count].contiguous(), weight, bias, packed)
        return out
    num_tiles = -(-rows // row_tile)
    missing = num_tiles * row_tile - rows
    tiles = (F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()).view(num_tiles, row_tile, x.shape[1])
    # One after the other: a batched product of the same tiles may round as the threads share them out.
    done = [_product(tile, weight, bias, packed) for tile in tiles]
    if num_tiles == 1:
        return done[0][:rows]
    return torch.cat(done)[:rows] if done else x.new_empty(0, weight.shape[0])


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packed: PackedWeight | None
) -> torch.Tensor:
    if packed is not None and packed.rows == x.shape[0]:
        return torch.ops.mkl._mkl_linear(x, packed.data, weight, bias, packed.rows)
    return F.linear(x, weight, bias)
