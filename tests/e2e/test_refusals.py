# SPDX-License-Identifier: Apache-2.0
"""Every row of the refusal table: by its facts alone, and by an engine that is asked for it and must not start.

``CASES`` has one entry per row of ``capabilities.TABLE`` (a test says so). What vLLM refuses itself before our platform
is asked is marked ``vllm_first``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm import config as vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_gaudi import capabilities
from vllm_gaudi.capabilities import TABLE, Facts, refusals
from vllm_gaudi.testing.engine import DEFAULTS, engine, greedy


@dataclass(frozen=True)
class Ask:
    """An engine that must not start: ``flags`` of ``EngineArgs`` and ``env`` on the tiny checkpoint ``name``."""

    flags: dict[str, Any] = field(default_factory=dict)
    name: str = "q35_dense"
    env: dict[str, str] = field(default_factory=dict)
    vllm_first: str | None = None  # pattern of vLLM's own error, where that comes before ours


@dataclass(frozen=True)
class Case:
    """``refused``: facts that a row refuses, ``passed``: near ones that it lets through; no ``asks`` needs a reason."""

    refused: tuple[dict[str, Any], ...]
    passed: tuple[dict[str, Any], ...] = ()
    asks: tuple[Ask, ...] = ()
    no_ask: str | None = None


def kv_connector() -> Any:
    return vllm_config.KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")


def encoder_connector() -> Any:
    return vllm_config.ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
OURS = "vllm_gaudi.v1.core.sched.hpu_scheduler.HPUScheduler"
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}

CASES: dict[str, Case] = {
    "architecture": Case(
        ({"architecture": "Qwen2ForCausalLM"}, {"architecture": "TransformersForCausalLM"}),
        tuple({"architecture": name} for name in capabilities.SUPPORTED_ARCHITECTURES),
        (
            Ask({"hf_overrides": {"architectures": ["Qwen2ForCausalLM"]}}, name="qwen3"),
            Ask({"model_impl": "transformers"}),
        ),
    ),
    "pooling": Case(({"runner": "pooling"},), (), (Ask({"runner": "pooling"}), Ask({"convert": "embed"}))),
    "multimodal-inputs": Case(
        ({"takes_multimodal_inputs": True},),
        (),
        (Ask(name="q35_vl"), Ask({"limit_mm_per_prompt": {"image": 0}}, name="q35_vl")),
    ),
    "encoder-decoder": Case(({"is_encoder_decoder": True},), no_ask="no supported architecture is one"),
    "mla": Case(({"uses_mla": True},), no_ask="no supported architecture has it"),
    "sliding-window": Case(
        ({"sliding_window": 64},), (), (Ask({"hf_overrides": {"sliding_window": 64}}, name="llama"),)
    ),
    "prompt-embeds": Case(({"prompt_embeds": True},), (), (Ask({"enable_prompt_embeds": True}),)),
    "dtype": Case(
        ({"dtype": "float16"}, {"dtype": "float64"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        (Ask({"dtype": "float16"}), Ask({"dtype": "half"})),
    ),
    "quantization": Case(
        ({"quantization": "fp8"},),
        (),
        (
            Ask({"quantization": "fp8", "dtype": "bfloat16"}),
            Ask({"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"}),
            Ask(
                {
                    "hf_overrides": {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
                    "dtype": "bfloat16",
                }
            ),
        ),
    ),
    "kv-cache-dtype": Case(
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "float16"}, {"skipped_kv_cache_layers": True}),
        ({"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "float32", "dtype": "float32"}),
        (
            Ask({"kv_cache_dtype": "fp8"}),
            Ask({"kv_cache_dtype": "bfloat16"}),
            Ask({"kv_cache_dtype_skip_layers": ["0"]}),
        ),
    ),
    "speculative-decoding": Case(
        ({"speculative_method": "ngram"},),
        (),
        (
            Ask({"speculative_config": NGRAM}),
            Ask({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}),
            Ask({"spec_method": "ngram", "spec_tokens": 2}),
        ),
    ),
    "lora": Case(({"lora": True},), (), (Ask({"enable_lora": True}),)),
    "sleep-mode": Case(
        ({"sleep_mode": True},), (), (Ask({"enable_sleep_mode": True}, vllm_first="Sleep mode is not supported"),)
    ),
    "weight-transfer": Case(
        ({"weight_transfer": True},),
        (),
        (Ask({"weight_transfer_config": vllm_config.WeightTransferConfig(backend="nccl")}),),
    ),
    "kv-connector": Case(({"kv_connector": True},), (), (Ask({"kv_transfer_config": kv_connector()}),)),
    "kv-offloading": Case(({"kv_offloading": True},), (), (Ask({"kv_offloading_size": 1.0}),)),
    "encoder-connector": Case(({"encoder_connector": True},), (), (Ask({"ec_transfer_config": encoder_connector()}),)),
    "weight-offloading": Case(
        ({"weight_offloading": True},), (), (Ask({"cpu_offload_gb": 0.1}), Ask({"offload_group_size": 2}))
    ),
    "pipeline-parallel": Case(
        ({"pipeline_parallel": 2},), ({"pipeline_parallel": 1},), (Ask({"pipeline_parallel_size": 2}),)
    ),
    "data-parallel": Case(({"data_parallel": 2},), ({"data_parallel": 1},), (Ask({"data_parallel_size": 2}),)),
    "context-parallel": Case(
        ({"prefill_context_parallel": 2}, {"decode_context_parallel": 2}),
        ({"prefill_context_parallel": 1, "decode_context_parallel": 1},),
        (
            Ask({"prefill_context_parallel_size": 2}),
            Ask({"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
        ),
    ),
    "expert-parallel": Case(
        ({"expert_parallel": True},),
        (),
        (
            Ask({"enable_expert_parallel": True}, name="q35_moe"),
            Ask({"enable_eplb": True}, name="q35_moe", vllm_first="only supported on CUDA"),
            Ask({"enable_elastic_ep": True}, name="q35_moe", vllm_first="enable_eplb"),
        ),
    ),
    "microbatching": Case(({"microbatching": True},), (), (Ask({"enable_dbo": True}), Ask({"ubatch_size": 2}))),
    "v2-model-runner": Case(({"v2_model_runner": True},), (), (Ask(env=V2),)),
    "routed-experts": Case(
        ({"routed_experts_returned": True},), (), (Ask({"enable_return_routed_experts": True}, name="q35_moe"),)
    ),
    "sampling-mask": Case(
        ({"sampling_mask_returned": True},),
        (),
        (
            Ask({"return_sampling_mask": True}, vllm_first="requires Model Runner V2"),
            Ask({"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}, env=V2),
        ),
    ),
    "float64-noise": Case(({"float64_noise": True},), (), (Ask({"use_fp64_gumbel": True}),)),
    "watermark": Case(({"watermark": True},), (), (Ask({"watermark_config": {"algorithm": "gumbel", "key": 1}}),)),
    "diffusion": Case(({"diffusion": True},), (), (Ask({"diffusion_config": {"canvas_length": 8}}),)),
    "profiler": Case(
        ({"profiler": True},),
        (),
        (Ask({"profiler_config": {"profiler": "torch", "torch_profiler_dir": "/tmp/never"}}),),
    ),
    "encoder-only": Case(
        ({"encoder_only": True},),
        (),
        (Ask({"language_model_only": True, "mm_encoder_only": True}, name="q35_vl"),),
    ),
    "batch-invariant": Case(({"batch_invariant": True},), (), (Ask(name="llama", env={"VLLM_BATCH_INVARIANT": "1"}),)),
    "attention-backend": Case(
        ({"attention_backend": "FLASH_ATTN"},),
        ({"attention_backend": "CUSTOM"},),
        (Ask({"attention_backend": "FLASH_ATTN"}),),
    ),
    "gdn-prefill-backend": Case(({"gdn_prefill_backend": "triton"},), (), (Ask({"gdn_prefill_backend": "triton"}),)),
    "mamba-backend": Case(
        ({"mamba_backend": "flashinfer"},),
        (),
        (Ask({"mamba_backend": "flashinfer", "mamba_ssu_algorithm": "simple"}),),
    ),
    "mamba-cache-dtype": Case(
        ({"mamba_cache_dtype": "float16"},),
        ({"mamba_cache_dtype": "bfloat16"},),
        (Ask({"mamba_cache_dtype": "float16"}),),
    ),
    "stochastic-rounding": Case(
        ({"stochastic_rounding": True},),
        (),
        (Ask({"enable_mamba_cache_stochastic_rounding": True, "mamba_ssm_cache_dtype": "float16"}),),
    ),
    "replayssm": Case(({"replayssm": True},), (), (Ask({"use_replayssm": True}),)),
    "kv-sharing-fast-prefill": Case(
        ({"kv_sharing_fast_prefill": True},), (), (Ask({"kv_sharing_fast_prefill": True}),)
    ),
    "chunked-prefill": Case(
        ({"chunked_prefill": False},),
        (),
        (
            Ask({"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, name="qwen3"),
            Ask(
                {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
                vllm_first="Chunked prefill is required for mamba cache mode 'align'",
            ),
        ),
    ),
    "hybrid-manager": Case(
        ({"hybrid_manager_disabled": True},),
        ({"hybrid_manager_disabled": True, "is_hybrid": False},),
        (Ask({"disable_hybrid_kv_cache_manager": True}),),
    ),
    "foreign-scheduler": Case(
        ({"foreign_scheduler": "other.Scheduler"},),
        (),
        (Ask({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}),),
    ),
    "foreign-worker": Case(
        ({"foreign_worker": "other.Worker"},), (), (Ask({"worker_cls": "vllm.v1.worker.gpu_worker.Worker"}),)
    ),
    "block-size": Case(
        ({"block_size": 64}, {"block_size": 24, "block_size_granule": 16}),
        ({"block_size": 256}, {"block_size": 48, "block_size_granule": 16}, {"block_size": None}),
        (Ask({"block_size": 24}), Ask({"block_size": 8})),
    ),
    "mamba-cache-mode": Case(
        ({"mamba_cache_mode": "all"},),
        ({"mamba_cache_mode": "align"}, {"mamba_cache_mode": "none"}, {"mamba_cache_mode": "all", "is_hybrid": False}),
        no_ask="vLLM 0.30 turns it into align, with a warning of its own, before we are asked",
    ),
    "prefix-match-unit": Case(
        ({"prefix_match_unit": 8},), ({"prefix_match_unit": 8, "is_hybrid": False},), (Ask({"prefix_match_unit": 8}),)
    ),
    "fine-grained-junctions": Case(
        ({"fine_grained_junctions": True},),
        ({"fine_grained_junctions": True, "is_hybrid": False},),
        (Ask({"enable_mamba_fine_grained_prefix_cache": True}),),
    ),
    "compact-gdn": Case(
        ({"compact_gdn": False},), ({"compact_gdn": False, "is_hybrid": False},), (Ask(env={"VLLM_COMPACT_GDN": "0"}),)
    ),
    "contiguous-pa": Case(({"contiguous_pa": True},), (), (Ask(env={"VLLM_CONTIGUOUS_PA": "true"}),)),
    "defragmenter": Case(({"defragmenter": True},), (), (Ask(env={"VLLM_DEFRAG": "1"}),)),
    "lazy-mode": Case(({"lazy_mode": True},), (), (Ask(env={"PT_HPU_LAZY_MODE": "1"}),)),
    "additional-config": Case(
        ({"unknown_additional_keys": ("foo",)},),
        (),
        (Ask({"additional_config": {"foo": 1, "decode_batch_buckets": [1, 8]}}),),
    ),
}

BY_NAME = {row.name: row for row in TABLE}
FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*|\b(?:VLLM|PT)_[A-Z0-9_]+")


def named_in(sentence: str) -> list[str]:
    """Flags and variables that a sentence names."""
    return FLAG.findall(sentence)


# The table by itself


def test_no_row_is_untested():
    assert list(BY_NAME) == [row.name for row in TABLE]  # no name twice
    assert set(CASES) == set(BY_NAME)
    assert [name for name, case in CASES.items() if not case.asks and not case.no_ask] == []


def test_the_default_facts_are_a_supported_engine():
    assert refusals(Facts()) == []
    capabilities.refuse(Facts())


def test_every_fact_is_asked_by_a_row():
    """A fact that no row reads is a refusal that somebody forgot."""
    asked: set[str] = set()

    class Spy:
        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            return getattr(self.facts, name)

    for facts in (Facts(), *(Facts(**f) for case in CASES.values() for f in (*case.refused, *case.passed))):
        spy = Spy()
        spy.facts = facts
        for row in TABLE:
            row.applies(spy)
    assert {f.name for f in dataclasses.fields(Facts)} == asked


@pytest.mark.parametrize("name", CASES)
def test_row_by_its_facts(name):
    row = BY_NAME[name]
    for values in CASES[name].refused:
        sentences = refusals(Facts(**values))
        assert sentences == [row.sentence.format(facts=Facts(**values))]
        with pytest.raises(RuntimeError, match=re.escape(sentences[0])):
            capabilities.refuse(Facts(**values))
    for values in CASES[name].passed:
        assert not row.applies(Facts(**values))


def test_all_that_applies_is_said_at_once():
    values: dict[str, Any] = {}
    for case in CASES.values():
        values |= {k: v for k, v in case.refused[-1].items() if k not in ("is_hybrid", "block_size_granule")}
    # A watermark makes vLLM choose its V2 runner, so that row leaves the word to the watermark's.
    assert len(refusals(Facts(**values))) == len(TABLE) - 1


@pytest.fixture(scope="module")
def options() -> set[str]:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return set(parser._option_string_actions)


@pytest.mark.parametrize("name", CASES)
def test_a_sentence_names_what_to_change_and_that_exists(name, options):
    sentence = BY_NAME[name].sentence.format(facts=Facts(**CASES[name].refused[0]))
    assert named_in(sentence)
    assert [flag for flag in named_in(sentence) if flag.startswith("--") and flag not in options] == []
    assert "{" not in sentence and sentence == sentence.strip() and not sentence.endswith(".")


# The table asked by an engine

ASKS = [(name, ask) for name, case in CASES.items() for ask in case.asks]


@pytest.fixture
def error_of(checkpoint, monkeypatch) -> Callable[[Ask], str]:
    def start(ask: Ask) -> str:
        for key, value in ask.env.items():
            monkeypatch.setenv(key, value)
        with pytest.raises((RuntimeError, ValueError)) as caught, engine(checkpoint(ask.name), **ask.flags):
            pass
        return str(caught.value)

    return start


@pytest.mark.parametrize(("name", "ask"), ASKS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(ASKS)])
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


def test_a_watermark_is_refused_without_words_about_the_model_runner(error_of):
    assert "VLLM_USE_V2_MODEL_RUNNER" not in error_of(CASES["watermark"].asks[0])


@pytest.mark.parametrize("flag", ["kda_prefill_backend", "kda_decode_backend"])
@pytest.mark.xfail(strict=True, reason="fault: refused as an unknown key of --additional-config, where vLLM keeps it")
def test_a_flag_that_vllm_keeps_among_additional_keys_is_called_by_its_name(error_of, flag):
    assert "--" + flag.replace("_", "-") in error_of(Ask({flag: "triton"}))
