# SPDX-License-Identifier: Apache-2.0
"""The model runner: composes the owners and runs the step. Nothing else lives here.

Owns: the order of a step, which is its correctness argument:

    free before take        the request table hands slots back before it admits anyone
    zero before restore     a fresh attention page may have become a checkpoint's block within one scheduling pass
    restore before read     the forward reads slots, never blocks
    decode before admitted  an admitted request may hit an attention block that a decoding one fills in this step
    forward before save     a checkpoint is the state after a boundary's last token: in a staging row when the forward
                            runs over it, and saved before the next forward stages; in the slot at the step's end
    save before hand-on     the next step may give the block, or the hit on it, to another request

Never: tensor arithmetic, a branch on the model's family, or padding.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_gaudi import device
from vllm_gaudi.bucketing.grid import (
    CONFIG_KEYS,
    PREFILL_ROW_TILE,
    BucketGrid,
    DecodeBucket,
    ExactGrid,
    PrefillBucket,
    RowTiles,
)
from vllm_gaudi.models.attention import install_attention
from vllm_gaudi.models.linear import install_row_tiles
from vllm_gaudi.v1.core.gdn_checkpoint import GDNCheckpointSpec
from vllm_gaudi.v1.core.sched.block_size import check_groups
from vllm_gaudi.v1.worker.execution import ExecutionMode
from vllm_gaudi.v1.worker.gdn_checkpoint.layout import make_layout
from vllm_gaudi.v1.worker.gdn_checkpoint.plan import plan_checkpoints
from vllm_gaudi.v1.worker.gdn_checkpoint.store import GDNCheckpointStore, StateZeroer
from vllm_gaudi.v1.worker.graphs import GraphRunner
from vllm_gaudi.v1.worker.inputs import InputBuilder, ModelInputs, PadRows
from vllm_gaudi.v1.worker.kv_cache import CacheGeometry, KVCaches
from vllm_gaudi.v1.worker.output import StepOutput
from vllm_gaudi.v1.worker.requests import RequestTable, StepRequests
from vllm_gaudi.v1.worker.sampling import PromptLogprobs, PromptScores, SamplingState
from vllm_gaudi.v1.worker.slots import SlotPool
from vllm_gaudi.v1.worker.warmup import validate, warm_up

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

SCORED_ROWS = 128
"""Prompt positions whose logprobs are computed at a time: a chunk of all of them would need more than the model."""


@dataclass(frozen=True)
class PendingStep:
    """A step whose forwards are issued and whose tokens are not sampled yet."""

    step: StepRequests
    place_of: dict[str, int]  # of the requests that sample, where their logits are kept
    prompt_logprobs: dict[str, PromptScores]


class HPUModelRunner:
    """One rank's model, caches and requests. ``initialize_kv_cache`` completes it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, mode: ExecutionMode):
        self.vllm_config = vllm_config
        self.device = device
        self.mode = mode
        scheduler = vllm_config.scheduler_config
        self.max_num_seqs = scheduler.max_num_seqs
        self.max_num_tokens = scheduler.max_num_batched_tokens
        self.is_async = bool(scheduler.async_scheduling)
        self.model: torch.nn.Module
        self.graphs: GraphRunner
        self.caches: KVCaches
        self.store: StateZeroer
        self.cached_groups: tuple[int, ...] = ()
        self.grid: BucketGrid
        self.slots: SlotPool
        self.requests: RequestTable
        self.inputs: InputBuilder
        self.sampling: SamplingState
        self.prompt_logprobs = PromptLogprobs()
        self._pending: PendingStep | None = None

    @property
    def max_model_len(self) -> int:
        return self.vllm_config.model_config.max_model_len

    # Start-up

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load weights with vLLM's loader and put our products and attention in. Needs the current vLLM config."""
        load_config = self.vllm_config.load_config
        if load_dummy_weights:
            load_config.load_format = "dummy"
        loader = get_model_loader(load_config)
        self.model = loader.load_model(vllm_config=self.vllm_config, model_config=self.vllm_config.model_config)
        install_row_tiles(self.model, self.mode.packed_rows, self.mode.logits_row_tile)
        install_attention(self.model)
        self.graphs = GraphRunner(self.model, self.vllm_config, self.mode.backend)

    @property
    def layers(self) -> dict[str, Any]:
        return self.vllm_config.compilation_config.static_forward_context

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """vLLM's specs by layer; a GDN layer's under the class that our block manager is registered for."""
        specs = {}
        for name, layer in self.layers.items():
            if hasattr(layer, "get_kv_cache_spec"):
                spec = layer.get_kv_cache_spec(self.vllm_config)
                if spec is not None:
                    specs[name] = GDNCheckpointSpec.of(spec) if isinstance(spec, MambaSpec) else spec
        return specs

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *, for_profile: bool = False) -> None:
        """Allocate the caches, bind them to the layers, and build the owners that need their geometry.

        ``for_profile``: the grid is that of a pool without end, although this one may be a block.
        """
        geometry = CacheGeometry.from_config(kv_cache_config)
        self.cached_groups = geometry.gdn_groups if self.vllm_config.cache_config.enable_prefix_caching else ()
        additional = self.vllm_config.additional_config
        grid_class = ExactGrid if self.mode.exact_shapes else BucketGrid
        self.grid = grid_class(
            query_multiple=PREFILL_ROW_TILE,
            max_query=self.max_num_tokens,
            max_batch=self.max_num_seqs,
            max_context=self.max_model_len,
            kernel_block=geometry.kernel_block,
            max_blocks=sys.maxsize if for_profile else geometry.num_kernel_blocks,
            block_size=geometry.block_size if self.cached_groups else 0,
            overrides={key: additional[key] for key in CONFIG_KEYS if key in additional},
        )
        self.caches = KVCaches(
            geometry,
            kv_cache_config,
            self.layers,
            self.max_num_seqs,
            self.grid.num_staging,
            self.device,
            poison=self.mode.poison,
        )
        self._build_store(kv_cache_config)
        self.slots = SlotPool(self.max_num_seqs)
        self.requests = RequestTable(self.slots, geometry.num_groups, self.max_model_len)
        self.inputs = InputBuilder(
            self.grid,
            PadRows(geometry.spare_block, self.caches.zero_row, self.caches.trash_row, self.caches.first_staging_row),
            tiles=_row_tiles(self.mode.row_tiles, geometry),
            expert_tiles=_row_tiles(self.mode.expert_row_tiles, geometry),
            with_hints=self.mode.host_hints,
            attention_group=geometry.attention_group,
            kernel_block=geometry.kernel_block,
            kernel_blocks_per_block=geometry.kernel_blocks_per_block,
            num_slots=self.max_num_seqs,
            position_axes=3 if self.vllm_config.model_config.uses_mrope else 1,
            device=self.device,
        )
        self.sampling = SamplingState(self.vllm_config, self.device, self.grid.decode_batches)

    def drop_kv_cache(self) -> None:
        """Undo ``initialize_kv_cache``: no layer and no owner holds a page or a state any more."""
        for layer in self.layers.values():
            if hasattr(layer, "kv_cache"):
                layer.kv_cache = ()
        del self.caches, self.store, self.inputs

    def _build_store(self, kv_cache_config: KVCacheConfig) -> None:
        """A checkpoint store where GDN blocks are cached, plain zeroing elsewhere."""
        caches, geometry = self.caches, self.caches.geometry
        tensors = (caches.k, caches.v, caches.conv, caches.ssm)
        if not self.cached_groups:
            self.store = StateZeroer(geometry.num_blocks, geometry.block_size, *tensors)
            return
        check_groups(kv_cache_config)
        layout = make_layout(
            state=caches.state_shape,
            block_size=geometry.block_size,
            num_blocks=geometry.num_blocks,
            page_bytes=geometry.page_bytes,
            group_ids=geometry.gdn_groups,
            group_sizes=[len(names) for names in geometry.gdn_layers],
            num_positions=len(geometry.attention_layers),
        )
        self.store = GDNCheckpointStore(layout, *tensors)

    @torch.inference_mode()
    def profile_run(self) -> None:
        """Do what needs most memory: the largest forwards, and sampling for the most requests.

        Of the prefills it is the one with most rows, or the one whose sequences read most context between them.
        """
        prefills = self.grid.all_prefill()
        widest = max(prefills, key=lambda bucket: (bucket.batch * bucket.blocks, bucket.rows))
        for bucket in dict.fromkeys((self.grid.all_decode()[0], prefills[0], widest)):
            self.run_pads(bucket)
        self.sampling.warm_up(run_all=False)

    @torch.inference_mode()
    def run_pads(self, bucket: PrefillBucket | DecodeBucket) -> torch.Tensor:
        """Run one bucket of pads through model and logits, which are returned and kept as nobody's."""
        inputs = self.inputs.dummy(bucket)
        logits = self.graphs.logits(self.graphs.run(inputs), inputs.logit_rows)
        self.sampling.logit_rows.add(logits, {})
        return logits

    @torch.inference_mode()
    def warm_up(self, show_progress: bool) -> int:
        """Compile every shape of the grid and leave no trace of it in the caches; returns the number of shapes.

        On Gaudi nothing runs while it is compiled, so what pads read is written anew, two shapes run for real, and so
        do the operators outside the graphs, each of which is compiled at its first run with a shape.
        """
        if self.mode.exact_shapes:
            self.finish_warm_up()
            return 0
        if self.mode.on_hpu:
            self.run_pads(self.grid.all_decode()[-1])  # makes what lives on, where it is known to be made
        with device.compile_only() as nothing_ran:
            count = warm_up(self.grid, self.run_pads, show_progress)
        if nothing_ran:
            self.caches.zero_reserved()
            validate(self.grid, self.run_pads)
            self._warm_up_eager()
        self.finish_warm_up()
        return count

    def _warm_up_eager(self) -> None:
        """Run what surrounds the graphs at every size that a step may need."""
        for buckets in (self.grid.all_prefill(), self.grid.all_decode()):
            for bucket in {(bucket.rows, bucket.batch): bucket for bucket in buckets}.values():
                self.run_pads(bucket)  # embedding and last norm, token ids of decodes, rows of logits
        self.sampling.warm_up(run_all=True)
        for rows in self.grid.decode_batches:
            self.inputs.remember(np.empty(0, np.int32), torch.zeros(rows, dtype=torch.int32, device=self.device))
        # A step's fresh blocks: those that its tokens fill, and one more of each request. A request has one slot.
        fresh = -(-self.max_num_tokens // self.caches.geometry.block_size) + self.max_num_seqs
        self.store.warm_up(self.caches.trash_row, max(fresh, self.grid.num_staging))

    @torch.inference_mode()
    def finish_warm_up(self) -> None:
        self.caches.zero_reserved()
        self.graphs.seal()

    # The step

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the step's forwards. Returns None when ``sample_tokens`` must follow."""
        if self._pending is not None:
            raise RuntimeError("execute_model is called again before sample_tokens")
        self._forget(scheduler_output.finished_req_ids)
        step = self.requests.apply(scheduler_output)
        plan = plan_checkpoints(step, self.caches.geometry.block_size, self.cached_groups)
        self.store.before_forward(plan)
        if step.is_empty:
            return EMPTY_MODEL_RUNNER_OUTPUT
        place_of: dict[str, int] = {}
        prompt_logprobs: dict[str, PromptScores] = {}
        for inputs in self.inputs.build(step, plan.crossed):
            hidden = self.graphs.run(inputs)
            if inputs.staged is not None:
                self.store.save(inputs.staged)
            self._score_prompts(step, inputs, hidden, prompt_logprobs)
            self._keep_logits(step, inputs, hidden, place_of)
        self.store.save(plan.save)
        self._pending = PendingStep(
            step=step,
            place_of=place_of,
            prompt_logprobs=prompt_logprobs,
        )
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample the tokens of the step that ``execute_model`` has issued."""
        pending, self._pending = self._pending, None
        if pending is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.sampling.collect(self.requests)
        step = pending.step
        sampled = None
        if pending.place_of:
            sampled, token_ids = self.sampling.sample(step, self.requests, pending.place_of, grammar_output)
            slot_of = dict(zip(step.req_ids, step.slots.tolist(), strict=True))
            self.inputs.remember(np.array([slot_of[req_id] for req_id in sampled.req_ids], np.int32), token_ids)
        self.requests.count_sampled(step)
        output = StepOutput(step, sampled, pending.prompt_logprobs)
        return output if self.is_async else output.get_output()

    def _forget(self, finished: set[str]) -> None:
        self.sampling.forget(finished)
        self.prompt_logprobs.forget(finished)

    def _keep_logits(
        self, step: StepRequests, inputs: ModelInputs, hidden: torch.Tensor, place_of: dict[str, int]
    ) -> None:
        """Logits of the bucket's sequences that sample; computed for all of them, since shapes are fixed."""
        places: dict[int, int] = {}
        for n, i in enumerate(inputs.members):
            if step.samples[i]:
                places[n] = place_of[step.req_ids[i]] = len(place_of)
        if places:
            self.sampling.logit_rows.add(self.graphs.logits(hidden, inputs.logit_rows), places)

    def _score_prompts(
        self,
        step: StepRequests,
        inputs: ModelInputs,
        hidden: torch.Tensor,
        finished: dict[str, PromptScores],
    ) -> None:
        """Prompt logprobs of the chunk's positions, for the requests that asked for them."""
        for n, i in enumerate(inputs.members):
            request = self.requests[step.req_ids[i]]
            num_logprobs = self.sampling.num_prompt_logprobs(request)
            if num_logprobs is None or step.num_computed[i] >= request.num_prompt or request.output:
                continue
            start, end = int(step.num_computed[i]), int(step.end[i])
            last = min(end, request.num_prompt - 1)  # the last position that has a next prompt token
            if last > start:
                query = inputs.attn.query
                size = min(SCORED_ROWS, query)
                for first in range(0, last - start, size):
                    offset = min(first, query - size)
                    count = min(size, last - start - offset)
                    row = n * query + offset
                    rows = torch.arange(row, row + size, dtype=torch.int32, device=self.device)
                    targets = np.zeros(size, np.int64)
                    targets[:count] = request.tokens[start + offset + 1 : start + offset + count + 1]
                    chunk = self.sampling.score_prompt(
                        self.graphs.prompt_logits(hidden, rows),
                        torch.from_numpy(targets).to(self.device, non_blocking=True),
                        num_logprobs,
                    )
                    self.prompt_logprobs.fill(request, start + offset, count, chunk, num_logprobs)
            if end >= request.num_prompt:
                finished[request.req_id] = self.prompt_logprobs.take(request, num_logprobs)


def _row_tiles(tiles: RowTiles | None, geometry: CacheGeometry) -> RowTiles | None:
    """``tiles``, without short ones where the chunks of a prompt do not fill the others."""
    if tiles is None or (geometry.gdn_groups and geometry.gdn_chunk == tiles.prefill):
        return tiles
    return replace(tiles, short_tile=0)
