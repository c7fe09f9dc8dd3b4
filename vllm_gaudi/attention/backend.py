# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backend for this plugin: inserts K/V into pages and attends, by the ops of the registry.

Owns: the backend class that vLLM asks for names and block sizes, and its implementation of one layer's forward.
Never: metadata building (``v1.worker.inputs``) or page allocation (``v1.worker.kv_cache``).

Ordering rule: keys and values of all rows are inserted before any row attends, so a row reads its own chunk, and blocks
that another sequence of the same forward has just filled, from the cache.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf

from vllm_gaudi import device
from vllm_gaudi.attention.metadata import HPUAttentionMetadata
from vllm_gaudi.capabilities import DEFAULT_BLOCK_SIZE, HOST_BLOCK_GRANULE
from vllm_gaudi.ops.registry import get_ops


class HPUAttentionBackend(AttentionBackend):
    accept_output_buffer: ClassVar[bool] = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "bfloat16", "float32"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HPUAttentionImpl]:
        return HPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError("metadata is built by vllm_gaudi.v1.worker.inputs")

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [DEFAULT_BLOCK_SIZE] if device.is_hpu() else [MultipleOf(HOST_BLOCK_GRANULE)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return DEFAULT_BLOCK_SIZE


class HPUAttentionImpl(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ):
        unsupported = {
            "alibi slopes": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "a logits soft cap": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            f"attention arguments {sorted(extra)}": bool(extra),
        }
        asked = [name for name, is_asked in unsupported.items() if is_asked]
        if asked:
            raise NotImplementedError(f"vllm_gaudi's attention does not support {', '.join(asked)}; use another model")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._ops = get_ops()

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        attn_metadata: HPUAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend ``query`` [T, heads, head]; ``key``/``value`` [T, kv heads, head] go into ``kv_cache`` first.

        Mutates ``kv_cache`` (K and V, each [tokens, kv heads, head]) and ``output`` [T, heads, head].
        """
        meta = attn_metadata
        rows = meta.num_rows
        hints = {} if meta.hints is None else {"num_computed_range": meta.hints.num_computed_range}
        k_cache, v_cache = kv_cache
        self._ops.reshape_and_cache(k_cache, v_cache, key[:rows], value[:rows], meta.slot_mapping)
        if meta.prefill is not None:
            attended = self._ops.paged_prefill_attention(
                query[:rows].view(meta.batch, meta.query, self.num_heads, self.head_size),
                k_cache,
                v_cache,
                meta.prefill.block_table,
                meta.prefill.num_computed_tokens,
                self.scale,
                kernel_block=meta.kernel_block,
                **hints,
            ).reshape(rows, self.num_heads, self.head_size)
        else:
            assert meta.decode is not None
            attended = self._ops.paged_decode_attention(
                query[:rows],
                k_cache,
                v_cache,
                meta.decode.block_list,
                meta.decode.block_groups,
                meta.decode.block_usage,
                meta.decode.first_block,
                self.scale,
                kernel_block=meta.kernel_block,
            )
        output[:rows] = attended
        if output.shape[0] > rows:
            output[rows:].zero_()
        return output
