# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with prefill chunks kept on the GDN chunk grid. Never torch, never the worker: another process.

Owns: where a prefill chunk may end (the GDN chunk form gives the same bits for every split whose pieces end on
multiples of the chunk C counted from token 0, and only for those), and that no hash outlives a step that was not run.
Never: the live ``cache_config.block_size``; B and C are read once from the KV cache config.

Ordering rule: vLLM's own split runs first, ours only shortens its result.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_gaudi.v1.core.gdn_checkpoint import GDNCheckpointManager
from vllm_gaudi.v1.core.sched.block_size import (
    attention_block_size,
    check_groups,
    checkpoint_bytes,
    gdn_chunk_size,
)
from vllm_gaudi.v1.core.sched.cache_stats import CacheStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm.vllm_gaudi.scheduler")

_SPLIT_PARAMETERS = (
    "self",
    "request",
    "num_new_tokens",
    "num_new_local_computed_tokens",
    "num_external_computed_tokens",
)


def _check_split_signature() -> None:
    found = tuple(inspect.signature(Scheduler._mamba_block_aligned_split).parameters)
    if found != _SPLIT_PARAMETERS:
        raise ImportError(
            f"vLLM's Scheduler._mamba_block_aligned_split takes {found}, the plugin is written for "
            f"{_SPLIT_PARAMETERS}; install vllm==0.30.0 or update vllm_gaudi"
        )


_check_split_signature()


def chunk_end_on_grid(start: int, end: int, prefill_end: int, chunk: int, max_tokens: int) -> int:
    """Where a prefill chunk of tokens ``start``..``end`` shall end so that the next one starts on the grid.

    The prompt's last chunk ends where it ends. ``max_tokens``: most tokens that any step could give this prompt; where
    that is less than ``chunk`` the grid is out of reach and the chunk only never runs over a grid point. The result may
    equal ``start``: the request waits for a step with more budget.
    """
    if end >= prefill_end:
        return end
    on_grid = end // chunk * chunk
    if on_grid > start or chunk <= max_tokens:
        return max(on_grid, start)
    return min(end, (start // chunk + 1) * chunk)


def split_before_last_boundary(start: int, end: int, num_prompt: int, block_size: int) -> int:
    """Where a chunk ``start``..``end`` shall end so that a repeat of the whole prompt can hit.

    A request must compute at least its last token, so a prompt of exactly k*B tokens hits (k-1)*B at most; a chunk that
    ran over that boundary would leave no checkpoint there.
    """
    stop = (num_prompt - 1) // block_size * block_size
    return stop if start < stop < end else end


class GDNGridMixin:
    """Overrides of ``Scheduler``; goes before it in the bases."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # vLLM reads the block size from the live cache config in every step, and runs platform hooks on that config
        # again once the engine is up; the schedulers keep a copy of their own.
        self.cache_config = copy.copy(self.cache_config)  # type: ignore[has-type]
        self._caches_gdn_blocks: bool = self.need_mamba_block_aligned_split  # type: ignore[has-type]
        if self.has_mamba_layers:  # type: ignore[attr-defined]
            config = self.kv_cache_config  # type: ignore[attr-defined]
            block_size = check_groups(config) if self._caches_gdn_blocks else attention_block_size(config)
            self._gdn_chunk = gdn_chunk_size(block_size)
            self.cache_config.block_size = block_size
            self.need_mamba_block_aligned_split = True
            self._say_budget(block_size if self._caches_gdn_blocks else self._gdn_chunk)
        self._cache_stats: CacheStats | None = None
        if self._caches_gdn_blocks:
            config = self.kv_cache_config  # type: ignore[attr-defined]
            self._cache_stats = CacheStats(
                self.cache_config.block_size, checkpoint_bytes(config), memory=8 * config.num_blocks
            )
            # All GDN groups publish the same boundaries; the first one speaks for them.
            managers = self.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
            self._gdn_manager = next(m for m in managers if isinstance(m, GDNCheckpointManager))

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if self._cache_stats is not None:
            self._cache_stats.arrived(request.request_id)

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]
        if self._cache_stats is not None:
            for request in finished:
                self._cache_stats.left(request.request_id)
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's step, then counted."""
        if self._cache_stats is not None:
            self._note_published(self._cache_stats)  # by the step before, when its tokens arrived
            self._cache_stats.next_step()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._cache_stats is not None:
            self._count(self._cache_stats, output)
            self._note_published(self._cache_stats)
        return output

    def _note_published(self, stats: CacheStats) -> None:
        for block_hash in self._gdn_manager.drain_published():
            stats.published(block_hash)

    def _count(self, stats: CacheStats, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]  # type: ignore[attr-defined]
            if request.skip_reading_prefix_cache:
                stats.left(new.req_id)
                continue
            stats.admitted(
                new.req_id,
                request.num_prompt_tokens,
                new.num_computed_tokens,
                request.shared_prefix_boundary,
                request.block_hashes,
            )
        cached = output.scheduled_cached_reqs
        starts = [new.num_computed_tokens for new in output.scheduled_new_reqs]
        rows = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        starts += [start for req_id, start in rows if req_id in cached.resumed_req_ids]
        for start in starts:
            if start > 0:
                stats.restored()
        for req_id in output.num_scheduled_tokens:
            request = self.requests[req_id]  # type: ignore[attr-defined]
            if request.num_computed_tokens % self.cache_config.block_size == 0:
                stats.saved()

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's stats with our counts in them (``v1.metrics`` says why in this field)."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None and self._cache_stats is not None:
            stats.waiting_lora_adapters.update(self._cache_stats.drain())
        return stats

    def _say_budget(self, unit: int) -> None:
        """Tell the operator what the token budget costs. ``unit``: tokens that a prefill chunk is a multiple of."""
        budget = self.max_num_scheduled_tokens  # type: ignore[attr-defined]
        num_seqs = self.scheduler_config.max_num_seqs  # type: ignore[attr-defined]
        if budget - num_seqs < self._gdn_chunk:
            logger.warning(
                "--max-num-batched-tokens %d leaves less than one GDN chunk (%d tokens) beside %d decoding sequences: "
                "prefills may wait for decodes. Pass at least %d.",
                budget,
                self._gdn_chunk,
                num_seqs,
                self._gdn_chunk + num_seqs,
            )
        if not self._caches_gdn_blocks:
            return
        used = budget // unit * unit
        if used == 0:
            logger.warning(
                "--max-num-batched-tokens %d is less than a block (%d tokens): a block takes several steps. Pass %d.",
                budget,
                unit,
                unit,
            )
        elif used < budget:
            logger.info(
                "Prefill chunks are multiples of B = %d tokens: %d of --max-num-batched-tokens %d are used (%.0f %% "
                "lost). Pass %d or %d.",
                unit,
                used,
                budget,
                100 * (budget - used) / budget,
                used,
                used + unit,
            )
        max_model_len = self.max_model_len  # type: ignore[attr-defined]
        if max_model_len <= unit:
            logger.warning(
                "--max-model-len %d is not longer than a block (%d tokens): no prompt can hit the prefix cache",
                max_model_len,
                unit,
            )

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Tokens of this step's chunk: vLLM's choice, shortened to the GDN grid and to the last usable boundary."""
        if self._caches_gdn_blocks:
            num_new_tokens = super()._mamba_block_aligned_split(  # type: ignore[misc]
                request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
            )
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return num_new_tokens
        end = start + num_new_tokens
        if self._caches_gdn_blocks:
            end = split_before_last_boundary(start, end, request.num_prompt_tokens, self.cache_config.block_size)
        max_tokens = self.max_num_scheduled_tokens  # type: ignore[attr-defined]
        threshold = self.scheduler_config.long_prefill_token_threshold  # type: ignore[attr-defined]
        if threshold > 0:
            max_tokens = min(max_tokens, threshold)
        return chunk_end_on_grid(start, end, prefill_end, self._gdn_chunk, max_tokens) - start

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Take back the hashes of blocks that the victim was scheduled to fill and now never will.

        vLLM publishes a block's hash when it schedules the step that fills it. Under priority scheduling the victim may
        have been scheduled in this very pass; its row is dropped, but the hashes would stay. Blocks up to
        ``num_computed_tokens`` are filled by steps that do run.
        """
        stale = {
            block.block_id
            for manager in self.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
            for i, block in enumerate(manager.req_to_blocks.get(request.request_id, ()))
            if (i + 1) * manager.block_size > request.num_computed_tokens and block.block_hash is not None
        }
        if stale:
            self.kv_cache_manager.evict_blocks(stale)  # type: ignore[attr-defined]
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]


class HPUScheduler(GDNGridMixin, Scheduler):
    """Synchronous scheduler."""
