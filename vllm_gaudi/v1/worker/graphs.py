# SPDX-License-Identifier: Apache-2.0
"""Runs the model on padded inputs and remembers which shapes it was given.

Owns: the forward context around a forward, the logits call, and the set of shapes seen before and after warm-up.
Never: input building, sampling or cache movement.

Ordering rule: ``seal`` comes after warm-up; from then on a shape that warm-up did not see is reported once.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from vllm_gaudi.v1.worker.inputs import ModelInputs

logger = init_logger("vllm.vllm_gaudi.graphs")

Shape = tuple[str, int, int, int, int]


def shape_of(inputs: ModelInputs) -> Shape:
    """What a compiled graph would be keyed by: phase, token rows, sequences, block list or table, boundaries kept."""
    attn = inputs.attn
    if attn.prefill is not None:
        num_kept = attn.kept.state_write.shape[0] if attn.kept is not None else 0
        return ("prefill", inputs.input_ids.shape[0], attn.batch, attn.prefill.block_table.shape[1], num_kept)
    assert attn.decode is not None
    return ("decode", inputs.input_ids.shape[0], attn.batch, attn.decode.block_list.shape[0], 0)


class GraphRunner:
    """``model`` is vLLM's own; hidden states are [rows, hidden]."""

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig):
        self._model = model
        self._vllm_config = vllm_config
        self.warm_shapes: set[Shape] = set()
        self.cold_shapes: set[Shape] = set()
        self._is_sealed = False

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
        """[n, vocabulary] for ``rows`` [n] of ``hidden``."""
        return self._model.compute_logits(hidden.index_select(0, rows))

    def seal(self) -> None:
        """Warm-up is over."""
        self._is_sealed = True

    def _record(self, shape: Shape) -> None:
        if not self._is_sealed:
            self.warm_shapes.add(shape)
        elif shape not in self.warm_shapes and shape not in self.cold_shapes:
            self.cold_shapes.add(shape)
            if self.warm_shapes:
                logger.warning("Configuration: %s was not warmed-up!", shape)
