# SPDX-License-Identifier: Apache-2.0
"""Runs the model on padded inputs, compiled layer by layer where a backend is given, and remembers its shapes.

Owns: the forward context around a forward, the logits call, which modules are compiled, and the set of shapes seen
before and after warm-up.
Never: input building, sampling or cache movement: those run eagerly between forwards.

Compilation is regional: each child of a module list (a decoder layer) and the logits product are compiled by
themselves, with static shapes, so a bucket costs one graph per kind of layer and not one per layer.

Ordering rule: ``finish_warmup`` comes after warm-up; from then on a shape that warm-up did not see is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.utils
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from vllm_gaudi import compat
from vllm_gaudi.v1.worker.inputs import ModelInputs

logger = init_logger("vllm.vllm_gaudi.graphs")

Shape = tuple[str, int, int, int, int]

MAX_GRAPHS = 1 << 16
"""Compilations that dynamo may keep: far above the buckets times the layers of any model."""


MAX_UNWARMED_SHAPES = 1 << 14
"""Shapes after warm-up that are remembered: where forwards have the shape that they need there is no end of them."""


def shape_of(inputs: ModelInputs) -> Shape:
    """What a compiled graph would be keyed by: phase, token rows, sequences, block list or table, boundaries kept."""
    attn = inputs.attn
    if attn.prefill is not None:
        num_intermediate = attn.intermediate.state_indices_out.shape[0] if attn.intermediate is not None else 0
        return ("prefill", inputs.input_ids.shape[0], attn.batch, attn.prefill.block_table.shape[1], num_intermediate)
    assert attn.decode is not None
    return ("decode", inputs.input_ids.shape[0], attn.batch, attn.decode.block_list.shape[0], 0)


def regions(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules that are compiled: children of the outermost module lists, and no module inside another one."""
    for child in model.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child.children()
        else:
            yield from regions(child)


class GraphRunner:
    """``model`` is vLLM's own; hidden states are [rows, hidden]. ``backend`` of torch.compile, None runs eagerly."""

    def __init__(self, model: Any, vllm_config: VllmConfig, backend: str | None = None):
        self._model = model
        self._vllm_config = vllm_config
        self.warmed_shapes: set[Shape] = set()
        self.unwarmed_shapes: set[Shape] = set()
        self._is_warm = False
        self._num_warm_graphs = 0
        self.backend = backend
        self._logits: Callable[[torch.Tensor], torch.Tensor] = model.compute_logits
        if backend is not None:
            self._compile(backend)

    def run(self, inputs: ModelInputs) -> torch.Tensor:
        """One forward: [rows, hidden]. Mutates the caches bound to the model's layers."""
        self._record(shape_of(inputs))
        with set_forward_context(inputs.attn, self._vllm_config, num_tokens=inputs.input_ids.shape[0], slot_mapping={}):
            return self._model(
                input_ids=inputs.input_ids,
                positions=inputs.positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] for ``rows`` [n] of ``hidden``, n being a bucket's batch."""
        return self._logits(hidden.index_select(0, rows))

    def prompt_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] for any n, never compiled: as many shapes as there are query buckets, seldom asked for."""
        return self._model.compute_logits(hidden.index_select(0, rows))

    def forget_shapes(self) -> None:
        """What has run so far belongs to a pool that does not stay."""
        self.warmed_shapes.clear()

    def finish_warmup(self) -> None:
        """Warm-up is over."""
        self._is_warm = True
        self._num_warm_graphs = _num_graphs()

    @property
    def num_late_graphs(self) -> int:
        """Graphs that dynamo has made in this process since ``finish_warmup``: 0 unless warm-up has missed a shape."""
        return _num_graphs() - self._num_warm_graphs if self._is_warm else 0

    def _compile(self, backend: str) -> None:
        compat.raise_recompile_limit(MAX_GRAPHS)
        for region in regions(self._model):
            region.compile(backend=backend, dynamic=False)
        self._logits = torch.compile(self._model.compute_logits, backend=backend, dynamic=False)

    def _record(self, shape: Shape) -> None:
        if not self._is_warm:
            self.warmed_shapes.add(shape)
        elif shape not in self.warmed_shapes and shape not in self.unwarmed_shapes:
            if len(self.unwarmed_shapes) == MAX_UNWARMED_SHAPES:
                return
            self.unwarmed_shapes.add(shape)
            if self.warmed_shapes:
                logger.warning("Configuration: %s was not warmed-up!", shape)


def _num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
