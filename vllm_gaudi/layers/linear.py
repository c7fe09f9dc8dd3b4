# SPDX-License-Identifier: Apache-2.0
"""Matrix products in row tiles of one fixed size, so that a row's bits do not depend on how many rows there are.

Owns: the two linear methods that vLLM's layers are given after their weights are loaded, and ``install_row_tiles``.
Never: weights (vLLM's methods create and load them) or quantised layers.

Ordering rule: installed once, after loading and before the first forward.
"""

from __future__ import annotations

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from vllm_gaudi.ops.linear import GemmRows, PackedWeight, columns_first, pack_weight
from vllm_gaudi.ops.registry import OpsMixin


class RowTiledLinearMethod(OpsMixin, UnquantizedLinearMethod):
    """vLLM's unquantised method whose products have the rows that the forward's metadata says.

    ``packed``: the layer's weight once more, for the tile that has few rows.
    """

    def __init__(self, packed: PackedWeight | None = None) -> None:
        super().__init__()
        self._packed = packed

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        meta = get_forward_context().attn_metadata
        return self._ops.row_tiled_linear(x, layer.weight, bias, meta.gemm_rows, self._packed)


class RowTiledLogitsMethod(OpsMixin, UnquantizedEmbeddingMethod):
    """vLLM's unquantised embedding whose logits product runs in tiles of ``row_tile`` rows; 0: over all rows."""

    def __init__(self, row_tile: int) -> None:
        super().__init__()
        self._gemm_rows = GemmRows(row_tile) if row_tile else None

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._ops.row_tiled_linear(x, layer.weight, bias, self._gemm_rows)


def install_row_tiles(model: torch.nn.Module, packed_rows: int, logits_row_tile: int) -> int:
    """Give every unquantised linear and logits layer of ``model`` its row-tiled method; returns how many.

    ``packed_rows``: rows of the products that weights are packed for, on top of being laid out anew; 0 leaves weights
    as they are. ``logits_row_tile``: rows of a logits product, 0: all at once.
    """
    changed = 0
    for module in model.modules():
        if isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod:
            module.quant_method = RowTiledLinearMethod(_lay_out(module.weight, packed_rows))
        elif isinstance(module, VocabParallelEmbedding) and type(module.quant_method) is UnquantizedEmbeddingMethod:
            module.quant_method = RowTiledLogitsMethod(logits_row_tile)
        else:
            continue
        changed += 1
    return changed


def _lay_out(weight: torch.nn.Parameter, packed_rows: int) -> PackedWeight | None:
    """Change the layout of a host's float32 ``weight`` in place, and pack it. A convolution's weight stays."""
    packed = pack_weight(weight, packed_rows) if weight.dim() == 2 else None
    if packed is not None:
        weight.data = columns_first(weight.data)
    return packed
