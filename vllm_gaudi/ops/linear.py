# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose row results do not depend on how many rows there are.

Owns: the fixed GEMM shape. A BLAS picks its kernel by shape, so `F.linear` over 3 rows and over 300 rows may round a
row differently.
Never: computes anything else; row_tile is a deployment constant, chosen by the caller, the same for a model's whole
life.
Order: tiles from the first row on; the last tile is filled with zero rows that are dropped afterwards. Zeros, not
scratch: measured with bf16 on AMX and a K that is no multiple of 8, a NaN row leaks into the row before it.
"""

import torch
import torch.nn.functional as F


def row_tiled_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, row_tile: int) -> torch.Tensor:
    """x [rows, K] @ weight [N, K]^T + bias [N] or None -> [rows, N] in x.dtype. Nothing is mutated.

    row_tile > 0: every GEMM has exactly row_tile rows, so a row's bits depend on the row alone. row_tile == 0: one
    F.linear. Raises ValueError for a negative row_tile.
    """
    if row_tile < 0:
        raise ValueError(f"row_tile is {row_tile}: use 0 (one GEMM) or a positive number of rows")
    rows = x.shape[0]
    if row_tile == 0 or rows == row_tile:
        return F.linear(x, weight, bias)
    out = x.new_empty(rows, weight.shape[0])
    for start in range(0, rows, row_tile):
        tile = x[start : start + row_tile]
        real = tile.shape[0]
        if real < row_tile:
            tile = F.pad(tile, (0, 0, 0, row_tile - real))
        out[start : start + real] = F.linear(tile.contiguous(), weight, bias)[:real]
    return out
