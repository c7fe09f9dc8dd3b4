# SPDX-License-Identifier: Apache-2.0
"""What of vLLM the plugin overrides, calls beside its public interface, or reads: the table to look at when vLLM moves.

Owns: the table (``SYMBOLS``, ``READS``; ``ROWS`` is both as records), the record of the supported release in
``vllm-<release>.json``, and ``drift``, which compares the vLLM that is installed with table and record.
Never: an opinion on what to do; the module of a row says what the symbol is used for.

Ordering rule: mend what has drifted, then record. A symbol that the plugin overrides and that has no row fails
``tests/unit/support/test_vllm_contract.py``.

    python -m tests.support.vllm_contract record

writes the record of the vLLM that is installed in the place of the former one. The difference, which it prints, is the
report of an upgrade: it has every field of a dataclass, so new ones are seen; only those in ``READS`` must be there.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

# Module of vllm_gaudi -> symbols of vLLM that it depends on.
SYMBOLS: dict[str, tuple[str, ...]] = {
    "attention.backend": (
        "vllm.v1.attention.backend.AttentionBackend.get_builder_cls",
        "vllm.v1.attention.backend.AttentionBackend.get_impl_cls",
        "vllm.v1.attention.backend.AttentionBackend.get_name",
        "vllm.v1.attention.backend.AttentionBackend.get_preferred_block_size",
        "vllm.v1.attention.backend.AttentionBackend.get_supported_kernel_block_sizes",
        "vllm.v1.attention.backend.AttentionBackend.supported_dtypes",
        "vllm.v1.attention.backend.AttentionBackend.supported_kv_cache_dtypes",
        "vllm.v1.attention.backend.AttentionImpl.__init__",
        "vllm.v1.attention.backend.AttentionImpl.forward",
    ),
    "cli.dry_run": (
        "vllm.distributed.parallel_state.init_distributed_environment",
        "vllm.entrypoints.launchers.cli_args.make_arg_parser",
        "vllm.model_executor.layers.rotary_embedding._ROPE_DICT",
        "vllm.model_executor.model_loader.utils.initialize_model",
        "vllm.v1.attention.backends.utils.resolve_kv_cache_layout",
        "vllm.v1.core.kv_cache_utils.generate_scheduler_kv_cache_config",
        "vllm.v1.core.kv_cache_utils.get_kv_cache_configs",
        "vllm.v1.core.kv_cache_utils.get_kv_cache_groups",
        "vllm.v1.core.kv_cache_utils.resolve_kv_cache_block_sizes",
        "vllm.v1.core.single_type_kv_cache_manager.register_all_kvcache_specs",
    ),
    "cli.rendering": (
        "vllm.renderers.base.BaseRenderer.render_chat",
        "vllm.renderers.base.BaseRenderer.render_cmpl",
        "vllm.renderers.inputs.preprocess.parse_model_prompt",
    ),
    "distributed.hpu_communicator": (
        "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase.all_gather",
        "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase.all_reduce",
    ),
    "layers": ("vllm.forward_context.get_forward_context",),
    "layers.attention": ("vllm.model_executor.layers.attention.attention.Attention.forward",),
    "layers.gdn_attention": (
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention.__init__",
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention._output_projection",
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention.fix_query_key_value_ordering",
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention.split_ba",
    ),
    "layers.linear": (
        "vllm.model_executor.layers.linear.UnquantizedLinearMethod.__init__",
        "vllm.model_executor.layers.linear.UnquantizedLinearMethod.apply",
        "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod.apply",
    ),
    "layers.moe": (
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase.is_monolithic",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner.MoERunner._encode_layer_name",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner.MoERunner._forward_impl",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner.MoERunner._select_forward",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner._moe_forward",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.__init__",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.apply_monolithic",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.get_fused_moe_quant_config",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.process_weights_after_loading",
    ),
    "layers.norm": (
        "vllm.model_executor.layers.layernorm.GemmaRMSNorm.__init__",
        "vllm.model_executor.layers.layernorm.RMSNorm.__init__",
        "vllm.model_executor.layers.layernorm.RMSNorm.forward_native",
    ),
    "layers.norm, layers.rotary": ("vllm.model_executor.custom_op.CustomOp.forward_oot",),
    "layers.rotary": (
        "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.__init__",
        "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbeddingBase._match_cos_sin_cache_dtype",
        "vllm.model_executor.layers.rotary_embedding.mrope.MRotaryEmbedding.__init__",
    ),
    "request_checks": ("vllm.exceptions.VLLMValidationError.__init__",),
    "platform": (
        "vllm.platforms.interface.Platform.check_and_update_config",
        "vllm.platforms.interface.Platform.check_if_supports_dtype",
        "vllm.platforms.interface.Platform.device_control_env_var",
        "vllm.platforms.interface.Platform.dispatch_key",
        "vllm.platforms.interface.Platform.dist_backend",
        "vllm.platforms.interface.Platform.get_attn_backend_cls",
        "vllm.platforms.interface.Platform.get_current_memory_usage",
        "vllm.platforms.interface.Platform.get_device_communicator_cls",
        "vllm.platforms.interface.Platform.get_device_name",
        "vllm.platforms.interface.Platform.get_device_total_memory",
        "vllm.platforms.interface.Platform.get_device_uuid",
        "vllm.platforms.interface.Platform.import_kernels",
        "vllm.platforms.interface.Platform.inference_mode",
        "vllm.platforms.interface.Platform.is_cumem_allocator_available",
        "vllm.platforms.interface.Platform.is_pin_memory_available",
        "vllm.platforms.interface.Platform.is_sleep_mode_available",
        "vllm.platforms.interface.Platform.manual_seed_all",
        "vllm.platforms.interface.Platform.opaque_attention_op",
        "vllm.platforms.interface.Platform.pre_register_and_update",
        "vllm.platforms.interface.Platform.ray_device_key",
        "vllm.platforms.interface.Platform.register_custom_kv_cache_specs",
        "vllm.platforms.interface.Platform.set_device",
        "vllm.platforms.interface.Platform.simple_compile_backend",
        "vllm.platforms.interface.Platform.support_hybrid_kv_cache",
        "vllm.platforms.interface.Platform.support_static_graph_mode",
        "vllm.platforms.interface.Platform.supported_dtypes",
        "vllm.platforms.interface.Platform.validate_request",
    ),
    "v1.core.checkpoint_ledger": (
        "vllm.v1.core.block_pool.BlockPool.cache_full_blocks",
        "vllm.v1.core.block_pool.BlockPool.evict_blocks",
        "vllm.v1.core.block_pool.BlockPool.free_blocks",
        "vllm.v1.core.block_pool.BlockPool.get_new_blocks",
        "vllm.v1.core.block_pool.BlockPool.get_num_free_blocks",
        "vllm.v1.core.block_pool.BlockPool.touch",
        "vllm.v1.core.block_pool.BlockPool.unpin_blocks",
        "vllm.v1.core.kv_cache_utils.KVCacheBlock",
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.__init__",
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.allocate_new_blocks",
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.cache_blocks",
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.find_longest_cache_hit",  # inherited
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.get_num_blocks_to_allocate",
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.pop_blocks_for_free",
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.reachable_block_mask",  # its rule is ours to follow
        "vllm.v1.core.single_type_kv_cache_manager.MambaManager.remove_skipped_blocks",
        "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager._get_num_evictable_blocks",
        "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager.add_local_computed_blocks",
        "vllm.v1.kv_cache_interface.MambaSpec.__init__",
        "vllm.v1.kv_cache_interface.MambaSpec.max_memory_usage_bytes",
        "vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry.register",
    ),
    "v1.core.checkpoint_ledger, v1.core.sched.block_size": ("vllm.v1.kv_cache_interface.MambaSpec",),
    "v1.core.sched.hpu_scheduler": (
        "vllm.v1.core.kv_cache_manager.KVCacheManager.evict_blocks",
        "vllm.v1.core.sched.scheduler.Scheduler._free_request_blocks",
        "vllm.v1.core.sched.scheduler.Scheduler._handle_stopped_request",
        "vllm.v1.core.sched.scheduler.Scheduler._mamba_block_aligned_split",
        "vllm.v1.core.sched.scheduler.Scheduler._preempt_request",
        "vllm.v1.core.sched.scheduler.Scheduler._update_request_as_session",
        "vllm.v1.core.sched.scheduler.Scheduler.add_request",
        "vllm.v1.core.sched.scheduler.Scheduler.finish_requests",
        "vllm.v1.core.sched.scheduler.Scheduler.make_stats",
        "vllm.v1.core.sched.scheduler.Scheduler.schedule",
        "vllm.v1.core.sched.scheduler.Scheduler.update_from_output",
        "vllm.v1.request.StreamingUpdate",
    ),
    "v1.metrics": (
        "vllm.v1.metrics.loggers.StatLoggerBase.__init__",
        "vllm.v1.metrics.loggers.StatLoggerBase.log_engine_initialized",
        "vllm.v1.metrics.loggers.StatLoggerBase.record",
        "vllm.v1.metrics.stats.SchedulerStats",
    ),
    "v1.worker.bucketed_sampling": (
        "vllm.v1.sample.logits_processor.interface.LogitsProcessor.__init__",
        "vllm.v1.sample.logits_processor.interface.LogitsProcessor.apply",
        "vllm.v1.sample.logits_processor.interface.LogitsProcessor.is_argmax_invariant",
        "vllm.v1.sample.logits_processor.interface.LogitsProcessor.update_state",
        "vllm.v1.sample.sampler.Sampler.__init__",
        "vllm.v1.sample.sampler.Sampler.apply_penalties",
        "vllm.v1.worker.gpu_input_batch.InputBatch.__init__",
        "vllm.v1.worker.gpu_input_batch.InputBatch._make_prompt_token_ids_cpu_tensor",
        "vllm.v1.worker.gpu_input_batch.InputBatch.num_reqs",
        "vllm.v1.worker.gpu_input_batch.InputBatch.refresh_metadata",
    ),
    "v1.worker.graphs": ("vllm.forward_context.set_forward_context",),
    "v1.worker.hpu_model_runner": ("vllm.model_executor.model_loader.get_model_loader",),
    "v1.worker.hpu_worker": (
        "vllm.v1.worker.gpu_worker.init_worker_distributed_environment",
        "vllm.v1.worker.worker_base.WorkerBase.__init__",
        "vllm.v1.worker.worker_base.WorkerBase.compile_or_warm_up_model",
        "vllm.v1.worker.worker_base.WorkerBase.execute_model",
        "vllm.v1.worker.worker_base.WorkerBase.get_kv_cache_spec",
        "vllm.v1.worker.worker_base.WorkerBase.get_model",
        "vllm.v1.worker.worker_base.WorkerBase.init_device",
        "vllm.v1.worker.worker_base.WorkerBase.load_model",
        "vllm.v1.worker.worker_base.WorkerBase.sample_tokens",
        "vllm.v1.worker.worker_base.WorkerBase.shutdown",
        "vllm.v1.worker.worker_base.WorkerBase.synchronize_device",
        "vllm.v1.worker.workspace.init_workspace_manager",
    ),
    "v1.worker.kv_cache": ("vllm.v1.kv_cache_interface.KVCacheConfig",),
    "v1.worker.output": (
        "vllm.v1.outputs.AsyncModelRunnerOutput.get_output",
        "vllm.v1.outputs.ModelRunnerOutput",
        "vllm.v1.outputs.ModelRunnerOutput.__init__",
    ),
    "v1.worker.process_groups": (
        "vllm.distributed.parallel_state.destroy_distributed_environment",
        "vllm.distributed.parallel_state.destroy_model_parallel",
        "vllm.distributed.parallel_state.model_parallel_is_initialized",
    ),
    "v1.worker.requests": ("vllm.v1.core.sched.output.SchedulerOutput",),
    "v1.worker.requests, v1.core.sched.hpu_scheduler": (
        "vllm.v1.core.sched.output.CachedRequestData",
        "vllm.v1.core.sched.output.NewRequestData",
    ),
    "v1.worker.sampling": (
        "vllm.v1.core.sched.output.GrammarOutput",
        "vllm.v1.sample.logits_processor.build_logitsprocs",
        "vllm.v1.sample.sampler.Sampler.forward",
        "vllm.v1.worker.gpu_input_batch.InputBatch.add_request",
        "vllm.v1.worker.gpu_input_batch.InputBatch.condense",
        "vllm.v1.worker.gpu_input_batch.InputBatch.remove_request",
    ),
}

# Dataclass of vLLM -> its fields that the plugin reads or fills.
READS: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": (
        "block_id",
        "ref_cnt",
        "prev_free_block",
        "next_free_block",
        "is_null",
    ),
    "vllm.v1.core.sched.output.CachedRequestData": (
        "req_ids",
        "resumed_req_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
        "all_token_ids",
    ),
    "vllm.v1.core.sched.output.GrammarOutput": ("structured_output_request_ids", "grammar_bitmask"),
    "vllm.v1.core.sched.output.NewRequestData": (
        "req_id",
        "prompt_token_ids",
        "sampling_params",
        "block_ids",
        "num_computed_tokens",
    ),
    "vllm.v1.core.sched.output.SchedulerOutput": (
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
    "vllm.v1.kv_cache_interface.KVCacheConfig": ("num_blocks", "kv_cache_groups", "prefix_cache_retention_interval"),
    "vllm.v1.kv_cache_interface.MambaSpec": (
        "shapes",
        "dtypes",
        "num_speculative_blocks",
        "num_prefill_checkpoint_blocks",
        "block_size",
    ),
    "vllm.v1.metrics.stats.SchedulerStats": ("waiting_lora_adapters",),
    "vllm.v1.outputs.ModelRunnerOutput": (
        "req_ids",
        "req_id_to_index",
        "sampled_token_ids",
        "logprobs",
        "prompt_logprobs_dict",
    ),
    "vllm.v1.request.StreamingUpdate": ("max_tokens",),
}


@dataclass(frozen=True)
class Row:
    """``symbol`` of vLLM and the module of ours that depends on it; ``fields`` that a dataclass must have."""

    symbol: str
    used_by: str
    fields: tuple[str, ...] = ()


ROWS = tuple(Row(symbol, used_by, READS.get(symbol, ())) for used_by, symbols in SYMBOLS.items() for symbol in symbols)

Record = Mapping[str, "str | list[str]"]
"""Symbol -> parameters of a callable, ``(self, blocks, on_reuse=...)``, fields of a dataclass, else a type's name."""


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


def describe(symbol: str) -> str | list[str]:
    """What the record says of a symbol of the vLLM that is installed. Raises as ``resolve``."""
    found = resolve(symbol)
    if dataclasses.is_dataclass(found):
        return [field.name for field in dataclasses.fields(found)]
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    return _parameters(found) if callable(found) else type(found).__name__


def drift(row: Row, record: Record) -> str | None:
    """What differs between ``row``, its entry in ``record`` and the vLLM that is installed; None where nothing does."""
    try:
        found = describe(row.symbol)
    except (AttributeError, ImportError) as error:
        return f"{row.symbol} is gone ({error}); {row.used_by} depends on it"
    if row.symbol not in record:
        return f"{row.symbol} is not recorded: run python -m tests.support.vllm_contract record"
    if row.fields:
        missing = [name for name in row.fields if name not in found]
        return f"{row.symbol} has no field {', '.join(missing)}; {row.used_by} reads it" if missing else None
    was = record[row.symbol]
    return None if found == was else f"{row.symbol} is {found} and was {was}; {row.used_by} depends on it"


def recorded() -> Record:
    """The record in the tree. There is one."""
    (path,) = _records()
    return json.loads(path.read_text())


def record() -> str:
    """Write the record of the vLLM that is installed in the place of the former one; what differs between them."""
    found: dict[str, str | list[str]] = {}
    for symbol in sorted(row.symbol for row in ROWS):
        try:
            found[symbol] = describe(symbol)
        except (AttributeError, ImportError):
            continue  # the table's row fails until it is mended
    text = json.dumps(found, indent=1) + "\n"
    path = FOLDER / f"vllm-{metadata.version('vllm').partition('+')[0]}.json"
    former = {before: before.read_text() for before in _records()}
    for before in former:
        before.unlink()
    path.write_text(text)
    lines: list[str] = []
    for before, was in former.items():
        lines += difflib.unified_diff(was.splitlines(), text.splitlines(), before.name, path.name, n=1, lineterm="")
    return "\n".join(lines) or f"{path.name}: nothing has changed"


def main(arguments: list[str] | None = None) -> None:
    """Write the record of the vLLM that is installed, and print what differs from the former one."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.vllm_contract", description=main.__doc__)
    parser.add_argument("command", choices=["record"])
    parser.parse_args(arguments)
    platforms = importlib.import_module("vllm.platforms")
    assert platforms.current_platform is not None  # vLLM finds its platform before any of its other modules is imported
    print(record())


# ----------------------------------------------------------------------------------------------------------------------

FOLDER = Path(__file__).parent


def _records() -> list[Path]:
    return sorted(FOLDER.glob("vllm-*.json"))


class _Default:
    """Stands for any default: its value is vLLM's own affair, that there is one is not."""

    def __repr__(self) -> str:
        return "..."


def _parameters(function: Any) -> str:
    """``(self, blocks, *, on_reuse=...)``: names, kinds, and which have a default."""
    signature = inspect.signature(function)
    plain = [
        parameter.replace(annotation=parameter.empty, default=parameter.default)
        if parameter.default is parameter.empty
        else parameter.replace(annotation=parameter.empty, default=_Default())
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


if __name__ == "__main__":
    main()
