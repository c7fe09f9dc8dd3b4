# SPDX-License-Identifier: Apache-2.0
"""The model runner: one rank's model, the step over its pool, and what is run before the first request.

Owns: loading, the KV cache specs, building the owners of a pool, the profile run and warm-up.
Never: the order of a step (``step``), tensor arithmetic, a branch on the model's family.

Ordering rule: the model is loaded before the runner exists; ``step`` is built whole for a pool and dropped whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_gaudi import device
from vllm_gaudi.bucketing.grid import (
    CONFIG_KEYS,
    PREFILL_ROW_TILE,
    BucketGrid,
    DecodeBucket,
    ExactGrid,
    PrefillBucket,
    RowTiles,
    decode_batch_buckets,
)
from vllm_gaudi.layers.attention import install_attention
from vllm_gaudi.layers.linear import install_row_tiles
from vllm_gaudi.v1.core.checkpoint_ledger import GDNCheckpointSpec
from vllm_gaudi.v1.core.sched.block_size import check_groups
from vllm_gaudi.v1.worker.execution import ExecutionMode
from vllm_gaudi.v1.worker.gdn_checkpoint.layout import make_layout
from vllm_gaudi.v1.worker.gdn_checkpoint.store import GDNCheckpointStore, StateZeroer
from vllm_gaudi.v1.worker.graphs import GraphRunner
from vllm_gaudi.v1.worker.inputs import InputBuilder, PaddingRows
from vllm_gaudi.v1.worker.kv_cache import CacheGeometry, KVCaches
from vllm_gaudi.v1.worker.prompt_logprobs import PromptLogprobsWorker
from vllm_gaudi.v1.worker.requests import RequestTable
from vllm_gaudi.v1.worker.sampling import SamplingState
from vllm_gaudi.v1.worker.state_slots import StateSlotPool
from vllm_gaudi.v1.worker.step import StepRunner
from vllm_gaudi.v1.worker.warmup import validate, warm_up

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec


def load_model(vllm_config: VllmConfig, mode: ExecutionMode, load_dummy_weights: bool = False) -> torch.nn.Module:
    """The model with its weights, by vLLM's loader, and with the plugin's linear and attention methods.

    Needs the current vLLM config.
    """
    load_config = vllm_config.load_config
    if load_dummy_weights:
        load_config.load_format = "dummy"
    loader = get_model_loader(load_config)
    model = loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
    install_row_tiles(model, mode.packed_rows, mode.logits_row_tile)
    install_attention(model)
    return model


class HPUModelRunner:
    """``model``: loaded, on ``device``. ``initialize_kv_cache`` gives the runner a pool, and with it a ``step``."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, mode: ExecutionMode, model: torch.nn.Module):
        scheduler = vllm_config.scheduler_config
        self.vllm_config = vllm_config
        self.device = device
        self.mode = mode
        self.model = model
        self.max_num_seqs = scheduler.max_num_seqs
        self.max_num_tokens = scheduler.max_num_batched_tokens
        additional = vllm_config.additional_config
        self._overrides = {key: additional[key] for key in CONFIG_KEYS if key in additional}
        self.graphs = GraphRunner(model, vllm_config, mode.backend)
        self.sampling = SamplingState(vllm_config, device, decode_batch_buckets(self.max_num_seqs, self._overrides))
        self._step: StepRunner | None = None

    @property
    def step(self) -> StepRunner:
        """Raises RuntimeError before the runner has a pool."""
        if self._step is None:
            raise RuntimeError("the KV cache is not initialized")
        return self._step

    @property
    def max_model_len(self) -> int:
        return self.vllm_config.model_config.max_model_len

    @property
    def layers(self) -> dict[str, Any]:
        return self.vllm_config.compilation_config.static_forward_context

    # Start-up

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """vLLM's specs by layer; a GDN layer's under the class that our block manager is registered for."""
        specs = {}
        for name, layer in self.layers.items():
            if hasattr(layer, "get_kv_cache_spec"):
                spec = layer.get_kv_cache_spec(self.vllm_config)
                if spec is not None:
                    specs[name] = GDNCheckpointSpec.of(spec) if isinstance(spec, MambaSpec) else spec
        return specs

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the caches, bind them to the layers, and build the owners that need their geometry."""
        self._step = self._build_step(kv_cache_config)

    def initialize_profile_cache(self) -> None:
        """The same with a pool of one block, for the profile run; the grid is that of an unlimited pool."""
        specs = self.get_kv_cache_spec()
        attention = [name for name, spec in specs.items() if not isinstance(spec, MambaSpec)]
        groups = [KVCacheGroupSpec(attention, specs[attention[0]])]
        # One GDN layer per group: layers need not share pages for a dummy run.
        groups += [KVCacheGroupSpec([name], spec) for name, spec in specs.items() if isinstance(spec, MambaSpec)]
        config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
        self._step = self._build_step(config, max_blocks=sys.maxsize)

    def drop_kv_cache(self) -> None:
        """Neither a layer nor an owner holds a page or a state any more."""
        for layer in self.layers.values():
            if hasattr(layer, "kv_cache"):
                layer.kv_cache = ()
        self._step = None

    def _build_step(self, kv_cache_config: KVCacheConfig, max_blocks: int | None = None) -> StepRunner:
        config, mode = self.vllm_config, self.mode
        geometry = CacheGeometry.from_config(kv_cache_config)
        cached_groups = geometry.gdn_groups if config.cache_config.enable_prefix_caching else ()
        grid_class = ExactGrid if mode.exact_shapes else BucketGrid
        grid = grid_class(
            query_multiple=PREFILL_ROW_TILE,
            max_query=self.max_num_tokens,
            max_batch=self.max_num_seqs,
            max_context=self.max_model_len,
            kernel_block=geometry.kernel_block,
            max_blocks=geometry.num_kernel_blocks if max_blocks is None else max_blocks,
            block_size=geometry.block_size if cached_groups else 0,
            overrides=self._overrides,
        )
        caches = KVCaches(
            geometry,
            kv_cache_config,
            self.layers,
            self.max_num_seqs,
            grid.num_staging,
            self.device,
            poison=mode.poison,
        )
        slots = StateSlotPool(self.max_num_seqs)
        return StepRunner(
            graphs=self.graphs,
            grid=grid,
            caches=caches,
            store=_build_store(caches, kv_cache_config, cached_groups),
            state_slots=slots,
            requests=RequestTable(slots, geometry.num_groups, self.max_model_len, cached_groups, geometry.block_size),
            inputs=InputBuilder(
                grid,
                PaddingRows(geometry.padding_block, caches.zero_row, caches.trash_row, caches.first_staging_row),
                tiles=_row_tiles(mode.row_tiles, geometry),
                expert_tiles=_row_tiles(mode.expert_row_tiles, geometry),
                with_hints=mode.host_hints,
                attention_group=geometry.attention_group,
                kernel_block=geometry.kernel_block,
                kernel_blocks_per_block=geometry.kernel_blocks_per_block,
                num_slots=self.max_num_seqs,
                position_axes=3 if config.model_config.uses_mrope else 1,
                device=self.device,
            ),
            sampling=self.sampling,
            prompt_logprobs=PromptLogprobsWorker(
                self.graphs.prompt_logits,
                self.sampling.sampler,
                config.model_config.get_vocab_size(),
                config.model_config.logprobs_mode,
                self.device,
            ),
            cached_groups=cached_groups,
            is_async=bool(config.scheduler_config.async_scheduling),
        )

    # Before the first request

    @torch.inference_mode()
    def profile_run(self) -> None:
        """Do what needs most memory: the largest forwards, and sampling for the most requests of what they may ask.

        Of the prefills it is the one with most rows, or the one whose sequences read most context between them.
        """
        grid = self.step.grid
        prefills = grid.all_prefill()
        widest = max(prefills, key=lambda bucket: (bucket.batch * bucket.blocks, bucket.rows))
        buckets: tuple[PrefillBucket | DecodeBucket, ...] = (grid.all_decode()[0], prefills[0], widest)
        for bucket in dict.fromkeys(buckets):
            self.dummy_run(bucket)
        self.sampling.warm_up(run_all=False)
        self.sampling.profile()
        self.step.profile_prompt_logprobs(prefills[0], self.sampling.most_logprobs)

    def run_smallest_decode(self) -> None:
        """A dummy run that costs least."""
        self.dummy_run(self.step.grid.all_decode()[-1])

    @torch.inference_mode()
    def dummy_run(self, bucket: PrefillBucket | DecodeBucket) -> torch.Tensor:
        """Run one bucket of padding through model and logits, which are returned."""
        return self.step.dummy_run(bucket)

    @torch.inference_mode()
    def warm_up(self, show_progress: bool) -> int:
        """Compile every shape of the grid and leave no trace of it in the caches; returns the number of shapes.

        On Gaudi nothing runs while it is compiled, so what padding reads is written anew, two shapes run for real, and
        so do the operators outside the graphs, each of which is compiled at its first run with a shape.
        """
        self.sampling.build_logprobs()
        if self.mode.exact_shapes:
            self.finish_warm_up()
            return 0
        step = self.step
        if self.mode.on_hpu:
            self.run_smallest_decode()  # makes what lives on, where it is known to be made
        with device.compile_only() as nothing_ran:
            count = warm_up(step.grid, self.dummy_run, show_progress)
        if nothing_ran:
            step.caches.zero_reserved()
            validate(step.grid, self.dummy_run)
            self._warm_up_eager()
        self.finish_warm_up()
        return count

    def _warm_up_eager(self) -> None:
        """Run what surrounds the graphs at every size that a step may need."""
        step = self.step
        all_buckets: tuple[Sequence[PrefillBucket | DecodeBucket], ...] = (
            step.grid.all_prefill(),
            step.grid.all_decode(),
        )
        for buckets in all_buckets:
            for bucket in {(bucket.rows, bucket.batch): bucket for bucket in buckets}.values():
                self.dummy_run(bucket)  # embedding and last norm, token ids of decodes, rows of logits
        self.sampling.warm_up(run_all=True)
        for rows in step.grid.decode_batches:
            step.inputs.store_sampled_tokens(
                np.empty(0, np.int32), torch.zeros(rows, dtype=torch.int32, device=self.device)
            )
        # A step's fresh blocks: those that its tokens fill, and one more of each request. A request has one slot.
        fresh = -(-self.max_num_tokens // step.caches.geometry.block_size) + self.max_num_seqs
        step.store.warm_up(step.caches.trash_row, max(fresh, step.grid.num_staging))

    @torch.inference_mode()
    def finish_warm_up(self) -> None:
        self.step.caches.zero_reserved()
        self.graphs.finish_warmup()

    # The step

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.step.execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        return self.step.sample_tokens(grammar_output)


def _row_tiles(tiles: RowTiles | None, geometry: CacheGeometry) -> RowTiles | None:
    """``tiles``, without short ones where the chunks of a prompt do not fill the others."""
    if tiles is None or (geometry.gdn_groups and geometry.gdn_chunk == tiles.prefill):
        return tiles
    return replace(tiles, short_tile=0)


def _build_store(caches: KVCaches, kv_cache_config: KVCacheConfig, cached_groups: Sequence[int]) -> StateZeroer:
    """A checkpoint store where GDN blocks are cached, plain zeroing elsewhere."""
    geometry = caches.geometry
    tensors = (caches.k, caches.v, caches.conv_states, caches.ssm_states)
    if not cached_groups:
        return StateZeroer(geometry.num_blocks, geometry.block_size, *tensors)
    check_groups(kv_cache_config)
    layout = make_layout(
        state=caches.state_shape,
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        page_bytes=geometry.page_bytes,
        group_ids=geometry.gdn_groups,
        group_sizes=[len(names) for names in geometry.gdn_layers],
        num_attention_layers=len(geometry.attention_layers),
    )
    return GDNCheckpointStore(layout, *tensors)
