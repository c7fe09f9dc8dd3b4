# SPDX-License-Identifier: Apache-2.0
"""The refusal table: each row is triggered by its own facts and by nothing else, and names what to change."""

from __future__ import annotations

import importlib.util
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from vllm_gaudi import envs
from vllm_gaudi.capabilities import SUPPORTED_ARCHITECTURES, TABLE, Facts, Refused, refusals, refuse

# For each row: changes to the default facts, every one of which triggers it and no other row.
TRIGGERS: dict[str, list[dict]] = {
    "architecture": [{"architecture": "MambaForCausalLM"}, {"architecture": ""}],
    "pooling": [{"runner": "pooling"}, {"runner": "draft"}],
    "multimodal-inputs": [{"takes_multimodal_inputs": True, "architecture": "Qwen3_5ForConditionalGeneration"}],
    "encoder-decoder": [{"is_encoder_decoder": True}],
    "mla": [{"uses_mla": True}],
    "sliding-window": [{"sliding_window": 4096}],
    "prompt-embeds": [{"prompt_embeds": True}],
    "dtype": [{"dtype": "float16"}, {"dtype": "float64"}],
    "quantization": [{"quantization": "fp8"}],
    "kv-cache-dtype": [
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "float32"},
        {"kv_cache_dtype": "bfloat16", "dtype": "float32"},
        {"skipped_kv_cache_layers": True},
    ],
    "speculative-decoding": [{"speculative_method": "mtp"}],
    "lora": [{"lora": True}],
    "sleep-mode": [{"sleep_mode": True}],
    "weight-transfer": [{"weight_transfer": True}],
    "kv-connector": [{"kv_connector": True}],
    "kv-offloading": [{"kv_offloading": True}],
    "encoder-connector": [{"encoder_connector": True}],
    "weight-offloading": [{"weight_offloading": True}],
    "pipeline-parallel": [{"pipeline_parallel": 2}],
    "data-parallel": [{"data_parallel": 2}],
    "context-parallel": [{"prefill_context_parallel": 2}, {"decode_context_parallel": 2}],
    "expert-parallel": [{"expert_parallel": True}],
    "microbatching": [{"microbatching": True}],
    "v2-model-runner": [{"v2_model_runner": True}],
    "routed-experts": [{"routed_experts_returned": True}],
    "sampling-mask": [{"sampling_mask_returned": True}],
    "float64-noise": [{"float64_noise": True}],
    "watermark": [{"watermark": True}],
    "diffusion": [{"diffusion": True}],
    "profiler": [{"profiler": True}],
    "encoder-only": [{"encoder_only": True}],
    "batch-invariant": [{"batch_invariant": True}],
    "attention-backend": [{"attention_backend": "FLASH_ATTN"}],
    "gdn-prefill-backend": [{"gdn_prefill_backend": "triton"}],
    "mamba-backend": [{"mamba_backend": "flashinfer"}],
    "mamba-cache-dtype": [{"mamba_cache_dtype": "float16"}, {"mamba_cache_dtype": "bfloat16", "dtype": "float32"}],
    "stochastic-rounding": [{"stochastic_rounding": True}],
    "replayssm": [{"replayssm": True}],
    "kv-sharing-fast-prefill": [{"kv_sharing_fast_prefill": True}],
    "chunked-prefill": [{"chunked_prefill": False}],
    "hybrid-manager": [{"hybrid_manager_disabled": True}],
    "foreign-scheduler": [{"foreign_scheduler": "my.Scheduler"}],
    "foreign-worker": [{"foreign_worker": "my.Worker"}],
    "block-size": [{"block_size": 64}, {"block_size": 24, "block_size_granule": 16}],
    "mamba-cache-mode": [{"mamba_cache_mode": "all"}],
    "prefix-match-unit": [{"prefix_match_unit": 64}],
    "fine-grained-junctions": [{"fine_grained_junctions": True}],
    "compact-gdn": [{"compact_gdn": False}],
    "contiguous-pa": [{"contiguous_pa": True}],
    "defragmenter": [{"defragmenter": True}],
    "lazy-mode": [{"lazy_mode": True}],
    "additional-config": [{"unknown_additional_keys": ("colour",)}],
}

# Facts that are fine: near misses of the rows above.
ALLOWED: list[dict] = [
    {},
    *({"architecture": name, "is_hybrid": "3_5" in name or "Next" in name} for name in SUPPORTED_ARCHITECTURES),
    {"dtype": "float32"},
    {"dtype": "float32", "kv_cache_dtype": "float32"},
    {"kv_cache_dtype": "bfloat16"},
    {"block_size": 128},
    {"block_size": 896},
    {"block_size": 48, "block_size_granule": 16},
    {"mamba_cache_mode": "align"},
    {"attention_backend": "CUSTOM"},
    {"mamba_cache_dtype": "bfloat16"},
    {"watermark": False, "v2_model_runner": False},
    {"is_hybrid": False, "hybrid_manager_disabled": True},
    {"is_hybrid": False, "compact_gdn": False},
    {"is_hybrid": False, "mamba_cache_mode": "all"},
]

CASES = [(name, change) for name, changes in TRIGGERS.items() for change in changes]


def rows_for(facts: Facts) -> list[str]:
    return [row.name for row in TABLE if row.applies(facts)]


def test_every_row_is_listed_here_once():
    names = [row.name for row in TABLE]
    assert len(set(names)) == len(names)
    assert sorted(names) == sorted(TRIGGERS)


@pytest.mark.parametrize(("name", "change"), CASES, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
def test_a_row_is_triggered_by_its_facts_and_no_other_row_is(name, change):
    assert rows_for(replace(Facts(), **change)) == [name]


@pytest.mark.parametrize("change", ALLOWED, ids=range(len(ALLOWED)))
def test_what_is_supported_passes(change):
    facts = replace(Facts(), **change)
    assert refusals(facts) == []
    assert refuse(facts) is None


def test_every_fact_is_asked_about():
    """A fact that no row looks at would be a refusal that was forgotten."""
    asked = {name for changes in TRIGGERS.values() for change in changes for name in change} | {"is_hybrid"}
    assert {field.name for field in fields(Facts)} == asked


@pytest.mark.parametrize(("name", "change"), CASES, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
def test_a_sentence_names_a_flag_or_variable_and_is_complete(name, change):
    (sentence,) = refusals(replace(Facts(), **change))
    variables = [variable for variable in (*envs.TABLE, "VLLM_BATCH_INVARIANT") if variable in sentence]
    assert variables or re.search(r"--[a-z]", sentence), sentence
    assert "{" not in sentence and "facts." not in sentence, sentence


def test_flags_in_sentences_are_vllms_flags():
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text()
    known = set(re.findall(r'"(--[a-z0-9-]+)"', source))
    for row in TABLE:
        for flag in re.findall(r"--[a-z][a-z0-9-]*", row.sentence):
            assert flag in known or flag.replace("--no-", "--") in known, f"{row.name}: {flag}"


def test_all_refusals_are_reported_together_in_table_order():
    facts = Facts(lora=True, pipeline_parallel=4, dtype="float16", defragmenter=True)
    with pytest.raises(RuntimeError) as error:
        refuse(facts)
    text = str(error.value)
    assert text.startswith("vllm_gaudi refuses this configuration: ")
    order = [text.index(word) for word in ("float16", "--enable-lora", "instead of 4", "VLLM_DEFRAG")]
    assert order == sorted(order)
    assert len(refusals(facts)) == 4


def test_a_refusal_carries_its_rows_into_another_process():
    with pytest.raises(Refused) as refused:
        refuse(Facts(lora=True, dtype="float16"))
    error = pickle.loads(pickle.dumps(refused.value))
    assert list(error.sentences) == ["dtype", "lora"]
    assert str(error) == str(refused.value) and all(sentence in str(error) for sentence in error.sentences.values())
