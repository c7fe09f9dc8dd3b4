# SPDX-License-Identifier: Apache-2.0
"""The refusal table: what vLLM offers and this plugin does not, each with the sentence an operator reads at start.

Owns: ``TABLE`` (name, what is read of vLLM's configuration, sentence, when) and ``refuse``.
Never: vLLM or torch imports (a configuration is read by its attributes), warnings instead of refusals, a refusal that
does not name what to change.

Ordering rule: the table is read at every configuration check, before any worker exists; all refusals that apply are
reported together, so that nobody repairs a command line one restart at a time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_gaudi import device, envs
from vllm_gaudi.bucketing.grid import CONFIG_KEYS, PREFILL_ROW_TILE
from vllm_gaudi.bucketing.strategy import user_buckets

SUPPORTED_ARCHITECTURES: tuple[str, ...] = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "LlamaForCausalLM",
)


Config = Any
"""vLLM's ``VllmConfig``, of which attributes are read."""

KEYS_OF_VLLM = ("gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend")
"""Keys of ``--additional-config`` where vLLM keeps the values of flags; each has a row that names its flag."""

DEFAULT_BLOCK_SIZE = 128
"""Tokens of a block where neither the user nor a hybrid model asks for another size; Gaudi's kernel block."""

HOST_BLOCK_GRANULE = 16


def block_size_granule() -> int:
    """Tokens that every block size must be a multiple of."""
    return DEFAULT_BLOCK_SIZE if device.is_hpu() else HOST_BLOCK_GRANULE


@dataclass(frozen=True)
class Refusal:
    """One row of the table.

    ``read``: the value that is judged, of vLLM's configuration or of a variable; ``sentence``: formatted with
    ``{value}``, and names the flag or variable to change; ``when``: whether the value is refused; ``hybrid_only``:
    whether the reason is true for models with GDN layers alone.
    """

    name: str
    read: Callable[[Config], Any]
    sentence: str
    when: Callable[[Any], Any] = bool
    hybrid_only: bool = False

    def refuses(self, config: Config) -> str | None:
        """The sentence, or None where the row lets ``config`` pass."""
        value = self.read(config)
        if not self.when(value) or (self.hybrid_only and not config.model_config.is_hybrid):
            return None
        return self.sentence.format(value=value)


def _is_set(value: Any) -> bool:
    return value is not None


def _dtype(config: Config) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")


def _is_not_the_models(dtypes: dict[str, str]) -> bool:
    return dtypes["asked"] not in ("auto", dtypes["model"])


def _multimodal(config: Config, name: str) -> bool | None:
    """A switch of the multimodal configuration; None where the model has none."""
    multimodal = config.model_config.multimodal_config
    return None if multimodal is None else getattr(multimodal, name)


def _additional(config: Config) -> dict[str, Any]:
    return config.additional_config if isinstance(config.additional_config, dict) else {}


def rotary_positions(text_config: Any) -> int | None:
    """Positions in the table that vLLM's ``get_rope`` makes for this Hugging Face configuration; None without one.

    A scaled table may be longer than ``max_position_embeddings`` or shorter. A kind that is not known here counts as
    unscaled, and a parameter that is missing is vLLM's to report.
    """
    positions = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if positions is None:
        return None
    kind = rope.get("rope_type", "default")
    if kind == "yarn":
        positions = rope.get("original_max_position_embeddings", positions)
    if "mrope_section" in rope and kind in ("default", "yarn"):
        positions *= 4  # room for the positions of a video
    if kind in ("linear", "yarn"):
        positions = math.ceil(positions * (rope.get("factor") or 1))
    return positions


def _illegal_buckets(config: Config) -> str:
    """What the bucket grid would say of the lists that it cannot use; the limits of an engine forbid none."""
    found = []
    for key in CONFIG_KEYS:
        steps = _additional(config).get(key)
        if steps is not None:
            multiple = PREFILL_ROW_TILE if key == "prefill_query_buckets" else 1
            try:
                user_buckets(key, steps, multiple, sys.maxsize)
            except ValueError as error:
                found.append(str(error))
    return "; ".join(found)


def _class_path(given: str | type | None) -> str | None:
    return f"{given.__module__}.{given.__qualname__}" if isinstance(given, type) else given


def _is_foreign(path: str | None) -> bool:
    return path not in (None, "auto") and str(path).partition(".")[0] != "vllm_gaudi"


TABLE: tuple[Refusal, ...] = (
    Refusal(
        "architecture",
        lambda c: c.model_config.architecture,
        "model architecture {value} is not supported; pass --model with one of: " + ", ".join(SUPPORTED_ARCHITECTURES),
        lambda name: name not in SUPPORTED_ARCHITECTURES,
    ),
    Refusal(
        "pooling",
        lambda c: c.model_config.runner_type,
        "pooling, embedding and scoring models are not supported; remove --runner {value} (and --convert)",
        lambda runner: runner != "generate",
    ),
    Refusal(
        "multimodal-inputs",
        lambda c: _multimodal(c, "language_model_only"),
        "multimodal inputs are not supported; add --language-model-only to serve the text part of this model",
        lambda is_text_only: is_text_only is False,
    ),
    Refusal(
        "encoder-decoder",
        lambda c: c.model_config.is_encoder_decoder,
        "encoder-decoder models are not supported; pass --model with a decoder-only model",
    ),
    Refusal(
        "mla",
        lambda c: c.model_config.use_mla,
        "MLA attention is not supported; pass --model with a model without MLA",
    ),
    Refusal(
        "sliding-window",
        lambda c: c.model_config.get_sliding_window(),
        "sliding-window attention ({value} tokens) is not supported; "
        "pass --disable-sliding-window, or --model with a model of full attention",
        _is_set,
    ),
    Refusal(
        "prompt-embeds",
        lambda c: c.model_config.enable_prompt_embeds,
        "prompt embeddings are not supported; remove --enable-prompt-embeds",
    ),
    Refusal(
        "dtype",
        _dtype,
        "model dtype {value} is not supported; pass --dtype bfloat16 or --dtype float32",
        lambda dtype: dtype not in ("bfloat16", "float32"),
    ),
    Refusal(
        "quantization",
        lambda c: c.model_config.quantization,
        "quantized weights ({value}) are not supported; "
        "remove --quantization, and pass --model with an unquantized checkpoint",
        _is_set,
    ),
    Refusal(
        "kv-cache-dtype",
        lambda c: {"asked": c.cache_config.cache_dtype, "model": _dtype(c)},
        "a {value[asked]} KV cache for a {value[model]} model is not supported; remove --kv-cache-dtype",
        _is_not_the_models,
    ),
    Refusal(
        "kv-cache-dtype-skip-layers",
        lambda c: ", ".join(c.cache_config.kv_cache_dtype_skip_layers),
        "layers whose KV cache has another dtype ({value}) are not supported; remove --kv-cache-dtype-skip-layers",
    ),
    Refusal(
        "speculative-decoding",
        lambda c: None if c.speculative_config is None else str(c.speculative_config.method),
        "speculative decoding ({value}) is not supported; remove --speculative-config",
        _is_set,
    ),
    Refusal("lora", lambda c: c.lora_config, "LoRA is not supported; remove --enable-lora", _is_set),
    Refusal(
        "sleep-mode",
        lambda c: c.model_config.enable_sleep_mode,
        "sleep mode is not supported; remove --enable-sleep-mode",
    ),
    Refusal(
        "weight-transfer",
        lambda c: c.weight_transfer_config,
        "online weight transfer is not supported; remove --weight-transfer-config",
        _is_set,
    ),
    Refusal(
        "kv-connector",
        lambda c: c.kv_transfer_config,
        "KV connectors are not supported; remove --kv-transfer-config",
        _is_set,
    ),
    Refusal(
        "kv-offloading",
        lambda c: c.cache_config.kv_offloading_size,
        "KV cache offloading ({value} GiB) is not supported; remove --kv-offloading-size",
        _is_set,
    ),
    Refusal(
        "encoder-connector",
        lambda c: c.ec_transfer_config,
        "encoder cache connectors are not supported; remove --ec-transfer-config",
        _is_set,
    ),
    Refusal(
        "weight-offloading",
        lambda c: {
            "gib": c.offload_config.uva.cpu_offload_gb,
            "layers": c.offload_config.prefetch.offload_group_size,
        },
        "weight offloading ({value[gib]} GiB, groups of {value[layers]} layers) is not supported; "
        "remove --cpu-offload-gb and --offload-group-size",
        lambda sizes: max(sizes.values()) > 0,
    ),
    Refusal(
        "pipeline-parallel",
        lambda c: c.parallel_config.pipeline_parallel_size,
        "pipeline parallelism is not supported; pass --pipeline-parallel-size 1 instead of {value}",
        lambda size: size > 1,
    ),
    Refusal(
        "data-parallel",
        lambda c: c.parallel_config.data_parallel_size,
        "data parallelism is not supported; pass --data-parallel-size 1 instead of {value}",
        lambda size: size > 1,
    ),
    Refusal(
        "context-parallel",
        lambda c: {
            "prefill": c.parallel_config.prefill_context_parallel_size,
            "decode": c.parallel_config.decode_context_parallel_size,
        },
        "context parallelism ({value[prefill]} ranks in prefill, {value[decode]} in decode) is not supported; "
        "pass --prefill-context-parallel-size 1 and --decode-context-parallel-size 1",
        lambda sizes: max(sizes.values()) > 1,
    ),
    Refusal(
        "expert-parallel",
        lambda c: (
            c.parallel_config.enable_expert_parallel
            or c.parallel_config.enable_eplb
            or c.parallel_config.enable_elastic_ep
        ),
        "expert parallelism is not supported; remove --enable-expert-parallel, --enable-eplb and --enable-elastic-ep",
    ),
    Refusal(
        "microbatching",
        lambda c: c.parallel_config.enable_dbo or c.parallel_config.ubatch_size > 0,
        "microbatching is not supported; remove --enable-dbo and --ubatch-size",
    ),
    Refusal(
        "v2-model-runner",
        lambda c: c.use_v2_model_runner and c.watermark_config is None,  # vLLM itself picks V2 for a watermark
        "vLLM's V2 model runner is not supported; unset VLLM_USE_V2_MODEL_RUNNER or set it to 0",
    ),
    Refusal(
        "routed-experts",
        lambda c: c.model_config.enable_return_routed_experts,
        "returning routed experts is not supported; remove --enable-return-routed-experts",
    ),
    Refusal(
        "sampling-mask",
        lambda c: c.model_config.return_sampling_mask,
        "returning the sampling mask is not supported; remove --return-sampling-mask",
    ),
    Refusal(
        "float64-noise",
        lambda c: c.model_config.use_fp64_gumbel,
        "sampling with float64 noise is not supported, since Gaudi computes in float32; remove --use-fp64-gumbel",
    ),
    Refusal(
        "watermark",
        lambda c: c.watermark_config,
        "watermarking is not supported; remove --watermark-config",
        _is_set,
    ),
    Refusal(
        "diffusion",
        lambda c: c.diffusion_config,
        "diffusion models are not supported; remove --diffusion-config",
        _is_set,
    ),
    Refusal(
        "profiler",
        lambda c: c.profiler_config.profiler,
        "vLLM's profiler ({value}) is not supported; remove --profiler-config",
        _is_set,
    ),
    Refusal(
        "encoder-only",
        lambda c: _multimodal(c, "mm_encoder_only"),
        "running a model's encoder alone is not supported; remove --mm-encoder-only",
    ),
    Refusal(
        "batch-invariant",
        lambda c: envs.get("VLLM_BATCH_INVARIANT"),
        "vLLM's batch-invariant kernels are not supported; unset VLLM_BATCH_INVARIANT "
        "(with VLLM_GAUDI_ROW_TILES=1 a row of a matrix product does not depend on the rows beside it)",
    ),
    Refusal(
        "attention-backend",
        lambda c: None if c.attention_config.backend is None else c.attention_config.backend.name,
        "the attention backend {value} is not supported; remove --attention-backend",
        lambda name: name not in (None, "CUSTOM"),
    ),
    Refusal(
        "gdn-prefill-backend",
        lambda c: _additional(c).get("gdn_prefill_backend"),
        "the GDN prefill backend {value} is not supported; remove --gdn-prefill-backend",
        _is_set,
    ),
    Refusal(
        "kda-prefill-backend",
        lambda c: _additional(c).get("kda_prefill_backend"),
        "the KDA prefill backend {value} is not supported; remove --kda-prefill-backend",
        _is_set,
    ),
    Refusal(
        "kda-decode-backend",
        lambda c: _additional(c).get("kda_decode_backend"),
        "the KDA decode backend {value} is not supported; remove --kda-decode-backend",
        _is_set,
    ),
    Refusal(
        "mamba-backend",
        lambda c: c.mamba_config.backend.name.lower(),
        "the Mamba backend {value} is not supported; remove --mamba-backend",
        lambda name: name != "triton",
    ),
    Refusal(
        "mamba-cache-dtype",
        lambda c: {"asked": c.cache_config.mamba_cache_dtype, "model": _dtype(c)},
        "a {value[asked]} convolution state for a {value[model]} model is not supported; remove --mamba-cache-dtype",
        _is_not_the_models,
        hybrid_only=True,
    ),
    Refusal(
        "stochastic-rounding",
        lambda c: c.mamba_config.enable_stochastic_rounding,
        "stochastic rounding of Mamba states is not supported; remove --enable-mamba-cache-stochastic-rounding",
    ),
    Refusal(
        "replayssm",
        lambda c: c.cache_config.use_replayssm,
        "ReplaySSM is not supported; remove --use-replayssm",
    ),
    Refusal(
        "kv-sharing-fast-prefill",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
        "fast prefill with KV sharing is not supported; remove --kv-sharing-fast-prefill",
    ),
    Refusal(
        "chunked-prefill",
        lambda c: c.scheduler_config.enable_chunked_prefill,
        "a model with GDN layers reads its prompts in chunks; remove --no-enable-chunked-prefill",
        lambda is_on: not is_on,
        hybrid_only=True,
    ),
    Refusal(
        "hybrid-manager",
        lambda c: c.scheduler_config.disable_hybrid_kv_cache_manager,
        "a model with GDN layers needs vLLM's hybrid KV cache manager; remove --disable-hybrid-kv-cache-manager",
        hybrid_only=True,
    ),
    Refusal(
        "foreign-scheduler",
        lambda c: _class_path(c.scheduler_config.scheduler_cls),
        "the scheduler {value} does not end prefill chunks on multiples of the GDN chunk, as a model with GDN layers "
        "needs; remove --scheduler-cls",
        _is_foreign,
        hybrid_only=True,
    ),
    Refusal(
        "foreign-worker",
        lambda c: _class_path(c.parallel_config.worker_cls),
        "the worker {value} does not run on this platform; remove --worker-cls",
        _is_foreign,
    ),
    Refusal(
        "max-model-len",
        lambda c: {
            "asked": c.model_config.max_model_len,
            "positions": rotary_positions(c.model_config.hf_text_config) or sys.maxsize,
        },
        "a maximum model length of {value[asked]} tokens does not fit the {value[positions]} positions of the model's "
        "rotary embedding; pass --max-model-len {value[positions]} or less",
        lambda tokens: tokens["asked"] > tokens["positions"],
    ),
    Refusal(
        "block-size",
        lambda c: {
            "asked": c.cache_config.block_size if c.cache_config.user_specified_block_size else 0,
            "multiple": block_size_granule(),
        },
        "a block size of {value[asked]} tokens is not supported; "
        "pass --block-size with a multiple of {value[multiple]}, or remove it",
        lambda size: size["asked"] % size["multiple"] != 0,
    ),
    Refusal(
        "prefix-match-unit",
        lambda c: c.cache_config.prefix_match_unit,
        "prefix cache hits in units of {value} tokens, within a block, are not supported for a model with GDN layers; "
        "remove --prefix-match-unit",
        _is_set,
        hybrid_only=True,
    ),
    Refusal(
        "fine-grained-junctions",
        lambda c: c.cache_config.enable_mamba_fine_grained_prefix_cache,
        "fine-grained prefix caching of GDN states is not supported; remove --enable-mamba-fine-grained-prefix-cache",
        hybrid_only=True,
    ),
    Refusal(
        "compact-gdn",
        lambda c: envs.get("VLLM_COMPACT_GDN"),
        "a GDN state per block, instead of one per request, is not supported; unset VLLM_COMPACT_GDN or set it to 1",
        lambda is_compact: not is_compact,
        hybrid_only=True,
    ),
    Refusal(
        "contiguous-pa",
        lambda c: envs.get("VLLM_CONTIGUOUS_PA"),
        "contiguous paged attention is not supported; unset VLLM_CONTIGUOUS_PA or set it to 0",
    ),
    Refusal(
        "defragmenter",
        lambda c: envs.get("VLLM_DEFRAG"),
        "the KV cache defragmenter is not supported; unset VLLM_DEFRAG or set it to 0",
    ),
    Refusal(
        "lazy-mode",
        lambda c: envs.get("PT_HPU_LAZY_MODE"),
        "Gaudi's lazy mode is not supported; unset PT_HPU_LAZY_MODE or set it to 0",
    ),
    Refusal(
        "bucket-lists",
        _illegal_buckets,
        "correct or remove the bucket lists of --additional-config: {value}",
    ),
    Refusal(
        "additional-config",
        lambda c: ", ".join(sorted({str(key) for key in _additional(c)} - {*CONFIG_KEYS, *KEYS_OF_VLLM})),
        "unknown keys in --additional-config: {value}; remove them (known are " + ", ".join(CONFIG_KEYS) + ")",
    ),
)


class Refused(RuntimeError):
    """A configuration that the table refuses. ``sentences``: by the name of the row, in table order."""

    def __init__(self, sentences: dict[str, str]):
        super().__init__("vllm_gaudi refuses this configuration: " + "; ".join(sentences.values()))
        self.sentences = sentences

    def __reduce__(self) -> tuple[type[Refused], tuple[dict[str, str]]]:
        return Refused, (self.sentences,)


def refusals(config: Config) -> dict[str, str]:
    """The sentences of every row that refuses ``config``, by the name of the row, in table order."""
    sentences = {row.name: row.refuses(config) for row in TABLE}
    return {name: sentence for name, sentence in sentences.items() if sentence is not None}


def refuse(config: Config) -> None:
    """Raise ``Refused``, a RuntimeError, with every sentence that applies; return when none does."""
    sentences = refusals(config)
    if sentences:
        raise Refused(sentences)
