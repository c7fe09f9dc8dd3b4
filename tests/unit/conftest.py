# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration as the refusals and the platform read it: the attributes and no more, since a real one needs a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi import envs


class ModelConfig(SimpleNamespace):
    """May be referred to weakly, as vLLM's may."""


@pytest.fixture
def config_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """``config_of(**changes)``: a configuration, ``_config_of``, in an environment that sets no variable of ours."""
    for name in envs.TABLE:
        monkeypatch.delenv(name, raising=False)
    return _config_of


def _config_of(**changes: Any) -> SimpleNamespace:
    """The configuration of a supported hybrid. ``changes``: ``section__name=value``, or ``name=value`` of itself."""
    import torch

    config = SimpleNamespace(
        model_config=ModelConfig(
            architecture="Qwen3_5ForCausalLM",
            runner_type="generate",
            is_hybrid=True,
            is_encoder_decoder=False,
            use_mla=False,
            get_sliding_window=lambda: None,
            multimodal_config=None,
            enable_prompt_embeds=False,
            dtype=torch.bfloat16,
            quantization=None,
            enable_sleep_mode=False,
            enable_return_routed_experts=False,
            return_sampling_mask=False,
            max_model_len=4096,
            hf_text_config=SimpleNamespace(max_position_embeddings=4096, rope_parameters={"rope_type": "default"}),
            use_fp64_gumbel=False,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            kv_offloading_size=None,
            use_replayssm=False,
            kv_sharing_fast_prefill=False,
            block_size=128,
            user_specified_block_size=False,
            enable_prefix_caching=False,
            mamba_cache_mode="none",
            mamba_block_size=None,
            mamba_cache_dtype="auto",
            prefix_match_unit=None,
            enable_mamba_fine_grained_prefix_cache=False,
        ),
        parallel_config=SimpleNamespace(
            worker_cls="auto",
            pipeline_parallel_size=1,
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            enable_expert_parallel=False,
            enable_eplb=False,
            enable_elastic_ep=False,
            enable_dbo=False,
            ubatch_size=0,
        ),
        scheduler_config=SimpleNamespace(
            scheduler_cls=None,
            async_scheduling=True,
            enable_chunked_prefill=True,
            disable_hybrid_kv_cache_manager=None,
        ),
        compilation_config=SimpleNamespace(mode=None, cudagraph_mode=None, cudagraph_capture_sizes=[1, 2]),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        speculative_config=None,
        lora_config=None,
        weight_transfer_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        watermark_config=None,
        diffusion_config=None,
        profiler_config=SimpleNamespace(profiler=None),
        attention_config=SimpleNamespace(backend=None),
        mamba_config=SimpleNamespace(backend=SimpleNamespace(name="TRITON"), enable_stochastic_rounding=False),
        use_v2_model_runner=False,
        additional_config={},
    )
    for name, value in changes.items():
        section, _, attribute = name.rpartition("__")
        target = getattr(config, f"{section}_config") if section else config
        assert hasattr(target, attribute), name
        setattr(target, attribute, value)
    return config
