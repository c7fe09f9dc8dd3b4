# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention layer, called with what it holds itself.

Owns: the forward that hands a layer's own cache and implementation to the backend, and ``install_attention``.
Never: weights, or anything of the backend's.

vLLM's own forward looks the layer up again by its name, in the forward's context. A compiler takes that name for a
constant, so that no two layers would share a graph: a model of 16 attention layers would have 16 times the graphs of
each shape. What a layer finds in itself is an input of its graph, and one graph serves them all.

Ordering rule: installed once, after loading and before the first forward.
"""

from __future__ import annotations

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from vllm_gaudi import compat


class HPUAttention(Attention):
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """``query`` [T, heads * head], ``key`` and ``value`` [T, kv heads * head] -> [T, heads * head].

        Mutates the layer's ``kv_cache``. ``output_shape`` and ``output_dtype`` are other backends'.
        """
        attended = self.impl.forward(
            self,
            query.view(-1, self.num_heads, self.head_size),
            key.view(-1, self.num_kv_heads, self.head_size),
            value.view(-1, self.num_kv_heads, self.head_size_v),
            self.kv_cache,
            get_forward_context().attn_metadata,
            output=torch.empty_like(query).view(-1, self.num_heads, self.head_size_v),
        )
        return attended.reshape(query.shape)


def install_attention(model: torch.nn.Module) -> int:
    """Give every attention layer of ``model`` the forward above; returns how many."""
    layers = [module for module in model.modules() if type(module) is Attention]
    for layer in layers:
        compat.patch_layer_class(layer, HPUAttention)
    return len(layers)
