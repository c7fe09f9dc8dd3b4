# SPDX-License-Identifier: Apache-2.0
"""Every row of the refusal table: an engine that is asked for it does not start.

``ASKS`` or ``NO_ASK`` has an entry for each row of ``capabilities.TABLE`` (a test says so). What vLLM refuses itself
before the platform does is marked ``vllm_first``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm import config as vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_gaudi.capabilities import TABLE
from vllm_gaudi.testing.engine import DEFAULTS, engine, greedy


@dataclass(frozen=True)
class Ask:
    """An engine that must not start: ``flags`` of ``EngineArgs`` and ``env`` on the tiny checkpoint ``name``."""

    flags: dict[str, Any] = field(default_factory=dict)
    name: str = "q35_dense"
    env: dict[str, str] = field(default_factory=dict)
    vllm_first: str | None = None  # pattern of vLLM's own error, where that comes before ours


def kv_connector() -> Any:
    return vllm_config.KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")


def encoder_connector() -> Any:
    return vllm_config.ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
OURS = "vllm_gaudi.v1.core.sched.hpu_scheduler.HPUScheduler"
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
LONG = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"max_position_embeddings": 256, "rope_parameters": {**ROPE, "rope_type": "yarn"}}
DYNAMIC = {"max_position_embeddings": 256, "rope_parameters": {**ROPE, "rope_type": "dynamic"}}

ASKS: dict[str, tuple[Ask, ...]] = {
    "architecture": (
        Ask({"hf_overrides": {"architectures": ["Qwen2ForCausalLM"]}}, name="qwen3"),
        Ask({"model_impl": "transformers"}),
    ),
    "pooling": (Ask({"runner": "pooling"}), Ask({"convert": "embed"})),
    "multimodal-inputs": (Ask(name="q35_vl"), Ask({"limit_mm_per_prompt": {"image": 0}}, name="q35_vl")),
    "sliding-window": (Ask({"hf_overrides": {"sliding_window": 64}}, name="llama"),),
    "prompt-embeds": (Ask({"enable_prompt_embeds": True}),),
    "dtype": (Ask({"dtype": "float16"}), Ask({"dtype": "half"})),
    "quantization": (
        Ask({"quantization": "fp8", "dtype": "bfloat16"}),
        Ask({"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"}),
        Ask(
            {
                "hf_overrides": {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
                "dtype": "bfloat16",
            }
        ),
    ),
    "kv-cache-dtype": (
        Ask({"kv_cache_dtype": "fp8"}),
        Ask({"kv_cache_dtype": "bfloat16"}),
    ),
    "kv-cache-dtype-skip-layers": (Ask({"kv_cache_dtype_skip_layers": ["0"]}),),
    "speculative-decoding": (
        Ask({"speculative_config": NGRAM}),
        Ask({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}),
        Ask({"spec_method": "ngram", "spec_tokens": 2}),
    ),
    "lora": (Ask({"enable_lora": True}),),
    "sleep-mode": (Ask({"enable_sleep_mode": True}, vllm_first="Sleep mode is not supported"),),
    "weight-transfer": (Ask({"weight_transfer_config": vllm_config.WeightTransferConfig(backend="nccl")}),),
    "kv-connector": (Ask({"kv_transfer_config": kv_connector()}),),
    "kv-offloading": (Ask({"kv_offloading_size": 1.0}),),
    "encoder-connector": (Ask({"ec_transfer_config": encoder_connector()}),),
    "weight-offloading": (Ask({"cpu_offload_gb": 0.1}), Ask({"offload_group_size": 2})),
    "pipeline-parallel": (Ask({"pipeline_parallel_size": 2}),),
    "data-parallel": (Ask({"data_parallel_size": 2}),),
    "context-parallel": (
        Ask({"prefill_context_parallel_size": 2}),
        Ask({"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
    ),
    "expert-parallel": (
        Ask({"enable_expert_parallel": True}, name="q35_moe"),
        Ask({"enable_eplb": True}, name="q35_moe", vllm_first="only supported on CUDA"),
        Ask({"enable_elastic_ep": True}, name="q35_moe", vllm_first="enable_eplb"),
    ),
    "microbatching": (Ask({"enable_dbo": True}), Ask({"ubatch_size": 2})),
    "v2-model-runner": (Ask(env=V2),),
    "routed-experts": (Ask({"enable_return_routed_experts": True}, name="q35_moe"),),
    "sampling-mask": (
        Ask({"return_sampling_mask": True}, vllm_first="requires Model Runner V2"),
        Ask({"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}, env=V2),
    ),
    "float64-noise": (Ask({"use_fp64_gumbel": True}),),
    "watermark": (Ask({"watermark_config": {"algorithm": "gumbel", "key": 1}}),),
    "diffusion": (Ask({"diffusion_config": {"canvas_length": 8}}),),
    "profiler": (Ask({"profiler_config": {"profiler": "torch", "torch_profiler_dir": "/tmp/never"}}),),
    "encoder-only": (Ask({"language_model_only": True, "mm_encoder_only": True}, name="q35_vl"),),
    "batch-invariant": (Ask(name="llama", env={"VLLM_BATCH_INVARIANT": "1"}),),
    "attention-backend": (Ask({"attention_backend": "FLASH_ATTN"}),),
    "gdn-prefill-backend": (Ask({"gdn_prefill_backend": "triton"}),),
    "kda-prefill-backend": (Ask({"kda_prefill_backend": "triton"}),),
    "kda-decode-backend": (Ask({"kda_decode_backend": "triton"}),),
    "mamba-backend": (Ask({"mamba_backend": "flashinfer", "mamba_ssu_algorithm": "simple"}),),
    "mamba-cache-dtype": (Ask({"mamba_cache_dtype": "float16"}),),
    "stochastic-rounding": (Ask({"enable_mamba_cache_stochastic_rounding": True, "mamba_ssm_cache_dtype": "float16"}),),
    "replayssm": (Ask({"use_replayssm": True}),),
    "kv-sharing-fast-prefill": (Ask({"kv_sharing_fast_prefill": True}),),
    "chunked-prefill": (
        Ask({"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "enable_prefix_caching": False}),
        Ask(
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
            vllm_first="Chunked prefill is required for mamba cache mode 'align'",
        ),
    ),
    "hybrid-manager": (Ask({"disable_hybrid_kv_cache_manager": True}),),
    "foreign-scheduler": (Ask({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}),),
    "foreign-worker": (Ask({"worker_cls": "vllm.v1.worker.gpu_worker.Worker"}),),
    "block-size": (Ask({"block_size": 24}), Ask({"block_size": 8})),
    "prefix-match-unit": (Ask({"prefix_match_unit": 8}),),
    "fine-grained-junctions": (Ask({"enable_mamba_fine_grained_prefix_cache": True}),),
    "compact-gdn": (Ask(env={"VLLM_COMPACT_GDN": "0"}),),
    "contiguous-pa": (Ask(env={"VLLM_CONTIGUOUS_PA": "true"}),),
    "defragmenter": (Ask(env={"VLLM_DEFRAG": "1"}),),
    "lazy-mode": (Ask(env={"PT_HPU_LAZY_MODE": "1"}),),
    "max-model-len": (
        Ask({"max_model_len": 2048, "hf_overrides": {"max_position_embeddings": 256}}, name="llama", env=LONG),
        Ask({"max_model_len": 2048, "hf_overrides": {"max_position_embeddings": 256}}, env=LONG),
        Ask({"max_model_len": 513, "hf_overrides": YARN}, name="qwen3", env=LONG),
        # vLLM takes the factor for one of positions, here without the variable.
        Ask({"max_model_len": 400, "hf_overrides": DYNAMIC}, name="qwen3"),
    ),
    "bucket-lists": (Ask({"additional_config": {"decode_batch_buckets": [0, 8]}}),),
    "additional-config": (Ask({"additional_config": {"foo": 1, "decode_batch_buckets": [1, 8]}}),),
}
NO_ASK = {
    "encoder-decoder": "no supported architecture is one",
    "mla": "no supported architecture has it",
}
"""Rows that no engine of ours can be asked for, and why."""

BY_NAME = {row.name: row for row in TABLE}
FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*|\b(?:VLLM|PT)_[A-Z0-9_]+")


def named_in(sentence: str) -> list[str]:
    """Flags and variables that a sentence names."""
    return FLAG.findall(sentence)


def test_every_row_is_asked_for_or_has_a_reason():
    assert set(ASKS) | set(NO_ASK) == set(BY_NAME)
    assert not set(ASKS) & set(NO_ASK)


@pytest.fixture(scope="module")
def options() -> set[str]:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return set(parser._option_string_actions)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_flag_that_a_sentence_names_exists(row, options):
    named = re.findall(r"--[a-z0-9][a-z0-9-]*", row.sentence)
    assert [flag for flag in named if flag not in options] == []


EACH = [(name, ask) for name, asks in ASKS.items() for ask in asks]


@pytest.fixture
def error_of(checkpoint, monkeypatch) -> Callable[[Ask], str]:
    def start(ask: Ask) -> str:
        for key, value in ask.env.items():
            monkeypatch.setenv(key, value)
        with pytest.raises((RuntimeError, ValueError)) as caught, engine(checkpoint(ask.name), **ask.flags):
            pass
        return str(caught.value)

    return start


@pytest.mark.parametrize(("name", "ask"), EACH, ids=[f"{name}-{i}" for i, (name, _) in enumerate(EACH)])
def test_an_engine_that_is_asked_for_it_does_not_start(error_of, name, ask):
    message = error_of(ask)
    if ask.vllm_first is not None:
        assert re.search(ask.vllm_first, message)
        return
    assert message.startswith("vllm_gaudi refuses this configuration: ")
    first = re.split(r"\{.*?\}", BY_NAME[name].sentence)  # the sentence's fixed parts
    assert [part for part in first if part not in message] == []


def test_several_refusals_come_together(error_of):
    message = error_of(Ask({"enable_lora": True, "pipeline_parallel_size": 2}, env={"VLLM_DEFRAG": "1"}))
    assert [flag for flag in ("--enable-lora", "--pipeline-parallel-size", "VLLM_DEFRAG") if flag not in message] == []


def test_a_refused_start_leaves_nothing_behind(error_of, checkpoint):
    error_of(Ask({"enable_lora": True}))
    with engine(checkpoint("q35_moe")) as it:
        assert len(it.generate([[5] * 20], greedy(3))[0].tokens) == 3


def test_the_check_may_come_again_and_changes_nothing(checkpoint):
    """vLLM calls the platform once more on the live config."""
    with engine(checkpoint("q35_dense")) as it:
        config = it.vllm_engine.vllm_config
        before = str(config), config.cache_config.block_size, config.scheduler_config.scheduler_cls
        current_platform.check_and_update_config(config)
        assert (str(config), config.cache_config.block_size, config.scheduler_config.scheduler_cls) == before


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("q35_dense", {"scheduler_cls": OURS, "async_scheduling": False}),
        ("q35_dense", {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "block_size": 32}),
        ("q35_dense", {"mamba_cache_mode": "align", "enable_prefix_caching": False}),
        ("q35_vl", {"language_model_only": True}),
        ("q35_dense", {"tensor_parallel_size": 1, "distributed_executor_backend": "uni", "enforce_eager": True}),
        ("qwen3", {"enable_prefix_caching": True, "disable_sliding_window": True}),
        ("llama", {"enable_prefix_caching": False, "additional_config": {"prefill_query_buckets": [64, 256]}}),
        ("q35_moe", {"load_format": "safetensors", "max_num_scheduled_tokens": 100, "scheduling_policy": "priority"}),
    ],
    ids=str,
)
def test_what_is_supported_is_not_refused(checkpoint, name, flags):
    EngineArgs(**{**DEFAULTS, "model": str(checkpoint(name)), **flags}).create_engine_config()


class Subclass(AsyncScheduler):
    """As a user's: another class of vLLM's kind, given as a class."""


def test_any_scheduler_serves_a_model_of_attention_alone(checkpoint, prompt):
    """The GDN chunk, for which a scheduler of ours is needed, is nothing to these models."""
    prompts = [prompt(length) for length in (300, 100, 33)]

    def served(scheduler_cls: str | type | None) -> list[tuple[list[int], int | None]]:
        with engine(checkpoint("llama"), enable_prefix_caching=True, scheduler_cls=scheduler_cls) as it:
            results = it.generate(prompts, greedy(6)) + it.generate(prompts[:1], greedy(6))
            return [(result.tokens, result.cached_tokens) for result in results]

    ours = served(None)
    assert ours[-1][1] == 288
    for other in (
        "vllm.v1.core.sched.scheduler.Scheduler",
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
        Subclass,
    ):
        assert served(other) == ours


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama", {"max_model_len": 256, "hf_overrides": {"max_position_embeddings": 256}}),
        ("qwen3", {"max_model_len": 512, "hf_overrides": YARN}),
        (
            "q35_vl",
            {
                "max_model_len": 1024,
                "hf_overrides": {"text_config": {"max_position_embeddings": 256}},
                "language_model_only": True,
            },
        ),
    ],
    ids=["plain", "yarn", "three-axes"],
)
def test_every_position_of_the_rotary_table_is_served(name, flags, checkpoint, prompt, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    length = flags["max_model_len"]
    with engine(checkpoint(name), **flags) as it:
        assert len(it.generate([prompt(length - 8)], greedy(20))[0].tokens) == 8


def test_a_watermark_is_refused_without_words_about_the_model_runner(error_of):
    assert "VLLM_USE_V2_MODEL_RUNNER" not in error_of(ASKS["watermark"][0])
