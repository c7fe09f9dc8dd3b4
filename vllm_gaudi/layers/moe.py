# SPDX-License-Identifier: Apache-2.0
"""Unquantised mixture of experts: routing and experts by the ops of the registry.

Owns: the call of the ops with a layer's weights, and that a compiled layer holds its experts. Shared experts, their
gate and the tensor-parallel reduction stay with vLLM's own runner.
Never: router variants that the supported models do not use; those are refused when the layer is built.

Ordering rule: weights are prepared once, after loading. Whoever put other tensors in their place would have to have
them processed again; sleep, reloading and online transfer of weights are refused (``capabilities``, the worker).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_gaudi.ops.registry import OpsMixin


@MoERunner.register_oot
class HPUMoERunner(MoERunner):
    """vLLM's runner, called as a part of the graph around it.

    On other platforms than its CPU one vLLM hides the experts in an operator of its own, which looks the layer up when
    it runs. No graph compiler sees into that, and Gaudi's has no such operator.
    """

    def _select_forward(self) -> Callable[..., Any]:
        return self._forward_directly

    def _forward_directly(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None,
        layer_name: str,
        hidden_dim_unpadded: int,
    ) -> Any:
        return self._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)

    def _encode_layer_name(self) -> str:
        """No name: nobody looks the layer up, and layers of a kind share a graph only if nothing in it is their own."""
        return ""


@UnquantizedFusedMoEMethod.register_oot
class HPUUnquantizedFusedMoEMethod(OpsMixin, UnquantizedFusedMoEMethod):
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
        self._experts = self._ops.prepare_experts(layer.w13_weight, layer.w2_weight)
        # vLLM would make it at the first forward, which is inside a graph.
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, hidden] and [T, experts] -> [T, hidden]; the sum over a token's experts, not yet reduced over ranks."""
        weights, ids = self._ops.route(router_logits, layer.top_k, layer.renormalize)
        gemm_rows = get_forward_context().attn_metadata.expert_gemm_rows
        rows = {} if gemm_rows is None else {"gemm_rows": gemm_rows}
        return self._ops.experts(x, self._experts, weights, ids, **rows)
