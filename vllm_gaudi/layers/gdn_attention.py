# SPDX-License-Identifier: Apache-2.0
"""The Gated DeltaNet layer on compact slots: reads its sequences' state rows, writes them back, nothing else.

Owns: the core between vLLM's input and output projections (convolution, gating, delta rule).
Never: blocks, checkpoints or slot numbers: the rows to read and write come in the metadata.

Ordering rule: both state tensors are read completely before either is written.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from vllm_gaudi.attention.metadata import HPUAttentionMetadata
from vllm_gaudi.ops.registry import get_ops


@QwenGatedDeltaNetAttention.register_oot
class HPUGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """vLLM's layer with its weights, loaders and projections; ``bind_state`` gives it its tensors."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._forward_method = self.forward_slots
        self._ops = get_ops()
        self._chunk_size = 0
        self.num_local_k_heads = self.num_k_heads // self.tp_size
        self.num_local_v_heads = self.num_v_heads // self.tp_size
        self.local_key_dim = self.key_dim // self.tp_size
        self.local_value_dim = self.value_dim // self.tp_size

    def bind_state(self, conv: torch.Tensor, ssm: torch.Tensor, chunk_size: int) -> None:
        """Give the layer its live state.

        ``conv`` [rows, kernel - 1, conv_dim] and ``ssm`` [rows, v heads, k dim, v dim], TP-local; both are mutated by
        every forward. ``chunk_size``: tokens of a GDN chunk, which divides the block size.
        """
        self.kv_cache = (conv, ssm)
        self._chunk_size = chunk_size

    @property
    def local_conv_dim(self) -> int:
        return self.conv_dim // self.tp_size

    def forward_slots(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; T are the token rows of one prefill or decode forward."""
        meta: HPUAttentionMetadata = get_forward_context().attn_metadata
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        mixed_ba, _ = self.in_proj_ba(hidden_states)
        mixed_qkv, z, b, a = self._unpack(mixed_qkvz, mixed_ba)
        rows = meta.num_rows
        core = (
            self._prefill(meta, mixed_qkv[:rows], b[:rows], a[:rows])
            if meta.prefill is not None
            else self._decode(meta, mixed_qkv[:rows], b[:rows], a[:rows])
        )
        pads = hidden_states.shape[0] - rows
        if pads:
            core = torch.nn.functional.pad(core, (0, 0, 0, 0, 0, pads))
        return self._output_projection(core, z)

    def _unpack(
        self, mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv [T, conv_dim], z [T, v heads, v dim], b and a [T, v heads] from the two fused projections."""
        if self.gqa_interleaved_layout:
            query, key, value, z, b, a = self.fix_query_key_value_ordering(mixed_qkvz, mixed_ba)
            mixed_qkv = torch.cat([part.reshape(part.shape[0], -1) for part in (query, key, value)], dim=-1)
            return mixed_qkv, z, b, a
        mixed_qkv, z = mixed_qkvz.split([self.local_conv_dim, self.local_value_dim], dim=-1)
        b, a = self.split_ba(mixed_ba)
        return mixed_qkv, z.reshape(z.shape[0], -1, self.head_v_dim), b, a

    def _conv_weight(self) -> torch.Tensor:
        return self.conv1d.weight.view(self.conv1d.weight.shape[0], self.conv1d.weight.shape[2])

    def _split_heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [..., k heads, k dim] and v [..., v heads, v dim] from [..., conv_dim]."""
        lead = convolved.shape[:-1]
        q, k, v = convolved.split([self.local_key_dim, self.local_key_dim, self.local_value_dim], dim=-1)
        return (
            q.reshape(*lead, self.num_local_k_heads, self.head_k_dim),
            k.reshape(*lead, self.num_local_k_heads, self.head_k_dim),
            v.reshape(*lead, self.num_local_v_heads, self.head_v_dim),
        )

    def _prefill(
        self, meta: HPUAttentionMetadata, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor
    ) -> torch.Tensor:
        assert meta.prefill is not None
        conv_state, ssm_state = self.kv_cache
        batched = (meta.batch, meta.query)
        intermediate = meta.intermediate
        boundaries: dict[str, Any] = (
            {}
            if intermediate is None
            else {"boundary_offset": intermediate.offset, "boundary_interval": intermediate.interval}
        )
        convolved, new_conv_state, *conv_states = self._ops.causal_conv1d_prefill(
            mixed_qkv.reshape(*batched, -1),
            conv_state.index_select(0, meta.state_indices_in),
            self._conv_weight(),
            None,
            meta.prefill.query_lens,
            **boundaries,
        )
        q, k, v = self._split_heads(convolved)
        g, beta = self._ops.gdn_gating(self.A_log, a.reshape(*batched, -1), b.reshape(*batched, -1), self.dt_bias)
        out, new_ssm_state, *ssm_states = self._ops.chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            ssm_state.index_select(0, meta.state_indices_in),
            meta.prefill.query_lens,
            chunk_size=self._chunk_size,
            **boundaries,
        )
        conv_state.index_copy_(0, meta.state_indices_out, new_conv_state)
        ssm_state.index_copy_(0, meta.state_indices_out, new_ssm_state)
        if intermediate is not None:
            num_intermediate = intermediate.state_indices_out.shape[0]
            conv_state.index_copy_(
                0, intermediate.state_indices_out, conv_states[0][:, : num_intermediate // meta.batch].flatten(0, 1)
            )
            ssm_state.index_copy_(
                0, intermediate.state_indices_out, ssm_states[0][:, : num_intermediate // meta.batch].flatten(0, 1)
            )
        return out.reshape(meta.num_rows, self.num_local_v_heads, self.head_v_dim)

    def _decode(
        self, meta: HPUAttentionMetadata, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor
    ) -> torch.Tensor:
        conv_state, ssm_state = self.kv_cache
        convolved, new_conv_state = self._ops.causal_conv1d_update(
            mixed_qkv, conv_state.index_select(0, meta.state_indices_in), self._conv_weight(), None
        )
        q, k, v = self._split_heads(convolved)
        g, beta = self._ops.gdn_gating(self.A_log, a, b, self.dt_bias)
        conv_state.index_copy_(0, meta.state_indices_out, new_conv_state)
        if meta.hints is not None:
            states = [ssm_state[row] for row in meta.hints.state_indices_cpu]
            return self._ops.recurrent_gated_delta_rule_(q, k, v, g, beta, states)
        out, new_ssm_state = self._ops.recurrent_gated_delta_rule(
            q, k, v, g, beta, ssm_state.index_select(0, meta.state_indices_in)
        )
        ssm_state.index_copy_(0, meta.state_indices_out, new_ssm_state)
        return out
