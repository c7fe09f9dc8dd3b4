# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with prefill chunks kept on the GDN chunk grid. Never torch, never the worker: another process.

Owns: where a prefill chunk may end (the GDN chunk form gives the same bits for every split whose pieces end on
multiples of the chunk C counted from token 0, and only for those), that no hash outlives a step that was not run, and
that the worker is told which blocks the step's checkpoints go to.
Never: the live ``cache_config.block_size``; B and C are read once from the KV cache config.

Ordering rule: checkpoints get their blocks when vLLM has scheduled the whole step, and before anybody sees its output.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_gaudi.request_checks import check_sampling_params, check_token_ids
from vllm_gaudi.v1.core.checkpoint_ledger import CheckpointLedger, GDNCheckpointManager, ScheduledRange
from vllm_gaudi.v1.core.sched.block_size import (
    attention_block_size,
    check_groups,
    checkpoint_bytes,
    gdn_chunk_size,
)
from vllm_gaudi.v1.core.sched.cache_stats import CacheStats
from vllm_gaudi.v1.parent_watch import end_with_parent

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler as SchedulerBase
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, StreamingUpdate
else:
    SchedulerBase = object

logger = init_logger("vllm.vllm_gaudi.scheduler")


def chunk_end_on_grid(start: int, end: int, prefill_end: int, chunk: int, max_tokens: int) -> int:
    """Where a prefill chunk of tokens ``start``..``end`` shall end so that the next one starts on the grid.

    The prompt's last chunk ends where it ends. ``max_tokens``: most tokens that any step could give this prompt; where
    that is less than ``chunk`` the grid is out of reach and the chunk only never runs over a grid point, since a
    boundary inside a chunk must be a whole number of GDN chunks from its start. The result may equal ``start``: the
    request waits for a step with more budget.
    """
    if start % chunk:
        return min(end, (start // chunk + 1) * chunk)
    if end >= prefill_end:
        return end
    on_grid = end // chunk * chunk
    if on_grid > start or chunk <= max_tokens:
        return max(on_grid, start)
    return min(end, (start // chunk + 1) * chunk)


class GDNSchedulerMixin(SchedulerBase):
    """Overrides of ``Scheduler``, which it goes before in the bases and which only a type checker takes for its own."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        end_with_parent()  # with several ranks the engine's process has a scheduler and no worker
        # vLLM reads the block size from the live cache config in every step, and runs platform hooks on that config
        # again once the engine is up; the schedulers keep a copy of their own.
        self.cache_config: CacheConfig = copy.copy(self.cache_config)
        self._caches_gdn_blocks: bool = self.need_mamba_block_aligned_split
        if self.has_mamba_layers:
            config = self.kv_cache_config
            block_size = check_groups(config) if self._caches_gdn_blocks else attention_block_size(config)
            self._gdn_chunk = gdn_chunk_size(block_size)
            self.cache_config.block_size = block_size
            self.need_mamba_block_aligned_split: bool = True
            self._warn_about_token_budget()
        self._ledger: CheckpointLedger | None = None
        self._deferred: set[str] = set()  # waiting requests that were deferred once already
        if self._caches_gdn_blocks:
            config, coordinator = self.kv_cache_config, self.kv_cache_manager.coordinator
            self._gdn_managers = [m for m in coordinator.single_type_managers if isinstance(m, GDNCheckpointManager)]
            self._ledger = CheckpointLedger(
                coordinator.block_pool,
                [manager.kv_cache_group_id for manager in self._gdn_managers],
                block_size,
                coordinator.retention_interval,
            )
            self._gdn_managers[0].attach_ledger(self._ledger)
            self._cache_stats = CacheStats(block_size, checkpoint_bytes(config), memory=8 * config.num_blocks)

    def add_request(self, request: Request) -> None:
        """vLLM's, for a request that no step raises over; any other one takes part in no step and ends with an error.

        The front end refuses those with a sentence. What gets here came as a ready-made ``EngineCoreRequest``, or with
        another model's vocabulary; an exception would end the engine for everybody.
        """
        known = self.requests.get(request.request_id)
        if known is not None and known.streaming_queue is None:
            logger.error("Request %s is dropped: another one with this id is running", request.request_id)
            return
        error = self._error_of(request)
        if error is None:
            super().add_request(request)
            return
        logger.error("Request %s ends with an error: %s", request.request_id, error)
        if known is None or known.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            super().add_request(request)
            self._block(known or request)
        self._fail(request.request_id)

    def _error_of(self, request: Request) -> VLLMValidationError | None:
        try:
            if request.sampling_params is not None:
                check_sampling_params(request.sampling_params)
            check_token_ids(request.prompt_token_ids or (), self.vllm_config.model_config.get_vocab_size())
        except VLLMValidationError as error:
            return error
        return None

    def _block(self, request: Request) -> None:
        """A waiting request that is not to be scheduled: as one whose grammar could not be compiled."""
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def _fail(self, *req_ids: str) -> None:
        """``update_from_output`` ends them with an error: vLLM's way for grammars that could not be compiled."""
        self.grammar_compile_error_reqs.update(req_ids)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's, and what the worker could not serve (``HPUModelRunnerOutput``) ends with an error, alone."""
        self._fail(*getattr(model_runner_output, "failed_req_ids", ()))
        return super().update_from_output(scheduler_output, model_runner_output)

    # Requests whose prompt comes in pieces (vLLM's streaming input)

    def _handle_stopped_request(self, request: Request) -> bool:
        """Between two pieces a session holds no slot and no block; vLLM would hold its blocks, whoever needs them.

        What it had goes to the prefix cache, where its next piece finds it up to the last boundary. A hybrid has no
        other way: its state is of the last token that was computed, which need not be the one that a piece follows.
        """
        if request.resumable:
            # Asynchronous scheduling may have one more token of it on its way, which nobody will see.
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.drop_stale_output = request.num_in_flight_tokens > 0
            request.num_output_placeholders = 0
            self.reset_preempted_req_ids.add(request.request_id)
            self._free_request_blocks(request)
        return super()._handle_stopped_request(request)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """vLLM's; the token that it drops takes the hash of a block that it filled with it."""
        del session.block_hashes[session.num_computed_tokens // self.hash_block_size :]
        super()._update_request_as_session(session, update)
        session.max_tokens = update.max_tokens
        session.num_computed_tokens = 0
        if session.num_tokens >= self.max_model_len:
            logger.error(
                "Request %s ends with an error: its pieces have %d tokens, and --max-model-len is %d",
                session.request_id,
                session.num_tokens,
                self.max_model_len,
            )
            self._block(session)
            self._fail(session.request_id)

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(request_ids, *args, **kwargs)
        self._deferred.difference_update(request.request_id for request in finished)
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's step, then the blocks of its checkpoints."""
        if self._ledger is None:
            return super().schedule(*args, **kwargs)
        self._ledger.new_step_starts()
        output = super().schedule(*args, **kwargs)
        self._place_checkpoints(self._ledger, output)
        for manager in self._gdn_managers:
            manager.release_sources()
        self._count(self._cache_stats, output)
        return output

    def _place_checkpoints(self, ledger: CheckpointLedger, output: SchedulerOutput) -> None:
        """Take blocks for the boundaries that the step crosses and put them into the block tables of ``output``."""
        ranges = []
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            ranges.append(
                ScheduledRange(request, request.num_computed_tokens - num_tokens, request.num_computed_tokens)
            )
        entries = ledger.allocate(ranges)
        if not entries:
            return
        groups = [manager.kv_cache_group_id for manager in self._gdn_managers]
        cached = output.scheduled_cached_reqs
        tables = {new.req_id: new.block_ids for new in output.scheduled_new_reqs}
        for i, req_id in enumerate(cached.req_ids):
            if req_id in entries:
                if cached.new_block_ids[i] is None:
                    cached.new_block_ids[i] = tuple([] for _ in self.kv_cache_config.kv_cache_groups)
                tables[req_id] = cached.new_block_ids[i]
        for req_id, boundaries in entries.items():
            for n, group in enumerate(groups):
                tables[req_id][group].extend(blocks[n] for blocks in boundaries)

    def _count(self, stats: CacheStats, output: SchedulerOutput) -> None:
        assert self._ledger is not None
        # Before what this step publishes: a miss is judged by what could have been hit.
        for new in output.scheduled_new_reqs:
            was_deferred = new.req_id in self._deferred
            self._deferred.discard(new.req_id)
            request = self.requests[new.req_id]
            if not request.skip_reading_prefix_cache:
                stats.admitted(
                    request.num_prompt_tokens,
                    new.num_computed_tokens,
                    request.shared_prefix_boundary,
                    request.block_hashes,
                    was_deferred,
                )
        cached = output.scheduled_cached_reqs
        starts = [new.num_computed_tokens for new in output.scheduled_new_reqs]
        rows = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        starts += [start for req_id, start in rows if req_id in cached.resumed_req_ids]
        for start in starts:
            if start > 0:
                stats.restored()
        taken, skipped = self._ledger.drain_counts()
        stats.saved(taken, skipped)
        for block_hash in self._ledger.drain_published():
            stats.published(block_hash)
        self._deferred.difference_update(cached.resumed_req_ids)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's stats with our counts in them (``v1.metrics`` says why in this field)."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._ledger is not None:
            stats.waiting_lora_adapters.update(self._cache_stats.drain())
        return stats

    def _warn_about_token_budget(self) -> None:
        """Tell the operator what the token budget costs."""
        budget = self.max_num_scheduled_tokens
        num_seqs = self.scheduler_config.max_num_seqs
        if budget - num_seqs < self._gdn_chunk:
            logger.warning(
                "--max-num-batched-tokens %d leaves less than one GDN chunk (%d tokens) beside %d decoding sequences: "
                "prefills may wait for decodes. Pass at least %d.",
                budget,
                self._gdn_chunk,
                num_seqs,
                self._gdn_chunk + num_seqs,
            )
        block_size, max_model_len = self.cache_config.block_size, self.max_model_len
        if self._caches_gdn_blocks and max_model_len <= block_size:
            logger.warning(
                "--max-model-len %d is not longer than a block (%d tokens): no prompt can hit the prefix cache",
                max_model_len,
                block_size,
            )

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Tokens of this step's chunk, cut to the GDN grid; 0 lets the request wait for the next step.

        vLLM's own split is not called: it ends chunks on block boundaries, because only there its states can be kept.
        """
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        if self._should_defer(request, start):
            return 0
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return num_new_tokens
        max_tokens = self.max_num_scheduled_tokens
        threshold = self.scheduler_config.long_prefill_token_threshold
        if threshold > 0:
            max_tokens = min(max_tokens, threshold)
        return chunk_end_on_grid(start, start + num_new_tokens, prefill_end, self._gdn_chunk, max_tokens) - start

    def _should_defer(self, request: Request, hit: int) -> bool:
        """Whether a request waits one step, once, for the checkpoint that a request of this step will leave."""
        if self._ledger is None or request.status == RequestStatus.RUNNING or request.skip_reading_prefix_cache:
            return False
        if request.request_id in self._deferred or not self._ledger.will_be_cached(request, hit):
            return False
        self._deferred.add(request.request_id)
        return True

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Take back the hashes of blocks that the victim was scheduled to fill and now never will.

        vLLM publishes a block's hash when it schedules the step that fills it. Under priority scheduling the victim may
        have been scheduled in this very step; its row is dropped, but the hashes would stay. Blocks up to
        ``num_computed_tokens`` are filled by steps that do run.
        """
        stale = {
            block.block_id
            for manager in self.kv_cache_manager.coordinator.single_type_managers
            for i, block in enumerate(manager.req_to_blocks.get(request.request_id, ()))
            if (i + 1) * manager.block_size > request.num_computed_tokens and block.block_hash is not None
        }
        if stale:
            self.kv_cache_manager.evict_blocks(stale)
        super()._preempt_request(request, *args, **kwargs)


class HPUScheduler(GDNSchedulerMixin, Scheduler):
    """Synchronous scheduler."""
