# SPDX-License-Identifier: Apache-2.0
"""The platform: each setting of vLLM's config reaches its row of the refusal table, and a second check changes nothing.

Needs vLLM.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gaudi import capabilities

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it


@pytest.fixture(scope="module")
def platform():
    import vllm  # noqa: F401  (before the platform, as in an engine)

    from vllm_gaudi import platform

    return platform


def snapshot(config: SimpleNamespace) -> dict[str, Any]:
    sections = {name: vars(value) if hasattr(value, "__dict__") else value for name, value in vars(config).items()}
    return copy.deepcopy({name: value for name, value in sections.items() if name != "offload_config"})


WIRES: list[tuple[dict[str, Any], str]] = [
    ({"model__architecture": "OPTForCausalLM"}, "architecture"),
    ({"model__runner_type": "pooling"}, "pooling"),
    (
        {"model__multimodal_config": SimpleNamespace(language_model_only=False, mm_encoder_only=False)},
        "multimodal-inputs",
    ),
    ({"model__is_encoder_decoder": True}, "encoder-decoder"),
    ({"model__use_mla": True}, "mla"),
    ({"model__get_sliding_window": lambda: 128}, "sliding-window"),
    ({"model__enable_prompt_embeds": True}, "prompt-embeds"),
    ({"model__dtype": torch.float16}, "dtype"),
    ({"model__quantization": "fp8"}, "quantization"),
    ({"cache__cache_dtype": "fp8"}, "kv-cache-dtype"),
    ({"cache__kv_cache_dtype_skip_layers": ["0"]}, "kv-cache-dtype"),
    ({"speculative_config": SimpleNamespace(method="ngram")}, "speculative-decoding"),
    ({"lora_config": "asked for"}, "lora"),
    ({"model__enable_sleep_mode": True}, "sleep-mode"),
    ({"weight_transfer_config": "asked for"}, "weight-transfer"),
    ({"kv_transfer_config": "asked for"}, "kv-connector"),
    ({"cache__kv_offloading_size": 1.0}, "kv-offloading"),
    ({"ec_transfer_config": "asked for"}, "encoder-connector"),
    (
        {
            "offload_config": SimpleNamespace(
                uva=SimpleNamespace(cpu_offload_gb=1), prefetch=SimpleNamespace(offload_group_size=0)
            )
        },
        "weight-offloading",
    ),
    ({"parallel__pipeline_parallel_size": 2}, "pipeline-parallel"),
    ({"parallel__data_parallel_size": 2}, "data-parallel"),
    ({"parallel__prefill_context_parallel_size": 2}, "context-parallel"),
    ({"parallel__decode_context_parallel_size": 2}, "context-parallel"),
    ({"parallel__enable_expert_parallel": True}, "expert-parallel"),
    ({"parallel__enable_eplb": True}, "expert-parallel"),
    ({"parallel__enable_elastic_ep": True}, "expert-parallel"),
    ({"parallel__enable_dbo": True}, "microbatching"),
    ({"parallel__ubatch_size": 2}, "microbatching"),
    ({"use_v2_model_runner": True}, "v2-model-runner"),
    ({"model__enable_return_routed_experts": True}, "routed-experts"),
    ({"model__return_sampling_mask": True}, "sampling-mask"),
    ({"model__use_fp64_gumbel": True}, "float64-noise"),
    ({"watermark_config": "asked for"}, "watermark"),
    ({"diffusion_config": "asked for"}, "diffusion"),
    ({"profiler__profiler": "torch"}, "profiler"),
    (
        {"model__multimodal_config": SimpleNamespace(language_model_only=True, mm_encoder_only=True)},
        "encoder-only",
    ),
    ({"attention__backend": SimpleNamespace(name="FLASH_ATTN")}, "attention-backend"),
    ({"additional_config": {"gdn_prefill_backend": "triton"}}, "gdn-prefill-backend"),
    ({"mamba__backend": SimpleNamespace(name="FLASHINFER")}, "mamba-backend"),
    ({"cache__mamba_cache_dtype": "float16"}, "mamba-cache-dtype"),
    ({"mamba__enable_stochastic_rounding": True}, "stochastic-rounding"),
    ({"cache__use_replayssm": True}, "replayssm"),
    ({"cache__kv_sharing_fast_prefill": True}, "kv-sharing-fast-prefill"),
    ({"scheduler__enable_chunked_prefill": False}, "chunked-prefill"),
    ({"scheduler__disable_hybrid_kv_cache_manager": True}, "hybrid-manager"),
    ({"scheduler__scheduler_cls": "my.Scheduler"}, "foreign-scheduler"),
    ({"parallel__worker_cls": "my.Worker"}, "foreign-worker"),
    ({"cache__user_specified_block_size": True, "cache__block_size": 24}, "block-size"),
    ({"cache__mamba_cache_mode": "all"}, "mamba-cache-mode"),
    ({"cache__prefix_match_unit": 16}, "prefix-match-unit"),
    ({"cache__enable_mamba_fine_grained_prefix_cache": True}, "fine-grained-junctions"),
    ({"additional_config": {"colour": 1}}, "additional-config"),
]
VARIABLES = [
    ("VLLM_COMPACT_GDN", "0", "compact-gdn"),
    ("VLLM_CONTIGUOUS_PA", "1", "contiguous-pa"),
    ("VLLM_DEFRAG", "1", "defragmenter"),
    ("PT_HPU_LAZY_MODE", "1", "lazy-mode"),
    ("VLLM_BATCH_INVARIANT", "1", "batch-invariant"),
]


def refused_rows(platform, config) -> list[str]:
    facts = platform._facts(config)
    return [row.name for row in capabilities.TABLE if row.applies(facts)]


@pytest.mark.parametrize(("changes", "row"), WIRES, ids=[f"{row}-{n}" for n, (_, row) in enumerate(WIRES)])
def test_a_setting_reaches_its_refusal(platform, config_of, changes, row):
    config = config_of(**changes)
    assert refused_rows(platform, config) == [row]
    before = snapshot(config)
    with pytest.raises(RuntimeError, match="vllm_gaudi refuses this configuration"):
        platform.HpuPlatform.check_and_update_config(config)
    assert snapshot(config) == before, "refuse first, then fill in"


@pytest.mark.parametrize(("name", "text", "row"), VARIABLES)
def test_a_variable_reaches_its_refusal(platform, config_of, monkeypatch, name, text, row):
    monkeypatch.setenv(name, text)
    assert refused_rows(platform, config_of()) == [row]


def test_every_row_has_its_wire():
    assert {row for _, row in WIRES} | {row for _, _, row in VARIABLES} == {row.name for row in capabilities.TABLE}


@pytest.mark.parametrize(
    "changes",
    [
        {"model__multimodal_config": SimpleNamespace(language_model_only=True, mm_encoder_only=False)},
        {"cache__block_size": 24},  # not the user's: vLLM derives it later
        {"cache__user_specified_block_size": True, "cache__block_size": 48},
        {"additional_config": {"decode_batch_buckets": [1, 2]}},
        {"scheduler__scheduler_cls": "vllm_gaudi.v1.core.sched.hpu_scheduler.HPUScheduler"},
        {"parallel__worker_cls": "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"},
    ],
    ids=range(6),
)
def test_what_is_supported_passes(platform, config_of, changes):
    assert refused_rows(platform, config_of(**changes)) == []


@pytest.mark.parametrize(("is_async", "name"), [(True, "HPUAsyncScheduler"), (False, "HPUScheduler")])
def test_worker_and_scheduler_are_chosen_and_vllms_compiler_is_off(platform, config_of, is_async, name):
    from vllm.config import CompilationMode, CUDAGraphMode

    config = config_of(scheduler__async_scheduling=is_async)
    platform.HpuPlatform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == platform.WORKER
    assert config.scheduler_config.scheduler_cls.rpartition(".")[2] == name
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert config.compilation_config.cudagraph_capture_sizes == []


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["align", "none"])
def test_a_second_check_on_the_live_config_changes_nothing(platform, config_of, caching, mode):
    """vLLM repeats it once the engine runs; whatever it lowered then would split scheduler from worker."""
    config = config_of(cache__enable_prefix_caching=caching, cache__mamba_cache_mode=mode)
    platform.HpuPlatform.check_and_update_config(config)
    first = snapshot(config)
    platform.HpuPlatform.check_and_update_config(config)
    assert snapshot(config) == first
    config.cache_config.block_size = 64
    platform.HpuPlatform.check_and_update_config(config)
    assert config.cache_config.block_size == 64


def test_a_config_without_a_model_is_left_alone(platform):
    platform.HpuPlatform.check_and_update_config(SimpleNamespace(model_config=None))


def test_requests_with_embeddings_are_refused(platform):
    with pytest.raises(ValueError, match="token ids"):
        platform.HpuPlatform.validate_request({"type": "embeds"}, None)
    assert platform.HpuPlatform.validate_request({"type": "token"}, None) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_supported_dtypes(platform, dtype):
    assert dtype in platform.HpuPlatform().supported_dtypes
    platform.HpuPlatform.check_if_supports_dtype(dtype)


def test_other_dtypes_are_refused(platform):
    with pytest.raises(ValueError, match="--dtype bfloat16"):
        platform.HpuPlatform.check_if_supports_dtype(torch.float16)


def test_vllm_found_this_platform(platform):
    from vllm.platforms import current_platform

    assert type(current_platform) is platform.HpuPlatform
    assert current_platform.device_type == "cpu"
    assert current_platform.support_hybrid_kv_cache()
    assert current_platform.get_device_total_memory() > 0
    assert current_platform.get_current_memory_usage() > 0
