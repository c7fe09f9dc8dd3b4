# SPDX-License-Identifier: Apache-2.0
"""One rank's process: device, weights, memory budget, life cycle.

Owns: how much memory the block pool may have, and what the operator is told at start.
Never: anything of a step; that is the runner's.

Ordering rule: weights, then slots, then a profile run; the pool gets what is left.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_gaudi import compat, device
from vllm_gaudi.units import format_bytes
from vllm_gaudi.v1.core.sched.block_size import kernel_block_size
from vllm_gaudi.v1.parent_watch import end_with_parent
from vllm_gaudi.v1.worker import execution, process_groups
from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner, load_model
from vllm_gaudi.v1.worker.memory import MemoryBudget, max_concurrency
from vllm_gaudi.v1.worker.process_groups import part_of_the_start

if TYPE_CHECKING:
    from vllm.tasks import SupportedTask
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

logger = init_logger("vllm.vllm_gaudi.worker")


class HPUWorker(WorkerBase):
    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ):
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        self.mode = execution.choose(self.model_config.enforce_eager)
        self.memory: MemoryBudget | None = None  # what determine_available_memory has counted
        self._weight_bytes = 0

    # Start-up, in the order in which vLLM calls it

    @part_of_the_start
    def init_device(self) -> None:
        end_with_parent()
        process_groups.begin()
        device.initialize()
        compat.patch_torch_accelerator()
        self.device = torch.device(device.device_type())
        self.current_platform.check_if_supports_dtype(self.model_config.dtype)
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            device.distributed_backend(),
        )
        set_random_seed(self.model_config.seed)
        init_workspace_manager(self.device, 1)
        logger.info("%s", self.mode.describe())

    @part_of_the_start
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        with set_current_vllm_config(self.vllm_config):
            model = self._load_model(load_dummy_weights)
            self.model_runner: HPUModelRunner = HPUModelRunner(self.vllm_config, self.device, self.mode, model)
        self._weight_bytes = sum(p.numel() * p.element_size() for p in self.get_model().parameters())

    def _load_model(self, load_dummy_weights: bool) -> torch.nn.Module:
        return load_model(self.vllm_config, self.mode, load_dummy_weights)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    @part_of_the_start
    def determine_available_memory(self) -> int:
        """Bytes for attention pages: what the user gave, or what is left of the device after everything else."""
        specs = self.get_kv_cache_spec()
        non_kv_cache_memory = self._taken_memory()  # before the profile run's pool, which does not stay
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.initialize_profile_cache()
        peak = self._profile()
        memory = self.memory = MemoryBudget(
            total=self._total_memory(),
            gpu_memory_utilization=self.cache_config.gpu_memory_utilization,
            kv_cache_memory_bytes=self.cache_config.kv_cache_memory_bytes,
            non_kv_cache_memory=non_kv_cache_memory,
            peak=peak or 0,
            states=self.model_runner.step.caches.state_bytes,
            padding_block=self._padding_block_bytes(specs),
        )
        num_staging = self.model_runner.step.grid.num_staging
        # The engine's own states come next: with these still there, a device would have to hold both at once.
        self.model_runner.drop_kv_cache()
        if peak is not None:
            gc.collect()
        if memory.kv_cache_memory_bytes is not None:
            words = f"--kv-cache-memory-bytes {memory.kv_cache_memory_bytes}"
        else:
            words = f"--gpu-memory-utilization {memory.gpu_memory_utilization} of {format_bytes(memory.total)}"
        budget, state_bytes, available = memory.budget, memory.states, memory.available
        logger.info(
            "Memory budget %s (%s): weights %s, profile peak %s, GDN states %s, leaves %s for blocks",
            format_bytes(budget),
            words,
            format_bytes(non_kv_cache_memory),
            "not measured" if peak is None else format_bytes(peak),
            format_bytes(state_bytes),
            format_bytes(max(0, available)),
        )
        if available <= 0:
            raise RuntimeError(
                f"no memory is left for the block pool: {words} gives {format_bytes(budget)}, of which weights take "
                f"{format_bytes(non_kv_cache_memory)}, the profile run {format_bytes(memory.peak)} and the GDN states "
                f"of {self.scheduler_config.max_num_seqs} slots and {num_staging} staging rows "
                f"{format_bytes(state_bytes)}; raise --gpu-memory-utilization or --kv-cache-memory-bytes, or lower "
                "--max-num-seqs or --max-num-batched-tokens"
                + ("" if self.mode.on_hpu else " (on a CPU host, raise VLLM_GAUDI_HOST_MEMORY_GIB)")
            )
        return available

    def _padding_block_bytes(self, specs: dict[str, KVCacheSpec]) -> int:
        return sum(
            spec.page_size_bytes // spec.block_size * kernel_block_size(spec.block_size)
            for spec in specs.values()
            if not isinstance(spec, MambaSpec)
        )

    def _total_memory(self) -> int:
        return device.total_memory()

    def _taken_memory(self) -> int:
        return device.taken_memory(self._weight_bytes)

    def _profile(self) -> int | None:
        """Peak bytes of the largest forwards and of sampling; None, unmeasured, on a host whose pool stays the same.

        That is one of given bytes or blocks; the model still runs once, since a bad checkpoint shall not wait for the
        first request. On a device the run is also what finds the forwards to be too large.
        """
        given = (self.cache_config.kv_cache_memory_bytes, self.cache_config.num_gpu_blocks_override)
        found = None
        with set_current_vllm_config(self.vllm_config):
            if self.mode.on_hpu or given == (None, None):
                with device.PeakMemory() as peak:
                    self.model_runner.profile_run()
                    device.synchronize()
                found = peak.bytes
            else:
                self.model_runner.run_smallest_decode()
        self.model_runner.graphs.forget_shapes()  # of a pool that does not stay
        return found

    @part_of_the_start
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)
        self._log_cache_summary()

    def _log_cache_summary(self) -> None:
        geometry = self.model_runner.step.caches.geometry
        logger.info(
            "vllm_gaudi on %s: B = %d tokens, %d GDN group(s) + 1 attention group, %d blocks; pool %s, %d slots and %d "
            "staging rows %s, weights %s; maximum concurrency for %s tokens per request: %.2fx",
            device.device_type(),
            geometry.block_size,
            len(geometry.gdn_groups),
            geometry.num_blocks,
            format_bytes(geometry.pool_bytes),
            self.scheduler_config.max_num_seqs,
            self.model_runner.step.grid.num_staging,
            format_bytes(self.model_runner.step.caches.state_bytes),
            format_bytes(self._weight_bytes),
            f"{self.model_config.max_model_len:,}",
            max_concurrency(
                geometry.num_blocks,
                geometry.block_size,
                len(self.model_runner.step.cached_groups),
                self.model_config.max_model_len,
                self.scheduler_config.max_num_seqs,
            ),
        )

        logger.info("%s", self.model_runner.step.store.describe())

    @part_of_the_start
    def compile_or_warm_up_model(self) -> CompilationTimes:
        start = time.perf_counter()
        if not self.mode.warm_up:
            logger.info("Warm-up is skipped (VLLM_SKIP_WARMUP)")
            self.model_runner.finish_warm_up()
        else:
            with set_current_vllm_config(self.vllm_config):
                count = self.model_runner.warm_up(show_progress=self.is_driver_worker)
            seconds = time.perf_counter() - start
            logger.info("Warmup finished in %.1f secs, %d shapes", seconds, count)
        set_random_seed(self.model_config.seed)
        process_groups.finish()
        return CompilationTimes(language_model=time.perf_counter() - start, encoder=0.0)

    # Serving

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        return self.model_runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        self.model_runner.run_smallest_decode()

    def synchronize_device(self) -> None:
        device.synchronize()

    def get_model(self) -> torch.nn.Module:
        return self.model_runner.model

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def reset_encoder_cache(self) -> None:
        """There is none: multimodal inputs are refused."""

    def profile(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the profiler is not supported; use torch.profiler around the engine")

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("sleep mode is not supported; stop the engine and start it again")

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """vLLM resumes its scheduler after this; there is nothing of the worker's to bring back."""

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("reloading weights is not supported; start a new engine")

    def save_sharded_state(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("saving sharded state is not supported; load the original checkpoint")

    def take_draft_token_ids(self) -> Any:
        return None

    def shutdown(self) -> None:
        self.__dict__.pop("model_runner", None)
