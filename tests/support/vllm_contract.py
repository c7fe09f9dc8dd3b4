# SPDX-License-Identifier: Apache-2.0
"""What of vLLM the plugin overrides, calls beside its public interface, or reads: the table to look at when vLLM moves.

Owns: ``ROWS`` and ``drift``, which compares a row with the vLLM that is installed.
Never: an opinion on what to do; the file of a row says what the symbol is used for.

Ordering rule: none. A symbol that the plugin overrides and that has no row fails
``tests/unit/support/test_vllm_contract.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """``symbol`` of vLLM 0.30.0 and the module of ours that depends on it.

    ``parameters`` of a callable, in order; ``fields`` of a dataclass that must be there; neither for an attribute.
    """

    symbol: str
    used_by: str
    parameters: tuple[str, ...] | None = None
    fields: tuple[str, ...] | None = None


ROWS: tuple[Row, ...] = (
    # A start without tensors, in the order of the modules.
    Row(
        "vllm.distributed.parallel_state.init_distributed_environment",
        "cli.dry_run",
        parameters=("world_size", "rank", "distributed_init_method", "local_rank", "backend", "timeout"),
    ),
    Row("vllm.entrypoints.launchers.cli_args.make_arg_parser", "cli.dry_run", parameters=("parser",)),
    Row("vllm.model_executor.layers.rotary_embedding._ROPE_DICT", "cli.dry_run"),
    Row(
        "vllm.model_executor.model_loader.utils.initialize_model",
        "cli.dry_run",
        parameters=("vllm_config", "prefix", "model_class", "model_config"),
    ),
    Row(
        "vllm.renderers.base.BaseRenderer.render_chat",
        "cli.rendering",
        parameters=("self", "conversations", "chat_params", "tok_params", "prompt_extras", "skip_mm_cache"),
    ),
    Row(
        "vllm.renderers.base.BaseRenderer.render_cmpl",
        "cli.rendering",
        parameters=("self", "prompts", "tok_params", "prompt_extras", "skip_mm_cache"),
    ),
    Row("vllm.renderers.inputs.preprocess.parse_model_prompt", "cli.rendering", parameters=("model_config", "prompt")),
    Row(
        "vllm.v1.attention.backends.utils.resolve_kv_cache_layout",
        "cli.dry_run",
        parameters=("vllm_config", "supported_layouts", "kv_cache_specs"),
    ),
    Row(
        "vllm.v1.core.kv_cache_utils.generate_scheduler_kv_cache_config",
        "cli.dry_run",
        parameters=("kv_cache_configs",),
    ),
    Row(
        "vllm.v1.core.kv_cache_utils.get_kv_cache_configs",
        "cli.dry_run",
        parameters=("vllm_config", "kv_cache_specs", "available_memory"),
    ),
    Row("vllm.v1.core.kv_cache_utils.get_kv_cache_groups", "cli.dry_run", parameters=("vllm_config", "kv_cache_spec")),
    Row(
        "vllm.v1.core.kv_cache_utils.resolve_kv_cache_block_sizes",
        "cli.dry_run",
        parameters=("kv_cache_config", "vllm_config"),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.register_all_kvcache_specs",
        "cli.dry_run",
        parameters=("vllm_config",),
    ),
    Row(
        "vllm.model_executor.layers.attention.attention.Attention.forward",
        "layers.attention",
        parameters=("self", "query", "key", "value", "output_shape", "output_dtype"),
    ),
    Row(
        "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase.all_gather",
        "distributed.hpu_communicator",
        parameters=("self", "input_", "dim"),
    ),
    Row(
        "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase.all_reduce",
        "distributed.hpu_communicator",
        parameters=("self", "input_"),
    ),
    Row("vllm.forward_context.get_forward_context", "layers, attention", parameters=()),
    Row(
        "vllm.forward_context.set_forward_context",
        "v1.worker.graphs",
        parameters=(
            "attn_metadata",
            "vllm_config",
            "num_tokens",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
            "batch_descriptor",
            "ubatch_slices",
            "slot_mapping",
            "skip_compiled",
            "is_padding",
        ),
    ),
    Row(
        "vllm.model_executor.custom_op.CustomOp.forward_oot",
        "layers.norm, models.rotary",
        parameters=("self", "args", "kwargs"),
    ),
    Row("vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase.is_monolithic", "layers.moe"),
    Row(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner.MoERunner._encode_layer_name",
        "layers.moe",
        parameters=("self",),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner.MoERunner._forward_impl",
        "layers.moe",
        parameters=("self", "hidden_states", "router_logits", "shared_experts_input", "input_ids"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner.MoERunner._select_forward",
        "layers.moe",
        parameters=("self",),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner._moe_forward",
        "layers.moe",
        parameters=(
            "hidden_states",
            "router_logits",
            "shared_experts_input",
            "input_ids",
            "layer_name",
            "hidden_dim_unpadded",
        ),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.__init__",
        "layers.moe",
        parameters=("self", "moe"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.apply_monolithic",
        "layers.moe",
        parameters=("self", "layer", "x", "router_logits", "input_ids"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.get_fused_moe_quant_config",
        "layers.moe",
        parameters=("self", "layer"),
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.process_weights_after_loading",
        "layers.moe",
        parameters=("self", "layer"),
    ),
    Row(
        "vllm.model_executor.layers.layernorm.GemmaRMSNorm.__init__",
        "layers.norm",
        parameters=("self", "hidden_size", "eps"),
    ),
    Row(
        "vllm.model_executor.layers.layernorm.RMSNorm.__init__",
        "layers.norm",
        parameters=("self", "hidden_size", "eps", "var_hidden_size", "has_weight", "dtype"),
    ),
    Row(
        "vllm.model_executor.layers.layernorm.RMSNorm.forward_native",
        "layers.norm",
        parameters=("self", "x", "residual"),
    ),
    Row("vllm.model_executor.layers.linear.UnquantizedLinearMethod.__init__", "layers.linear", parameters=("self",)),
    Row(
        "vllm.model_executor.layers.linear.UnquantizedLinearMethod.apply",
        "layers.linear",
        parameters=("self", "layer", "x", "bias"),
    ),
    Row(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention.__init__",
        "layers.gdn_attention",
        parameters=("self", "config", "vllm_config", "prefix", "gqa_interleaved_layout", "reduce_results"),
    ),
    Row(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention._output_projection",
        "layers.gdn_attention",
        parameters=("self", "core_attn_out", "z"),
    ),
    Row(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention.fix_query_key_value_ordering",
        "layers.gdn_attention",
        parameters=("self", "mixed_qkvz", "mixed_ba"),
    ),
    Row(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention.split_ba",
        "layers.gdn_attention",
        parameters=("self", "ba"),
    ),
    Row(
        "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.__init__",
        "layers.rotary",
        parameters=(
            "self",
            "head_size",
            "rotary_dim",
            "max_position_embeddings",
            "base",
            "is_neox_style",
            "dtype",
            "init_cache",
        ),
    ),
    Row(
        "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbeddingBase._match_cos_sin_cache_dtype",
        "layers.rotary",
        parameters=("self", "query"),
    ),
    Row(
        "vllm.model_executor.layers.rotary_embedding.mrope.MRotaryEmbedding.__init__",
        "layers.rotary",
        parameters=(
            "self",
            "head_size",
            "rotary_dim",
            "max_position_embeddings",
            "base",
            "is_neox_style",
            "dtype",
            "mrope_section",
            "mrope_interleaved",
            "scaling_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "attention_factor",
            "truncate",
        ),
    ),
    Row(
        "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod.apply",
        "layers.linear",
        parameters=("self", "layer", "x", "bias"),
    ),
    Row("vllm.model_executor.model_loader.get_model_loader", "v1.worker.hpu_model_runner", parameters=("load_config",)),
    Row("vllm.platforms.interface.Platform.check_and_update_config", "platform", parameters=("cls", "vllm_config")),
    Row("vllm.platforms.interface.Platform.check_if_supports_dtype", "platform", parameters=("cls", "dtype")),
    Row("vllm.platforms.interface.Platform.device_control_env_var", "platform"),
    Row("vllm.platforms.interface.Platform.dispatch_key", "platform"),
    Row("vllm.platforms.interface.Platform.dist_backend", "platform"),
    Row(
        "vllm.platforms.interface.Platform.get_attn_backend_cls",
        "platform",
        parameters=("cls", "selected_backend", "attn_selector_config", "num_heads"),
    ),
    Row("vllm.platforms.interface.Platform.get_current_memory_usage", "platform", parameters=("cls", "device")),
    Row("vllm.platforms.interface.Platform.get_device_communicator_cls", "platform", parameters=("cls",)),
    Row("vllm.platforms.interface.Platform.get_device_name", "platform", parameters=("cls", "device_id")),
    Row("vllm.platforms.interface.Platform.get_device_total_memory", "platform", parameters=("cls", "device_id")),
    Row("vllm.platforms.interface.Platform.get_device_uuid", "platform", parameters=("cls", "device_id")),
    Row("vllm.platforms.interface.Platform.import_kernels", "platform", parameters=("cls",)),
    Row("vllm.platforms.interface.Platform.inference_mode", "platform", parameters=("cls",)),
    Row("vllm.platforms.interface.Platform.is_cumem_allocator_available", "platform", parameters=("self",)),
    Row("vllm.platforms.interface.Platform.is_pin_memory_available", "platform", parameters=("cls",)),
    Row("vllm.platforms.interface.Platform.is_sleep_mode_available", "platform", parameters=("self",)),
    Row("vllm.platforms.interface.Platform.manual_seed_all", "platform", parameters=("cls", "seed")),
    Row("vllm.platforms.interface.Platform.opaque_attention_op", "platform", parameters=("cls",)),
    Row("vllm.platforms.interface.Platform.pre_register_and_update", "platform", parameters=("cls", "parser")),
    Row("vllm.platforms.interface.Platform.ray_device_key", "platform"),
    Row(
        "vllm.platforms.interface.Platform.register_custom_kv_cache_specs",
        "platform",
        parameters=("cls", "vllm_config"),
    ),
    Row("vllm.platforms.interface.Platform.set_device", "platform", parameters=("cls", "device")),
    Row("vllm.platforms.interface.Platform.simple_compile_backend", "platform"),
    Row("vllm.platforms.interface.Platform.support_hybrid_kv_cache", "platform", parameters=("cls",)),
    Row("vllm.platforms.interface.Platform.support_static_graph_mode", "platform", parameters=("cls",)),
    Row("vllm.platforms.interface.Platform.supported_dtypes", "platform"),
    Row(
        "vllm.platforms.interface.Platform.validate_request",
        "platform",
        parameters=("cls", "processed_inputs", "params"),
    ),
    Row("vllm.v1.attention.backend.AttentionBackend.get_builder_cls", "attention.backend", parameters=()),
    Row("vllm.v1.attention.backend.AttentionBackend.get_impl_cls", "attention.backend", parameters=()),
    Row("vllm.v1.attention.backend.AttentionBackend.get_name", "attention.backend", parameters=()),
    Row(
        "vllm.v1.attention.backend.AttentionBackend.get_preferred_block_size",
        "attention.backend",
        parameters=("cls", "default_block_size"),
    ),
    Row(
        "vllm.v1.attention.backend.AttentionBackend.get_supported_kernel_block_sizes",
        "attention.backend",
        parameters=(),
    ),
    Row("vllm.v1.attention.backend.AttentionBackend.supported_dtypes", "attention.backend"),
    Row("vllm.v1.attention.backend.AttentionBackend.supported_kv_cache_dtypes", "attention.backend"),
    Row(
        "vllm.v1.attention.backend.AttentionImpl.__init__",
        "attention.backend",
        parameters=(
            "self",
            "num_heads",
            "head_size",
            "scale",
            "num_kv_heads",
            "alibi_slopes",
            "sliding_window",
            "kv_cache_dtype",
            "logits_soft_cap",
            "attn_type",
            "kv_sharing_target_layer_name",
        ),
    ),
    Row(
        "vllm.v1.attention.backend.AttentionImpl.forward",
        "attention.backend",
        parameters=(
            "self",
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
        ),
    ),
    Row(
        "vllm.v1.core.block_pool.BlockPool.cache_full_blocks",
        "v1.core.checkpoint_ledger",
        parameters=(
            "self",
            "request",
            "blocks",
            "num_cached_blocks",
            "num_full_blocks",
            "block_size",
            "kv_cache_group_id",
            "block_mask",
        ),
    ),
    Row(
        "vllm.v1.core.block_pool.BlockPool.evict_blocks", "v1.core.checkpoint_ledger", parameters=("self", "block_ids")
    ),
    Row(
        "vllm.v1.core.block_pool.BlockPool.free_blocks",
        "v1.core.checkpoint_ledger",
        parameters=("self", "ordered_blocks"),
    ),
    Row(
        "vllm.v1.core.block_pool.BlockPool.get_new_blocks",
        "v1.core.checkpoint_ledger",
        parameters=("self", "num_blocks"),
    ),
    Row("vllm.v1.core.block_pool.BlockPool.get_num_free_blocks", "v1.core.checkpoint_ledger", parameters=("self",)),
    Row("vllm.v1.core.block_pool.BlockPool.touch", "v1.core.checkpoint_ledger", parameters=("self", "blocks")),
    Row(
        "vllm.v1.core.block_pool.BlockPool.unpin_blocks",
        "v1.core.checkpoint_ledger",
        parameters=("self", "blocks", "on_reuse"),
    ),
    Row(
        "vllm.v1.core.kv_cache_manager.KVCacheManager.evict_blocks",
        "v1.core.sched.hpu_scheduler",
        parameters=("self", "block_ids"),
    ),
    Row(
        "vllm.v1.core.sched.scheduler.Scheduler._mamba_block_aligned_split",
        "v1.core.sched.hpu_scheduler",
        parameters=(
            "self",
            "request",
            "num_new_tokens",
            "num_new_local_computed_tokens",
            "num_external_computed_tokens",
        ),
    ),
    Row(
        "vllm.v1.core.sched.scheduler.Scheduler._preempt_request",
        "v1.core.sched.hpu_scheduler",
        parameters=("self", "request", "timestamp", "drop_stale_output"),
    ),
    Row(
        "vllm.v1.core.sched.scheduler.Scheduler.finish_requests",
        "v1.core.sched.hpu_scheduler",
        parameters=("self", "request_ids", "finished_status"),
    ),
    Row(
        "vllm.v1.core.sched.scheduler.Scheduler.make_stats",
        "v1.core.sched.hpu_scheduler",
        parameters=("self", "spec_decoding_stats", "kv_connector_stats", "cudagraph_stats", "perf_stats"),
    ),
    Row(
        "vllm.v1.core.sched.scheduler.Scheduler.schedule",
        "v1.core.sched.hpu_scheduler",
        parameters=("self", "throttle_prefills"),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.__init__",
        "v1.core.checkpoint_ledger",
        parameters=("self", "kv_cache_spec", "block_pool", "kwargs"),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.allocate_new_blocks",
        "v1.core.checkpoint_ledger",
        parameters=("self", "request_id", "num_tokens", "num_tokens_main_model"),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.cache_blocks",
        "v1.core.checkpoint_ledger",
        parameters=("self", "request", "num_tokens", "retention_interval", "replay_boundaries"),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.find_longest_cache_hit",
        "v1.core.checkpoint_ledger (inherited)",
        parameters=(
            "cls",
            "block_hashes",
            "max_length",
            "kv_cache_group_ids",
            "block_pool",
            "kv_cache_spec",
            "drop_eagle_block",
            "alignment_tokens",
            "dcp_world_size",
            "pcp_world_size",
        ),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.get_num_blocks_to_allocate",
        "v1.core.checkpoint_ledger",
        parameters=(
            "self",
            "request_id",
            "num_tokens",
            "new_computed_blocks",
            "total_computed_tokens",
            "num_local_computed_tokens",
            "num_tokens_main_model",
            "apply_admission_cap",
        ),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.pop_blocks_for_free",
        "v1.core.checkpoint_ledger",
        parameters=("self", "request_id"),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.reachable_block_mask",
        "v1.core.checkpoint_ledger (its rule is ours to follow)",
        parameters=(
            "cls",
            "start_block",
            "end_block",
            "alignment_tokens",
            "kv_cache_spec",
            "use_eagle",
            "retention_interval",
            "reachable_boundaries",
            "dcp_world_size",
            "final_segment_end_block",
        ),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.remove_skipped_blocks",
        "v1.core.checkpoint_ledger",
        parameters=("self", "request_id", "processed_computed_tokens", "num_prompt_tokens"),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager._get_num_evictable_blocks",
        "v1.core.checkpoint_ledger",
        parameters=("cls", "blocks"),
    ),
    Row(
        "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager.add_local_computed_blocks",
        "v1.core.checkpoint_ledger",
        parameters=(
            "self",
            "request_id",
            "new_computed_blocks",
            "num_local_computed_tokens",
            "num_external_computed_tokens",
        ),
    ),
    Row(
        "vllm.v1.kv_cache_interface.MambaSpec.__init__",
        "v1.core.checkpoint_ledger",
        parameters=(
            "self",
            "block_size",
            "shapes",
            "dtypes",
            "page_size_padded",
            "mamba_type",
            "mamba_cache_mode",
            "num_speculative_blocks",
            "num_prefill_checkpoint_blocks",
            "prefill_checkpoint_alignment",
            "num_heads",
            "tokens_per_state",
            "tp_replicated",
        ),
    ),
    Row(
        "vllm.v1.kv_cache_interface.MambaSpec.max_memory_usage_bytes",
        "v1.core.checkpoint_ledger",
        parameters=("self", "vllm_config"),
    ),
    Row(
        "vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry.register",
        "v1.core.checkpoint_ledger",
        parameters=("cls", "kvcache_spec_cls", "manager_class", "uniform_type_base_spec"),
    ),
    Row(
        "vllm.v1.metrics.loggers.StatLoggerBase.__init__",
        "v1.metrics",
        parameters=("self", "vllm_config", "engine_index"),
    ),
    Row("vllm.v1.metrics.loggers.StatLoggerBase.log_engine_initialized", "v1.metrics", parameters=("self",)),
    Row(
        "vllm.v1.metrics.loggers.StatLoggerBase.record",
        "v1.metrics",
        parameters=("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    ),
    Row("vllm.v1.outputs.AsyncModelRunnerOutput.get_output", "v1.worker.output", parameters=("self",)),
    Row(
        "vllm.v1.sample.logits_processor.build_logitsprocs",
        "v1.worker.sampling",
        parameters=("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
    ),
    Row(
        "vllm.v1.sample.sampler.Sampler.__init__",
        "v1.worker.bucketed_sampling",
        parameters=("self", "logprobs_mode", "use_fp64_gumbel"),
    ),
    Row(
        "vllm.v1.sample.sampler.Sampler.apply_penalties",
        "v1.worker.bucketed_sampling",
        parameters=("logits", "sampling_metadata", "output_token_ids"),
    ),
    Row(
        "vllm.v1.sample.sampler.Sampler.forward",
        "v1.worker.sampling",
        parameters=("self", "logits", "sampling_metadata", "predict_bonus_token", "logprobs_mode_override"),
    ),
    Row(
        "vllm.v1.worker.gpu_input_batch.InputBatch.__init__",
        "v1.worker.bucketed_sampling",
        parameters=(
            "self",
            "max_num_reqs",
            "max_model_len",
            "max_num_batched_tokens",
            "device",
            "vocab_size",
            "block_sizes",
            "kernel_block_sizes",
            "max_num_blocks_per_req",
            "logitsprocs",
            "logitsprocs_need_output_token_ids",
            "num_spec_tokens",
            "is_pooling_model",
            "cp_kv_cache_interleave_size",
            "reasoning_config",
            "use_replayssm",
            "slot_mapping_modes",
        ),
    ),
    Row("vllm.v1.worker.gpu_input_batch.InputBatch.add_request", "v1.worker.sampling", parameters=("self", "request")),
    Row("vllm.v1.worker.gpu_input_batch.InputBatch.condense", "v1.worker.sampling", parameters=("self",)),
    Row(
        "vllm.v1.worker.gpu_input_batch.InputBatch._make_prompt_token_ids_cpu_tensor",
        "v1.worker.bucketed_sampling",
        parameters=("self",),
    ),
    Row("vllm.v1.worker.gpu_input_batch.InputBatch.num_reqs", "v1.worker.bucketed_sampling"),
    Row(
        "vllm.v1.worker.gpu_input_batch.InputBatch.refresh_metadata",
        "v1.worker.bucketed_sampling",
        parameters=("self",),
    ),
    Row(
        "vllm.v1.worker.gpu_input_batch.InputBatch.remove_request", "v1.worker.sampling", parameters=("self", "req_id")
    ),
    Row(
        "vllm.v1.worker.gpu_worker.init_worker_distributed_environment",
        "v1.worker.hpu_worker",
        parameters=("vllm_config", "rank", "distributed_init_method", "local_rank", "backend"),
    ),
    Row(
        "vllm.v1.worker.worker_base.WorkerBase.__init__",
        "v1.worker.hpu_worker",
        parameters=("self", "vllm_config", "local_rank", "rank", "distributed_init_method", "is_driver_worker"),
    ),
    Row("vllm.v1.worker.worker_base.WorkerBase.compile_or_warm_up_model", "v1.worker.hpu_worker", parameters=("self",)),
    Row(
        "vllm.v1.worker.worker_base.WorkerBase.execute_model",
        "v1.worker.hpu_worker",
        parameters=("self", "scheduler_output"),
    ),
    Row("vllm.v1.worker.worker_base.WorkerBase.get_kv_cache_spec", "v1.worker.hpu_worker", parameters=("self",)),
    Row("vllm.v1.worker.worker_base.WorkerBase.get_model", "v1.worker.hpu_worker", parameters=("self",)),
    Row("vllm.v1.worker.worker_base.WorkerBase.init_device", "v1.worker.hpu_worker", parameters=("self",)),
    Row(
        "vllm.v1.worker.worker_base.WorkerBase.load_model",
        "v1.worker.hpu_worker",
        parameters=("self", "load_dummy_weights"),
    ),
    Row(
        "vllm.v1.worker.worker_base.WorkerBase.sample_tokens",
        "v1.worker.hpu_worker",
        parameters=("self", "grammar_output"),
    ),
    Row("vllm.v1.worker.worker_base.WorkerBase.shutdown", "v1.worker.hpu_worker", parameters=("self",)),
    Row("vllm.v1.worker.worker_base.WorkerBase.synchronize_device", "v1.worker.hpu_worker", parameters=("self",)),
    Row(
        "vllm.v1.worker.workspace.init_workspace_manager",
        "v1.worker.hpu_worker",
        parameters=("device", "num_ubatches", "num_lanes"),
    ),
    Row(
        "vllm.v1.core.kv_cache_utils.KVCacheBlock",
        "v1.core.checkpoint_ledger",
        fields=("block_id", "ref_cnt", "prev_free_block", "next_free_block", "is_null"),
    ),
    Row(
        "vllm.v1.core.sched.output.CachedRequestData",
        "v1.worker.requests, v1.core.sched.hpu_scheduler",
        fields=(
            "req_ids",
            "resumed_req_ids",
            "new_block_ids",
            "num_computed_tokens",
            "num_output_tokens",
            "all_token_ids",
        ),
    ),
    Row(
        "vllm.v1.core.sched.output.NewRequestData",
        "v1.worker.requests, v1.core.sched.hpu_scheduler",
        fields=("req_id", "prompt_token_ids", "sampling_params", "block_ids", "num_computed_tokens"),
    ),
    Row(
        "vllm.v1.core.sched.output.SchedulerOutput",
        "v1.worker.requests",
        fields=(
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "finished_req_ids",
            "preempted_req_ids",
            "new_block_ids_to_zero",
            "kv_cache_block_copies",
            "block_table_updates",
            "scheduled_spec_decode_tokens",
        ),
    ),
    Row(
        "vllm.v1.core.sched.output.GrammarOutput",
        "v1.worker.sampling",
        fields=("structured_output_request_ids", "grammar_bitmask"),
    ),
    Row(
        "vllm.v1.kv_cache_interface.KVCacheConfig",
        "v1.worker.kv_cache",
        fields=("num_blocks", "kv_cache_groups", "prefix_cache_retention_interval"),
    ),
    Row(
        "vllm.v1.kv_cache_interface.MambaSpec",
        "v1.core.checkpoint_ledger, v1.core.sched.block_size",
        fields=(
            "shapes",
            "dtypes",
            "page_size_padded",
            "mamba_cache_mode",
            "num_speculative_blocks",
            "num_prefill_checkpoint_blocks",
            "block_size",
        ),
    ),
    Row("vllm.v1.metrics.stats.SchedulerStats", "v1.metrics", fields=("waiting_lora_adapters",)),
    Row(
        "vllm.v1.outputs.ModelRunnerOutput",
        "v1.worker.output",
        fields=("req_ids", "req_id_to_index", "sampled_token_ids", "logprobs", "prompt_logprobs_dict"),
    ),
)


def resolve(symbol: str) -> Any:
    """The object named ``symbol``, as it stands in its class. Raises AttributeError or ImportError when it is gone."""
    parts = symbol.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = inspect.getattr_static(found, name)
        return found
    raise ImportError(f"no module of {symbol}")


def drift(row: Row) -> str | None:
    """What differs between ``row`` and the installed vLLM, None where nothing does."""
    try:
        found = resolve(row.symbol)
    except (AttributeError, ImportError) as error:
        return f"{row.symbol} is gone ({error}); {row.used_by} depends on it"
    if row.fields is not None:
        names = {field.name for field in dataclasses.fields(found)}
        missing = [name for name in row.fields if name not in names]
        return f"{row.symbol} has no field {', '.join(missing)}; {row.used_by} reads it" if missing else None
    if row.parameters is None:
        return None
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    parameters = tuple(inspect.signature(found).parameters)
    if parameters == row.parameters:
        return None
    return f"{row.symbol} takes {parameters} and took {row.parameters}; {row.used_by} depends on it"
