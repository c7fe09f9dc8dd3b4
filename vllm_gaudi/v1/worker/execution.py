# SPDX-License-Identifier: Apache-2.0
"""How this process runs the model: one frozen record, built before the model is loaded.

Owns: ``ExecutionMode`` and ``choose``, the only code that asks for the device or reads a variable on behalf of worker,
layers and ops. What follows from the choice (tile sizes, exact shapes, packed weights) is a field here.
Never: a decision that a request, a step or a config of the model would change.

Ordering rule: chosen once, when the worker takes its device; everything that is built after it reads the record.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_gaudi import device, envs
from vllm_gaudi.bucketing.grid import DECODE_ROW_TILE, PREFILL_ROW_TILE, RowTiles

LOGITS_ROW_TILE = 16
"""Rows of a logits product, for prefill and decode alike, since a prompt's last row may come from either."""


@dataclass(frozen=True)
class ExecutionMode:
    """One of: "hpu", on a Gaudi; "host", eager with the shapes that a step needs; "hpu_like", a host that runs as a
    Gaudi does, with bucketed shapes and, where a backend is given, compiled layers."""

    name: str
    on_hpu: bool
    backend: str | None  # of torch.compile; None: nothing is compiled
    row_tiles: RowTiles | None  # rows of each matrix product; None: one product over all rows
    expert_row_tiles: RowTiles | None  # the same of the experts' products
    logits_row_tile: int  # 0: one product over all rows
    packed_rows: int  # decode weights are packed for products of so many rows; 0: they are not
    exact_shapes: bool  # a forward has the shape that it needs, not that of the next bucket
    host_hints: bool  # layers get positions and state indices of the step as plain numbers, too
    warm_up: bool  # bucketed shapes run once before the first request
    poison: bool  # tests only: caches start as NaN

    def describe(self) -> str:
        """One line for the operator."""
        how = "eager" if self.backend is None else f"layers compiled by {self.backend}"
        tiles = "one product over all rows"
        if self.row_tiles is not None:
            tiles = f"products in tiles of {self.row_tiles.prefill} rows (prefill) and {self.row_tiles.decode} (decode)"
        packed = ", decode weights packed" if self.packed_rows else ""
        shapes = "exact shapes" if self.exact_shapes else "bucketed shapes"
        return f"Execution mode {self.name}: {how}, {shapes}, {tiles}{packed}"


def choose(enforce_eager: bool) -> ExecutionMode:
    """The mode of this process, from the device, --enforce-eager and the variables. Raises ValueError on a bad value.

    A host runs as a host only where nothing is compiled and products have row tiles: exact shapes cost a compiler a
    graph each, and without tiles a row's bits would follow the number of rows.
    """
    on_hpu = device.is_hpu()
    asked = envs.get("VLLM_GAUDI_COMPILE") or ("hpu_backend" if on_hpu else "none")
    backend = None if enforce_eager or asked == "none" else asked
    tiled = envs.get("VLLM_GAUDI_ROW_TILES")
    tiled = not on_hpu if tiled is None else tiled
    as_host = not on_hpu and backend is None and tiled and envs.get("VLLM_GAUDI_EXECUTION_MODE") == "host"
    tiles = RowTiles(PREFILL_ROW_TILE, DECODE_ROW_TILE, DECODE_ROW_TILE if as_host else 0) if tiled else None
    return ExecutionMode(
        name="hpu" if on_hpu else "host" if as_host else "hpu_like",
        on_hpu=on_hpu,
        backend=backend,
        row_tiles=tiles,
        expert_row_tiles=None if on_hpu else tiles,
        logits_row_tile=LOGITS_ROW_TILE if tiled else 0,
        packed_rows=DECODE_ROW_TILE if as_host else 0,
        exact_shapes=as_host,
        host_hints=as_host,
        warm_up=not envs.get("VLLM_SKIP_WARMUP"),
        poison=envs.get("VLLM_GAUDI_POISON"),
    )
