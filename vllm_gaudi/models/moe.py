# SPDX-License-Identifier: Apache-2.0
"""Unquantised mixture of experts: routing and experts by the ops behind the registry.

Owns: the call of the two ops with a layer's weights. Shared experts, their gate and the tensor-parallel reduction stay
with vLLM's own runner.
Never: router variants that the supported models do not use; those are refused when the layer is built.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_gaudi.ops.registry import UsesOps


@UnquantizedFusedMoEMethod.register_oot
class HPUUnquantizedFusedMoEMethod(UsesOps, UnquantizedFusedMoEMethod):
    @property
    def is_monolithic(self) -> bool:
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        unsupported = {
            "grouped top-k": bool(layer.use_grouped_topk),
            "a score correction bias": layer.e_score_correction_bias is not None,
            f"scoring by {layer.scoring_func}": layer.scoring_func != "softmax",
            "a custom routing function": layer.custom_routing_function is not None,
            "router weights on the input": bool(layer.apply_router_weight_on_input),
            "an expert map": layer.expert_map is not None,
            "expert biases": bool(self.moe.has_bias),
        }
        asked = [name for name, is_asked in unsupported.items() if is_asked]
        if asked:
            raise NotImplementedError(f"vllm_gaudi's experts do not support {', '.join(asked)}; use another model")

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, hidden] and [T, experts] -> [T, hidden]; the sum over a token's experts, not yet reduced over ranks."""
        weights, ids = self._ops.route(router_logits, layer.top_k, layer.renormalize)
        row_tile = get_forward_context().attn_metadata.row_tile
        return self._ops.experts(x, layer.w13_weight, layer.w2_weight, weights, ids, row_tile=row_tile)
