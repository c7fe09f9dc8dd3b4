# SPDX-License-Identifier: Apache-2.0
"""The refusal table: what vLLM offers and this plugin does not, each with the sentence an operator reads at start.

Owns: ``Facts`` (plain values), ``TABLE`` (name, predicate over the facts, sentence) and ``refuse``.
Never: vLLM or torch imports, warnings instead of refusals, a refusal that does not name what to change.

Ordering rule: the table is read at every configuration check, before any worker exists; all refusals that apply are
reported together, so that nobody repairs a command line one restart at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Facts:
    """What the table is asked about. Defaults describe a supported engine, so a test states only what it changes."""

    architecture: str = "Qwen3_5ForCausalLM"
    runner: str = "generate"
    is_hybrid: bool = True
    is_encoder_decoder: bool = False
    uses_mla: bool = False
    sliding_window: int | None = None
    takes_multimodal_inputs: bool = False
    encoder_only: bool = False
    prompt_embeds: bool = False
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    skipped_kv_cache_layers: bool = False
    speculative_method: str | None = None
    lora: bool = False
    sleep_mode: bool = False
    weight_transfer: bool = False
    kv_connector: bool = False
    kv_offloading: bool = False
    encoder_connector: bool = False
    weight_offloading: bool = False
    pipeline_parallel: int = 1
    data_parallel: int = 1
    prefill_context_parallel: int = 1
    decode_context_parallel: int = 1
    expert_parallel: bool = False
    microbatching: bool = False
    v2_model_runner: bool = False
    routed_experts_returned: bool = False
    sampling_mask_returned: bool = False
    float64_noise: bool = False
    watermark: bool = False
    diffusion: bool = False
    profiler: bool = False
    batch_invariant: bool = False
    attention_backend: str | None = None
    gdn_prefill_backend: str | None = None
    mamba_backend: str = "triton"
    mamba_cache_dtype: str = "auto"
    stochastic_rounding: bool = False
    replayssm: bool = False
    kv_sharing_fast_prefill: bool = False
    chunked_prefill: bool = True
    hybrid_manager_disabled: bool = False
    foreign_scheduler: str | None = None
    foreign_worker: str | None = None
    block_size: int | None = None
    block_size_granule: int = 128
    mamba_cache_mode: str = "none"
    prefix_match_unit: int | None = None
    fine_grained_junctions: bool = False
    compact_gdn: bool = True
    contiguous_pa: bool = False
    defragmenter: bool = False
    lazy_mode: bool = False
    unknown_additional_keys: tuple[str, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class Refusal:
    """``applies`` is asked about the facts; ``sentence`` is formatted with ``facts`` and names the flag to change."""

    name: str
    applies: Callable[[Facts], bool]
    sentence: str


TABLE: tuple[Refusal, ...] = (
    Refusal(
        "architecture",
        lambda f: f.architecture not in SUPPORTED_ARCHITECTURES,
        "model architecture {facts.architecture} is not supported; pass --model with one of: "
        + ", ".join(SUPPORTED_ARCHITECTURES),
    ),
    Refusal(
        "pooling",
        lambda f: f.runner != "generate",
        "pooling, embedding and scoring models are not supported; remove --runner {facts.runner} (and --convert)",
    ),
    Refusal(
        "multimodal-inputs",
        lambda f: f.takes_multimodal_inputs,
        "multimodal inputs are not supported; add --language-model-only to serve the text part of this model",
    ),
    Refusal(
        "encoder-decoder",
        lambda f: f.is_encoder_decoder,
        "encoder-decoder models are not supported; pass --model with a decoder-only model",
    ),
    Refusal("mla", lambda f: f.uses_mla, "MLA attention is not supported; pass --model with a model without MLA"),
    Refusal(
        "sliding-window",
        lambda f: f.sliding_window is not None,
        "sliding-window attention ({facts.sliding_window} tokens) is not supported; "
        "pass --disable-sliding-window or --model with a model of full attention",
    ),
    Refusal(
        "prompt-embeds",
        lambda f: f.prompt_embeds,
        "prompt embeddings are not supported; remove --enable-prompt-embeds",
    ),
    Refusal(
        "dtype",
        lambda f: f.dtype not in ("bfloat16", "float32"),
        "model dtype {facts.dtype} is not supported; pass --dtype bfloat16 (or float32)",
    ),
    Refusal(
        "quantization",
        lambda f: f.quantization is not None,
        "quantised weights ({facts.quantization}) are not supported; "
        "remove --quantization and pass an unquantised checkpoint",
    ),
    Refusal(
        "kv-cache-dtype",
        lambda f: f.kv_cache_dtype not in ("auto", f.dtype) or f.skipped_kv_cache_layers,
        "a KV cache of type {facts.kv_cache_dtype} beside a {facts.dtype} model is not supported; "
        "remove --kv-cache-dtype and --kv-cache-dtype-skip-layers",
    ),
    Refusal(
        "speculative-decoding",
        lambda f: f.speculative_method is not None,
        "speculative decoding ({facts.speculative_method}) is not supported; remove --speculative-config",
    ),
    Refusal("lora", lambda f: f.lora, "LoRA is not supported; remove --enable-lora"),
    Refusal(
        "sleep-mode",
        lambda f: f.sleep_mode,
        "sleep mode is not supported; remove --enable-sleep-mode",
    ),
    Refusal(
        "weight-transfer",
        lambda f: f.weight_transfer,
        "online weight transfer is not supported; remove --weight-transfer-config",
    ),
    Refusal(
        "kv-connector",
        lambda f: f.kv_connector,
        "KV connectors are not supported; remove --kv-transfer-config",
    ),
    Refusal(
        "kv-offloading",
        lambda f: f.kv_offloading,
        "KV cache offloading is not supported; remove --kv-offloading-size",
    ),
    Refusal(
        "encoder-connector",
        lambda f: f.encoder_connector,
        "encoder cache connectors are not supported; remove --ec-transfer-config",
    ),
    Refusal(
        "weight-offloading",
        lambda f: f.weight_offloading,
        "weight offloading is not supported; remove --cpu-offload-gb and the other offload flags",
    ),
    Refusal(
        "pipeline-parallel",
        lambda f: f.pipeline_parallel > 1,
        "pipeline parallelism is not supported; pass --pipeline-parallel-size 1 instead of {facts.pipeline_parallel}",
    ),
    Refusal(
        "data-parallel",
        lambda f: f.data_parallel > 1,
        "data parallelism is not supported; pass --data-parallel-size 1 instead of {facts.data_parallel}",
    ),
    Refusal(
        "context-parallel",
        lambda f: f.prefill_context_parallel > 1 or f.decode_context_parallel > 1,
        "context parallelism is not supported; "
        "pass --prefill-context-parallel-size 1 and --decode-context-parallel-size 1",
    ),
    Refusal(
        "expert-parallel",
        lambda f: f.expert_parallel,
        "expert parallelism is not supported; remove --enable-expert-parallel, --enable-eplb and --enable-elastic-ep",
    ),
    Refusal(
        "microbatching",
        lambda f: f.microbatching,
        "microbatching is not supported; remove --enable-dbo and pass --ubatch-size 0",
    ),
    Refusal(
        "v2-model-runner",
        lambda f: f.v2_model_runner and not f.watermark,  # vLLM itself picks V2 for a watermark
        "vLLM's V2 model runner is not supported; unset VLLM_USE_V2_MODEL_RUNNER or set it to 0",
    ),
    Refusal(
        "routed-experts",
        lambda f: f.routed_experts_returned,
        "returning routed experts is not supported; remove --enable-return-routed-experts",
    ),
    Refusal(
        "sampling-mask",
        lambda f: f.sampling_mask_returned,
        "returning the sampling mask is not supported; remove --return-sampling-mask",
    ),
    Refusal(
        "float64-noise",
        lambda f: f.float64_noise,
        "sampling with float64 noise is not supported, a Gaudi computes in float32; remove --use-fp64-gumbel",
    ),
    Refusal("watermark", lambda f: f.watermark, "watermarking is not supported; remove --watermark-config"),
    Refusal("diffusion", lambda f: f.diffusion, "diffusion models are not supported; remove --diffusion-config"),
    Refusal("profiler", lambda f: f.profiler, "vLLM's profiler is not supported; remove --profiler-config"),
    Refusal(
        "encoder-only",
        lambda f: f.encoder_only,
        "running a model's encoder alone is not supported; remove --mm-encoder-only",
    ),
    Refusal(
        "batch-invariant",
        lambda f: f.batch_invariant,
        "vLLM's batch-invariant kernels are not supported, and not needed: products run in fixed row tiles; "
        "unset VLLM_BATCH_INVARIANT",
    ),
    Refusal(
        "attention-backend",
        lambda f: f.attention_backend not in (None, "CUSTOM"),
        "the attention backend {facts.attention_backend} is not supported; remove --attention-backend",
    ),
    Refusal(
        "gdn-prefill-backend",
        lambda f: f.gdn_prefill_backend is not None,
        "the GDN prefill backend {facts.gdn_prefill_backend} is not supported; remove --gdn-prefill-backend",
    ),
    Refusal(
        "mamba-backend",
        lambda f: f.mamba_backend != "triton",
        "the Mamba backend {facts.mamba_backend} is not supported; remove --mamba-backend",
    ),
    Refusal(
        "mamba-cache-dtype",
        lambda f: f.is_hybrid and f.mamba_cache_dtype not in ("auto", f.dtype),
        "a conv state of type {facts.mamba_cache_dtype} beside a {facts.dtype} model is not supported; "
        "remove --mamba-cache-dtype",
    ),
    Refusal(
        "stochastic-rounding",
        lambda f: f.stochastic_rounding,
        "stochastic rounding of the state is not supported; remove --enable-mamba-cache-stochastic-rounding",
    ),
    Refusal("replayssm", lambda f: f.replayssm, "ReplaySSM is not supported; remove --use-replayssm"),
    Refusal(
        "kv-sharing-fast-prefill",
        lambda f: f.kv_sharing_fast_prefill,
        "fast prefill over shared KV is not supported; remove --kv-sharing-fast-prefill",
    ),
    Refusal(
        "chunked-prefill",
        lambda f: not f.chunked_prefill,
        "running without chunked prefill is not supported; remove --no-enable-chunked-prefill",
    ),
    Refusal(
        "hybrid-manager",
        lambda f: f.is_hybrid and f.hybrid_manager_disabled,
        "a hybrid model needs vLLM's hybrid KV cache manager; remove --disable-hybrid-kv-cache-manager",
    ),
    Refusal(
        "foreign-scheduler",
        lambda f: f.foreign_scheduler is not None,
        "the scheduler {facts.foreign_scheduler} does not keep prefill chunks on the GDN grid; remove --scheduler-cls",
    ),
    Refusal(
        "foreign-worker",
        lambda f: f.foreign_worker is not None,
        "the worker {facts.foreign_worker} is not this plugin's; remove --worker-cls",
    ),
    Refusal(
        "block-size",
        lambda f: f.block_size is not None and f.block_size % f.block_size_granule != 0,
        "a block of {facts.block_size} tokens is not supported; "
        "pass --block-size with a multiple of {facts.block_size_granule}, or remove it",
    ),
    Refusal(
        "mamba-cache-mode",
        lambda f: f.is_hybrid and f.mamba_cache_mode == "all",
        "mamba cache mode 'all' is not supported; pass --mamba-cache-mode align, or remove it",
    ),
    Refusal(
        "prefix-match-unit",
        lambda f: f.is_hybrid and f.prefix_match_unit is not None,
        "partial-block hits are not supported on a GDN hybrid; remove --prefix-match-unit",
    ),
    Refusal(
        "fine-grained-junctions",
        lambda f: f.is_hybrid and f.fine_grained_junctions,
        "fine-grained junction caching is not supported; remove --enable-mamba-fine-grained-prefix-cache",
    ),
    Refusal(
        "compact-gdn",
        lambda f: f.is_hybrid and not f.compact_gdn,
        "the per-block GDN layout is not supported; unset VLLM_COMPACT_GDN or set it to 1",
    ),
    Refusal(
        "contiguous-pa",
        lambda f: f.contiguous_pa,
        "contiguous paged attention is not supported; unset VLLM_CONTIGUOUS_PA or set it to 0",
    ),
    Refusal(
        "defragmenter",
        lambda f: f.defragmenter,
        "the KV cache defragmenter is not supported; unset VLLM_DEFRAG or set it to 0",
    ),
    Refusal(
        "lazy-mode",
        lambda f: f.lazy_mode,
        "Gaudi's lazy mode is not supported; unset PT_HPU_LAZY_MODE or set it to 0",
    ),
    Refusal(
        "additional-config",
        lambda f: bool(f.unknown_additional_keys),
        "unknown keys in --additional-config: {facts.unknown_additional_keys}; remove them (see the README's table)",
    ),
)


class Refused(RuntimeError):
    """A configuration that the table refuses. ``sentences``: by the name of the row, in table order."""

    def __init__(self, sentences: dict[str, str]):
        super().__init__("vllm_gaudi refuses this configuration: " + "; ".join(sentences.values()))
        self.sentences = sentences

    def __reduce__(self) -> tuple[type[Refused], tuple[dict[str, str]]]:
        return Refused, (self.sentences,)


def _sentences(facts: Facts) -> dict[str, str]:
    return {row.name: row.sentence.format(facts=facts) for row in TABLE if row.applies(facts)}


def refusals(facts: Facts) -> list[str]:
    """The sentences of every row that applies, in table order."""
    return list(_sentences(facts).values())


def refuse(facts: Facts) -> None:
    """Raise ``Refused``, a RuntimeError, with every sentence that applies; return when none does."""
    sentences = _sentences(facts)
    if sentences:
        raise Refused(sentences)
