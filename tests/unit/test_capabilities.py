# SPDX-License-Identifier: Apache-2.0
"""The refusal table: a setting is refused by its own row and by no other, in a sentence that names what to change; and
what a row reads is there in vLLM's configuration classes.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import inspect
import pickle
import re
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gaudi import capabilities, envs
from vllm_gaudi.bucketing.grid import CONFIG_KEYS, PREFILL_ROW_TILE, BucketGrid
from vllm_gaudi.capabilities import SUPPORTED_ARCHITECTURES, TABLE, Refusal, Refused, refusals, refuse


@dataclasses.dataclass(frozen=True)
class Case:
    """``settings``: changes to a supported configuration, and ``env``: to the environment, that ``row`` refuses; the
    sentence has the words ``says``. ``hpu``: on a Gaudi."""

    row: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    says: str = ""
    hpu: bool = False


def multimodal(language_model_only: bool, mm_encoder_only: bool = False) -> SimpleNamespace:
    return SimpleNamespace(language_model_only=language_model_only, mm_encoder_only=mm_encoder_only)


def offload(gib: float, group_size: int) -> SimpleNamespace:
    return SimpleNamespace(
        uva=SimpleNamespace(cpu_offload_gb=gib), prefetch=SimpleNamespace(offload_group_size=group_size)
    )


def rotary(positions: int, **rope: Any) -> SimpleNamespace:
    return SimpleNamespace(max_position_embeddings=positions, rope_parameters={"rope_theta": 10000.0, **rope})


SCALED = {"factor": 2.0, "original_max_position_embeddings": 1024}
ATTENTION_ONLY = {"model__architecture": "LlamaForCausalLM", "model__is_hybrid": False}
FLOAT32 = {"model__dtype": torch.float32}
OWN = "vllm_gaudi.v1.core.sched.hpu_scheduler.HPUScheduler"

CASES = [
    Case("architecture", {"model__architecture": "OPTForCausalLM"}, says="OPTForCausalLM"),
    Case("architecture", {"model__architecture": ""}),
    Case("pooling", {"model__runner_type": "pooling"}, says="--runner pooling"),
    Case("pooling", {"model__runner_type": "draft"}),
    Case("multimodal-inputs", {"model__multimodal_config": multimodal(False)}),
    Case("encoder-decoder", {"model__is_encoder_decoder": True}),
    Case("mla", {"model__use_mla": True}),
    Case("sliding-window", {"model__get_sliding_window": lambda: 128}, says="128 tokens"),
    Case("prompt-embeds", {"model__enable_prompt_embeds": True}),
    Case("dtype", {"model__dtype": torch.float16}, says="float16"),
    Case("dtype", {"model__dtype": torch.float64}),
    Case("quantization", {"model__quantization": "fp8"}, says="fp8"),
    Case("kv-cache-dtype", {"cache__cache_dtype": "fp8"}, says="fp8"),
    Case("kv-cache-dtype", {"cache__cache_dtype": "float32"}, says="float32"),
    Case("kv-cache-dtype", {**FLOAT32, "cache__cache_dtype": "bfloat16"}, says="bfloat16"),
    Case("kv-cache-dtype-skip-layers", {"cache__kv_cache_dtype_skip_layers": ["0", "2"]}, says="0, 2"),
    Case("speculative-decoding", {"speculative_config": SimpleNamespace(method="ngram")}, says="ngram"),
    Case("lora", {"lora_config": SimpleNamespace()}),
    Case("sleep-mode", {"model__enable_sleep_mode": True}),
    Case("weight-transfer", {"weight_transfer_config": SimpleNamespace()}),
    Case("kv-connector", {"kv_transfer_config": SimpleNamespace()}),
    Case("kv-offloading", {"cache__kv_offloading_size": 1.5}, says="1.5 GiB"),
    Case("encoder-connector", {"ec_transfer_config": SimpleNamespace()}),
    Case("weight-offloading", {"offload_config": offload(1.5, 0)}, says="1.5 GiB"),
    Case("weight-offloading", {"offload_config": offload(0, 2)}, says="groups of 2 layers"),
    Case("pipeline-parallel", {"parallel__pipeline_parallel_size": 2}, says="instead of 2"),
    Case("data-parallel", {"parallel__data_parallel_size": 2}, says="instead of 2"),
    Case("context-parallel", {"parallel__prefill_context_parallel_size": 2}, says="2 ranks in prefill, 1 in decode"),
    Case("context-parallel", {"parallel__decode_context_parallel_size": 2}, says="2 in decode"),
    Case("expert-parallel", {"parallel__enable_expert_parallel": True}),
    Case("expert-parallel", {"parallel__enable_eplb": True}),
    Case("expert-parallel", {"parallel__enable_elastic_ep": True}),
    Case("microbatching", {"parallel__enable_dbo": True}),
    Case("microbatching", {"parallel__ubatch_size": 2}),
    Case("v2-model-runner", {"use_v2_model_runner": True}),
    Case("routed-experts", {"model__enable_return_routed_experts": True}),
    Case("sampling-mask", {"model__return_sampling_mask": True}),
    Case("float64-noise", {"model__use_fp64_gumbel": True}),
    Case("watermark", {"watermark_config": SimpleNamespace()}),
    # vLLM picks its V2 runner for a watermark by itself; nobody has set the variable.
    Case("watermark", {"watermark_config": SimpleNamespace(), "use_v2_model_runner": True}),
    Case("diffusion", {"diffusion_config": SimpleNamespace()}),
    Case("profiler", {"profiler__profiler": "torch"}, says="torch"),
    Case("encoder-only", {"model__multimodal_config": multimodal(True, mm_encoder_only=True)}),
    Case("batch-invariant", env={"VLLM_BATCH_INVARIANT": "1"}),
    Case("attention-backend", {"attention__backend": SimpleNamespace(name="FLASH_ATTN")}, says="FLASH_ATTN"),
    Case("gdn-prefill-backend", {"additional_config": {"gdn_prefill_backend": "triton"}}, says="triton"),
    Case("kda-prefill-backend", {"additional_config": {"kda_prefill_backend": "fused"}}, says="fused"),
    Case("kda-decode-backend", {"additional_config": {"kda_decode_backend": "native"}}, says="native"),
    Case("mamba-backend", {"mamba__backend": SimpleNamespace(name="FLASHINFER")}, says="flashinfer"),
    Case("mamba-cache-dtype", {"cache__mamba_cache_dtype": "float16"}, says="float16"),
    Case("mamba-cache-dtype", {**FLOAT32, "cache__mamba_cache_dtype": "bfloat16"}, says="bfloat16"),
    Case("stochastic-rounding", {"mamba__enable_stochastic_rounding": True}),
    Case("replayssm", {"cache__use_replayssm": True}),
    Case("kv-sharing-fast-prefill", {"cache__kv_sharing_fast_prefill": True}),
    Case("chunked-prefill", {"scheduler__enable_chunked_prefill": False}),
    Case("hybrid-manager", {"scheduler__disable_hybrid_kv_cache_manager": True}),
    Case("foreign-scheduler", {"scheduler__scheduler_cls": "my.Scheduler"}, says="my.Scheduler"),
    Case("foreign-scheduler", {"scheduler__scheduler_cls": SimpleNamespace}, says="types.SimpleNamespace"),
    Case("foreign-worker", {"parallel__worker_cls": "my.Worker"}, says="my.Worker"),
    Case("block-size", {"cache__user_specified_block_size": True, "cache__block_size": 24}, says="a multiple of 16"),
    Case("block-size", {"cache__user_specified_block_size": True, "cache__block_size": 64}, says="of 128", hpu=True),
    Case("max-model-len", {"model__max_model_len": 4097}, says="--max-model-len 4096 or less"),
    Case("max-model-len", {"model__hf_text_config": rotary(256)}, says="256 positions"),
    # A factor that makes the positions denser and not more.
    Case(
        "max-model-len", {"model__hf_text_config": rotary(2048, **SCALED, rope_type="dynamic")}, says="2048 positions"
    ),
    Case("max-model-len", {"model__hf_text_config": rotary(8192, **SCALED, rope_type="yarn")}, says="2048 positions"),
    Case("prefix-match-unit", {"cache__prefix_match_unit": 16}, says="units of 16 tokens"),
    Case("fine-grained-junctions", {"cache__enable_mamba_fine_grained_prefix_cache": True}),
    Case("compact-gdn", env={"VLLM_COMPACT_GDN": "0"}),
    Case("contiguous-pa", env={"VLLM_CONTIGUOUS_PA": "1"}),
    Case("defragmenter", env={"VLLM_DEFRAG": "1"}),
    Case("lazy-mode", env={"PT_HPU_LAZY_MODE": "1"}),
    Case(
        "bucket-lists",
        {"additional_config": {"prefill_query_buckets": [100], "decode_batch_buckets": [4, 0]}},
        says="prefill_query_buckets has 100; every step must be a positive multiple of 64; decode_batch_buckets has 0",
    ),
    Case("bucket-lists", {"additional_config": {"decode_block_buckets": "816"}}, says="decode_block_buckets is '816'"),
    Case("additional-config", {"additional_config": {"colour": 1, "animal": 2}}, says="animal, colour"),
]
IDS = [f"{case.row}-{n}" for n, case in enumerate(CASES)]
ROWS = {row.name: row for row in TABLE}

EXEMPTIONS: list[dict[str, Any]] = [
    {},
    *(
        {"model__architecture": name, "model__is_hybrid": "3_5" in name or "Next" in name}
        for name in SUPPORTED_ARCHITECTURES
    ),
    FLOAT32,
    {**FLOAT32, "cache__cache_dtype": "float32"},
    {"cache__cache_dtype": "bfloat16"},
    {"cache__mamba_cache_dtype": "bfloat16"},
    {"model__multimodal_config": multimodal(True)},
    {"attention__backend": SimpleNamespace(name="CUSTOM")},
    {"cache__block_size": 24},  # not the user's: vLLM derives it later
    {"cache__user_specified_block_size": True, "cache__block_size": 48},
    {"model__max_model_len": 16384, "model__hf_text_config": rotary(4096, mrope_section=[2, 1, 1])},
    {"model__max_model_len": 2048, "model__hf_text_config": rotary(1024, **SCALED, rope_type="yarn")},
    {"model__max_model_len": 10**9, "model__hf_text_config": SimpleNamespace()},  # no rotary embedding
    {"model__hf_text_config": rotary(4096, rope_type="yarn", factor=None)},
    {"additional_config": {"decode_batch_buckets": [1, 2]}},
    {"scheduler__scheduler_cls": OWN},
    {"parallel__worker_cls": "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"},
]


@pytest.fixture
def configured(config_of, monkeypatch):
    """``configured(case)``: its configuration, in its environment."""

    def build(case: Case) -> SimpleNamespace:
        for name, text in case.env.items():
            monkeypatch.setenv(name, text)
        monkeypatch.setattr(capabilities.device, "is_hpu", lambda: case.hpu)
        return config_of(**case.settings)

    return build


def test_every_row_has_a_case_and_no_name_is_given_twice():
    assert len(ROWS) == len(TABLE)
    assert {case.row for case in CASES} == set(ROWS)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_setting_is_refused_by_its_row_and_by_no_other(configured, case):
    config = configured(case)
    found = refusals(config)
    assert list(found) == [case.row]
    assert case.says in found[case.row]
    with pytest.raises(RuntimeError, match=re.escape(found[case.row])):
        refuse(config)


@pytest.mark.parametrize("settings", EXEMPTIONS, ids=range(len(EXEMPTIONS)))
def test_what_is_supported_passes(config_of, settings):
    config = config_of(**settings)
    assert refusals(config) == {}
    assert refuse(config) is None


@pytest.mark.parametrize("case", [case for case in CASES if ROWS[case.row].hybrid_only], ids=lambda case: case.row)
def test_a_reason_of_hybrids_does_not_concern_a_model_of_attention_alone(configured, config_of, case):
    configured(case)
    assert refusals(config_of(**case.settings, **ATTENTION_ONLY)) == {}


@pytest.mark.parametrize("case", [case for case in CASES if not ROWS[case.row].hybrid_only], ids=lambda case: case.row)
def test_every_other_reason_concerns_all_models(configured, config_of, case):
    configured(case)
    assert list(refusals(config_of(**{**ATTENTION_ONLY, **case.settings}))) == [case.row]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_sentence_names_a_flag_or_variable_and_is_complete(configured, case):
    (sentence,) = refusals(configured(case)).values()
    assert [name for name in envs.TABLE if name in sentence] or re.search(r"--[a-z]", sentence), sentence
    assert not re.search(r"[{}]|None|namespace|object at", sentence), sentence


@pytest.fixture(scope="module")
def arguments_of_vllm() -> str:
    """The source of vLLM's command line."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text()


def test_flags_in_sentences_are_vllms_flags(arguments_of_vllm):
    known = set(re.findall(r'"(--[a-z0-9-]+)"', arguments_of_vllm))
    for row in TABLE:
        for flag in re.findall(r"--[a-z][a-z0-9-]*", row.sentence):
            assert flag in known or flag.replace("--no-", "--") in known, f"{row.name}: {flag}"


def test_every_flag_that_vllm_keeps_in_additional_config_has_a_row_of_its_own(arguments_of_vllm):
    kept = set(re.findall(r'self\.additional_config\["(\w+)"\] = ', arguments_of_vllm))
    assert kept == set(capabilities.KEYS_OF_VLLM)
    for key in kept:
        name = key.replace("_", "-")
        assert f"--{name}" in ROWS[name].sentence


def test_all_refusals_are_reported_together_in_table_order(config_of, monkeypatch):
    monkeypatch.setenv("VLLM_DEFRAG", "1")
    config = config_of(lora_config=SimpleNamespace(), parallel__pipeline_parallel_size=4, model__dtype=torch.float16)
    with pytest.raises(RuntimeError) as error:
        refuse(config)
    text = str(error.value)
    assert text.startswith("vllm_gaudi refuses this configuration: ")
    order = [text.index(word) for word in ("float16", "--enable-lora", "instead of 4", "VLLM_DEFRAG")]
    assert order == sorted(order)
    assert len(refusals(config)) == 4


def test_a_refusal_carries_its_rows_into_another_process(config_of):
    with pytest.raises(Refused) as refused:
        refuse(config_of(lora_config=SimpleNamespace(), model__dtype=torch.float16))
    error = pickle.loads(pickle.dumps(refused.value))
    assert list(error.sentences) == ["dtype", "lora"]
    assert str(error) == str(refused.value) and all(sentence in str(error) for sentence in error.sentences.values())


@pytest.mark.parametrize(
    "steps", [[1], [64], [100], [64, 128], [], [0], [-64], [1.5], ["64"], [True], 8, "64", None], ids=str
)
@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_a_bucket_list_is_refused_if_and_only_if_the_grid_refuses_it(config_of, key, steps):
    def of_the_grid() -> str | None:
        limits = {"max_query": 256, "max_batch": 8, "max_context": 512, "kernel_block": 16, "max_blocks": 400}
        try:
            BucketGrid(query_multiple=PREFILL_ROW_TILE, **limits, overrides={key: steps})
        except ValueError as error:
            return str(error)
        return None

    said, found = of_the_grid(), refusals(config_of(additional_config={key: steps}))
    assert (said is None) == (not found)
    assert said is None or said in found["bucket-lists"]


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"factor": 2.0},
    "linear-fraction": {"rope_type": "linear", "factor": 1.33},
    "ntk": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "dynamic-alpha": {"rope_type": "dynamic", "alpha": 1000},
    "yarn": {"factor": 4.0},
    "yarn-fraction": {"rope_type": "yarn", "factor": 2.7},
    "mrope": {"rope_type": "default", "mrope_section": [8, 4, 4]},
    "mrope-yarn": {"rope_type": "yarn", "factor": 2.7, "mrope_section": [8, 4, 4], "mrope_interleaved": True},
}


@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("name", ROPES)
def test_the_positions_of_a_rotary_table_are_those_that_vllm_makes(name):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = {"rope_type": name, "rope_theta": 10000.0, "original_max_position_embeddings": 100, **ROPES[name]}
    with set_current_vllm_config(VllmConfig()):
        made = get_rope(32, max_position=256, rope_parameters=rope, dtype=torch.float32)
    config = SimpleNamespace(max_position_embeddings=256, rope_parameters=rope)
    assert capabilities.rotary_positions(config) == made.cos_sin_cache.shape[0]


# What rows read is vLLM's: an upgrade that takes an attribute away fails here, by the name of the row.


class Recorder:
    """A configuration that notes the dotted path of everything that is read of it."""

    def __init__(self, config: SimpleNamespace, paths: set[str], path: str = ""):
        self._of = (config, paths, path)

    def __getattr__(self, name: str) -> Any:
        config, paths, path = self._of
        inner = f"{path}.{name}" if path else name
        paths.add(inner)
        value = getattr(config, name)
        return Recorder(value, paths, inner) if isinstance(value, SimpleNamespace) else value


def missing(path: str) -> str | None:
    """The part of ``path``, from ``VllmConfig`` on, that is not in vLLM's classes; None when all of it is.

    What a class of another library holds (a Hugging Face configuration) is not looked at.
    """
    from vllm.config import VllmConfig

    cls: Any = VllmConfig
    done = []
    for name in path.split("."):
        done.append(name)
        if issubclass(cls, enum.Enum):
            return None if name in ("name", "value") else ".".join(done)
        hints = {field.name: field.type for field in dataclasses.fields(cls)}
        is_set_later = re.search(rf"self\.{name}(: .*)? = ", inspect.getsource(cls))
        if name not in hints and not hasattr(cls, name) and not is_set_later:
            return ".".join(done)
        hint = hints.get(name)
        classes = [hint, *typing.get_args(hint)]
        found = [c for c in classes if isinstance(c, type) and c.__module__.startswith("vllm.")]
        if not found:
            return None
        (cls,) = found
    return None


def read_by(row: Refusal, configs: list[SimpleNamespace]) -> set[str]:
    paths: set[str] = set()
    for config in configs:
        row.read(Recorder(config, paths))
    return paths


@pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it
@pytest.mark.parametrize("name", ["model_config.is_hybrid", *ROWS])
def test_what_a_row_reads_is_in_vllms_configuration(configured, config_of, name):
    if name not in ROWS:
        assert missing(name) is None
        return
    configs = [config_of(), *(configured(case) for case in CASES if case.row == name)]
    paths = read_by(ROWS[name], configs)
    assert paths or any(case.env for case in CASES if case.row == name)
    assert {path: missing(path) for path in paths} == dict.fromkeys(paths)


@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize(
    ("path", "gone"),
    [
        ("gone_config.name", "gone_config"),
        ("model_config.gone", "model_config.gone"),
        ("cache_config.gone.name", "cache_config.gone"),
        ("offload_config.uva.gone", "offload_config.uva.gone"),
        ("speculative_config.gone", "speculative_config.gone"),
        ("model_config.multimodal_config.gone", "model_config.multimodal_config.gone"),
        ("attention_config.backend.gone", "attention_config.backend.gone"),
        ("mamba_config.backend.gone", "mamba_config.backend.gone"),
    ],
)
def test_what_vllm_does_not_have_is_found(path, gone):
    assert missing(path) == gone
    assert missing("model_config.hf_text_config.anything") is None
