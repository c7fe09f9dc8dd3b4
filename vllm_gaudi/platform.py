# SPDX-License-Identifier: Apache-2.0
"""The platform: what vLLM asks before there is a worker. Decides by configuration, never touches a tensor.

Owns: class paths (dotted strings), defaults that the device needs.
Never: a block size. vLLM calls ``check_and_update_config`` again on the live config once the engine runs, so every line
of it must leave a resolved config as it is.

Ordering rule: refuse first, then fill in what is still open.
"""

from __future__ import annotations

import platform as host_platform
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_gaudi import capabilities, device, envs

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.vllm_gaudi.platform")

ATTENTION_BACKEND = "vllm_gaudi.attention.backend.HPUAttentionBackend"
WORKER = "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"
SCHEDULER = "vllm_gaudi.v1.core.sched.hpu_scheduler.HPUScheduler"
ASYNC_SCHEDULER = "vllm_gaudi.v1.core.sched.hpu_async_scheduler.HPUAsyncScheduler"
KV_CACHE_MANAGER = "vllm_gaudi.v1.core.checkpoint_ledger.GDNCheckpointManager"
COMMUNICATOR = "vllm_gaudi.distributed.hpu_communicator.HpuCommunicator"


class HpuPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name: str = device.device_type()
    device_type: str = device.device_type()
    dispatch_key: str = device.device_type().upper()
    ray_device_key: str = "HPU"
    device_control_env_var: str = "HABANA_VISIBLE_MODULES"
    dist_backend: str = device.distributed_backend()
    simple_compile_backend: str = "eager"

    _model_configs: ClassVar[weakref.WeakValueDictionary[int, ModelConfig]] = weakref.WeakValueDictionary()
    """Of the engines that this process has configured and still holds, by ``id``: a config has no hash."""

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    # Configuration

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Before any config exists: vLLM would pick its V2 model runner wherever it finds Triton."""
        envs.set_default("VLLM_USE_V2_MODEL_RUNNER", "0")
        if device.is_hpu():
            # A forked process may hang at its exit on a Gaudi; vLLM spawns on its own for CUDA and XPU alone.
            envs.set_default("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what is not supported; choose worker and scheduler; switch vLLM's own compiler off."""
        from vllm.config import CompilationMode, CUDAGraphMode

        from vllm_gaudi import compat

        if vllm_config.model_config is None:  # vLLM's own tests and tools build configs without a model
            return
        capabilities.refuse(vllm_config)
        cls._model_configs[id(vllm_config.model_config)] = vllm_config.model_config
        compat.patch_torch_accelerator()  # with several ranks the engine's process has no worker that would
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = WORKER
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: VllmConfig) -> None:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        resolve_obj_by_qualname(KV_CACHE_MANAGER).register()

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return False

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        return ATTENTION_BACKEND

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return COMMUNICATOR

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's compiled kernels are absent on this platform."""

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse what a request asks and the engine cannot do, before the engine's core hears of it.

        Raises VLLMValidationError or ValueError. vLLM does not say for which engine: with several models in a process
        the largest vocabulary counts here, and the scheduler checks against its own.
        """
        from vllm_gaudi import request_checks

        if processed_inputs.get("type") == "embeds":
            raise ValueError("prompt embeddings are not supported; send text or token ids")
        if hasattr(params, "seed"):  # those of pooling are refused by vLLM
            request_checks.check_sampling_params(params)
        vocab_size = max((config.get_vocab_size() for config in cls._model_configs.values()), default=0)
        if vocab_size and processed_inputs.get("prompt_token_ids") is not None:
            request_checks.check_token_ids(processed_inputs["prompt_token_ids"], vocab_size)

    # Device

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "Intel Gaudi" if device.is_hpu() else f"CPU host ({host_platform.machine()})"

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return f"{device.device_type()}:{device_id}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes; 0 on a Gaudi that this process does not own: asking the device would take it from the worker."""
        return device.total_memory() if _owns_device() else 0

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        return float(_used_memory()) if _owns_device() else 0.0

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """A process has one device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        _seed_all(seed)

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode()

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype {dtype} is not supported; pass --dtype bfloat16 or float32")

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def is_sleep_mode_available(cls) -> bool:
        return False

    @classmethod
    def is_cumem_allocator_available(cls) -> bool:
        return False

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return False


# Class methods whose argument is called ``device`` cannot reach the module of that name.
_used_memory = device.used_memory
_owns_device = device.is_initialized
_seed_all = device.seed_all
