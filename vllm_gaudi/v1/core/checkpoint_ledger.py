# SPDX-License-Identifier: Apache-2.0
"""Which boundaries have a checkpoint, and in which blocks: the ledger, and the block manager of a GDN group.

Owns: the blocks of checkpoints: when they are taken, published, given up, and in which order they are evicted.
Never: bytes, slots, the size of the pool, or the search for a hit, which is vLLM's own.

A running request holds no GDN block: its state is in its slot. A block is taken for a boundary that a step crosses, in
all GDN groups or in none, after every other request of the scheduling step has got its blocks; so a checkpoint never
takes a block that a request of the step needs, and under pressure it is skipped. Its blocks go to the evictable end of
vLLM's free queue in the same step: a later owner writes to them in a later step, after the save.

A boundary is published (gets its hash) at the end of the step that schedules the step which writes it, so a hit on it
belongs to a later step. Asynchronous scheduling may not know the boundary's last token yet; then it is published when
that token has arrived, and given up when the request ends or is preempted before.

Ordering rule: in each pass ``new_step_starts``, vLLM's scheduling, ``allocate``, release of the sources of hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_gaudi.v1.core.retention import is_kept, prompt_ends

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

UNRETAINED_SHARE = 1 / 32
"""Of the pool's blocks, for checkpoints that retention does not keep: what they cost is that share of the pool."""


@dataclass(frozen=True)
class GDNCheckpointSpec(MambaSpec):
    """vLLM's Mamba spec under a name that the registry maps to our manager."""

    @classmethod
    def of(cls, spec: MambaSpec) -> GDNCheckpointSpec:
        return cls(**{field.name: getattr(spec, field.name) for field in fields(spec) if field.init})

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes that one request may hold per layer: the block that it resumes from, during the step that admits it."""
        return self.page_size_bytes


@dataclass(eq=False)
class Checkpoint:
    """One boundary's blocks, one per GDN group.

    ``boundary``: in blocks; ``key``: its hash once it is published; ``is_shared``: another request has come by.
    """

    blocks: tuple[KVCacheBlock, ...]
    boundary: int
    key: BlockHash | None = None
    is_shared: bool = False


@dataclass(frozen=True)
class ScheduledRange:
    """A scheduled request goes from ``start`` to ``end`` tokens in this step."""

    request: Request
    start: int
    end: int


class CheckpointLedger:
    """All checkpoints of an engine.

    ``pool``: vLLM's; ``group_ids``: KV cache groups of the GDN layers; ``block_size``: B tokens; ``retention_interval``
    as vLLM's flag: None keeps every boundary, N > 0 tokens every N-th, 0 none but these, which are always kept: the
    prompt's last boundary (twice where the prompt ends on one: a repeat must compute its last token), the boundary of a
    prefix that another prompt shares, and the last one that the request has reached. The others are extra: they use
    blocks that hold nothing, and in a full pool ``UNRETAINED_SHARE`` of it, where the next takes the place of the
    oldest, so that a shared prefix is found by the second prompt that has it when that comes soon.
    """

    def __init__(self, pool: BlockPool, group_ids: Sequence[int], block_size: int, retention_interval: int | None):
        self._pool = pool
        self._group_ids = tuple(group_ids)
        self._block_size = block_size
        self._retention = retention_interval
        self._max_unretained = int(UNRETAINED_SHARE * pool.num_gpu_blocks) // len(self._group_ids)
        self._unretained: dict[Checkpoint, None] = {}  # oldest first
        self._by_key: dict[BlockHash, Checkpoint] = {}
        self._by_block: dict[int, Checkpoint] = {}
        self._pending: dict[str, list[Checkpoint]] = {}  # per request, taken and not published yet
        self._resume_points: dict[
            str, dict[int, Checkpoint]
        ] = {}  # per request, the boundaries that its next turn may want
        self._last_reached: dict[
            str, Checkpoint
        ] = {}  # per request, what is kept only until it has reached the next one
        self._announced: set[BlockHash] = set()
        self._published: list[BlockHash] = []
        self._num_taken = 0
        self._num_skipped = 0

    @property
    def no_blocks(self) -> tuple[int, ...]:
        """Block table entries of a boundary without a checkpoint: the null block in every GDN group."""
        return (0,) * len(self._group_ids)

    # A scheduling step

    def new_step_starts(self) -> None:
        """Nothing is announced yet."""
        self._announced.clear()

    def announce(self, request: Request, num_tokens: int, cached: int) -> None:
        """``request`` will stand at ``num_tokens`` after this step; ``cached`` blocks were there before it."""
        self._announced.update(request.block_hashes[cached : num_tokens // self._block_size])

    def will_be_cached(self, request: Request, hit: int) -> bool:
        """Whether a request scheduled in this step will leave a checkpoint that reaches further than ``hit`` tokens."""
        if not self._announced:
            return False
        reachable = (request.num_tokens - 1) // self._block_size
        return not self._announced.isdisjoint(request.block_hashes[hit // self._block_size : reachable])

    def allocate(self, ranges: Iterable[ScheduledRange]) -> dict[str, list[tuple[int, ...]]]:
        """Blocks for the boundaries that the step crosses, what must be kept first.

        Returns, per request that crosses any, one tuple of G block ids per boundary in ascending order; all 0 where no
        checkpoint is taken: it is cached already, not to be kept, or the pool has no block to give.
        """
        entries: dict[str, list[tuple[int, ...]]] = {}
        wanted: list[tuple[bool, Request, int, int]] = []
        for scheduled in ranges:
            request, first = scheduled.request, scheduled.start // self._block_size + 1
            last = scheduled.end // self._block_size
            if last < first:
                continue
            entries[request.request_id] = [self.no_blocks] * (last - first + 1)
            for boundary in range(last, first - 1, -1):
                keep = boundary == last or self._is_kept(request, boundary)
                wanted.append((not keep, request, boundary, first))
        wanted.sort(key=lambda item: item[0])
        taken: list[Checkpoint] = []
        for is_unretained, request, boundary, first in wanted:
            key = self._key(request, boundary)
            known = self._lookup(key)
            if known is None:
                if not is_unretained and key is not None:
                    self._demote_previous(request, boundary)
                if not self._has_room(is_unretained):
                    self._num_skipped += not is_unretained
                    continue
                known = Checkpoint(tuple(self._pool.get_new_blocks(len(self._group_ids))), boundary)
                taken.append(known)
                self._num_taken += 1
                entries[request.request_id][boundary - first] = tuple(block.block_id for block in known.blocks)
                if key is None:
                    self._pending.setdefault(request.request_id, []).append(known)
                    continue
                self._publish(known, request, key)
                if is_unretained:
                    self._unretained[known] = None
            else:
                self._mark_shared(known)
            if not is_unretained:
                self._record_kept(request, known)
        # Shallow ones first: of two checkpoints of one step the deeper one is evicted later.
        for checkpoint in reversed(taken):
            self._by_block.update((block.block_id, checkpoint) for block in checkpoint.blocks)
            self._pool.unpin_blocks(checkpoint.blocks, self._reused)
        return entries

    # Between steps

    def publish_ready(self, request: Request, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens of ``request`` are known: publish what waited for one of them."""
        pending = self._pending.get(request.request_id)
        if not pending:
            return
        ready = min(num_tokens // self._block_size, len(request.block_hashes))
        waiting = [checkpoint for checkpoint in pending if checkpoint.boundary > ready]
        for checkpoint in pending:
            if checkpoint.boundary > ready:
                continue
            key = self._key(request, checkpoint.boundary)
            known = self._lookup(key)
            if known is not None:  # another request has reached the same boundary meanwhile
                self._invalidate(checkpoint)
                self._mark_shared(known)
                checkpoint = known
            elif self._is_alive(checkpoint):
                self._publish(checkpoint, request, key)
            else:  # evicted before it could be published
                continue
            self._record_kept(request, checkpoint)
        self._pending[request.request_id] = waiting

    def on_resume(self, request_id: str, source: KVCacheBlock) -> None:
        """``request_id`` is admitted and resumes from the checkpoint that ``source`` is a block of."""
        checkpoint = self._by_block.get(source.block_id)
        if checkpoint is not None:
            self._mark_shared(checkpoint)
            self._resume_points[request_id] = {checkpoint.boundary: checkpoint}

    def on_free(self, request_id: str) -> None:
        """``request_id`` has ended or is preempted: what waited for its tokens is lost, its ends are as new."""
        for checkpoint in self._pending.pop(request_id, ()):
            self._invalidate(checkpoint)
        self._last_reached.pop(request_id, None)
        for _, checkpoint in sorted(self._resume_points.pop(request_id, {}).items()):
            self._touch(checkpoint)

    def drain_published(self) -> list[BlockHash]:
        """Hashes of the boundaries published since the last call."""
        published, self._published = self._published, []
        return published

    def drain_counts(self) -> tuple[int, int]:
        """Checkpoints taken, and skipped for want of a block, since the last call."""
        counts = self._num_taken, self._num_skipped
        self._num_taken = self._num_skipped = 0
        return counts

    # One checkpoint

    def _is_kept(self, request: Request, boundary: int) -> bool:
        return is_kept(
            boundary, self._block_size, self._retention, request.num_prompt_tokens, request.shared_prefix_boundary
        )

    def _key(self, request: Request, boundary: int) -> BlockHash | None:
        """The boundary's hash, None while its last token is not known."""
        return request.block_hashes[boundary - 1] if boundary <= len(request.block_hashes) else None

    def _lookup(self, key: BlockHash | None) -> Checkpoint | None:
        """The checkpoint published under ``key``; none where somebody has taken the hash of one of its blocks away."""
        checkpoint = self._by_key.get(key)
        if checkpoint is None or all(block.block_hash is not None for block in checkpoint.blocks):
            return checkpoint
        if not self._invalidate(checkpoint):
            self._forget(checkpoint)
        return None

    def _has_room(self, is_unretained: bool) -> bool:
        """Whether the pool gives a block for every group. An extra one may have to take the place of the oldest."""
        if self._pool.get_num_free_blocks() < len(self._group_ids):
            return False
        if not is_unretained or self._has_empty_blocks() or len(self._unretained) < self._max_unretained:
            return True
        if len(self._unretained) > self._max_unretained:  # there was more room once
            self._drop_oldest_unretained()
        return self._max_unretained > 0 and self._drop_oldest_unretained()

    def _has_empty_blocks(self) -> bool:
        """Whether the next blocks that the pool hands out, one for every group, hold nothing."""
        if self._pool.get_num_free_blocks() < len(self._group_ids):
            return False
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in self._group_ids:
            if block is None or block.block_hash is not None or block.block_id in self._by_block:
                return False
            block = block.next_free_block
        return True

    def _drop_oldest_unretained(self) -> bool:
        """Whether there was one whose blocks are free now."""
        oldest = next(iter(self._unretained), None)
        return oldest is not None and self._invalidate(oldest)

    def _mark_shared(self, checkpoint: Checkpoint) -> None:
        """Another request has come by: from here on it goes when it is not used any more."""
        checkpoint.is_shared = True
        self._unretained.pop(checkpoint, None)

    def _publish(self, checkpoint: Checkpoint, request: Request, key: BlockHash) -> None:
        boundary = checkpoint.boundary
        for group, block in zip(self._group_ids, checkpoint.blocks, strict=True):
            self._pool.cache_full_blocks(
                request=request,
                blocks=[self._pool.null_block] * (boundary - 1) + [block],
                num_cached_blocks=boundary - 1,
                num_full_blocks=boundary,
                block_size=self._block_size,
                kv_cache_group_id=group,
            )
        checkpoint.key = key
        self._by_key[key] = checkpoint
        self._published.append(key)

    def _demote_previous(self, request: Request, boundary: int) -> None:
        """``request`` reaches ``boundary``: what was kept only as its last one is an extra one from here on."""
        previous = self._last_reached.get(request.request_id)
        if previous is None or previous.boundary >= boundary:
            return
        del self._last_reached[request.request_id]
        if not previous.is_shared and self._is_alive(previous):
            self._unretained[previous] = None
            if len(self._unretained) > self._max_unretained and not self._has_empty_blocks():
                self._drop_oldest_unretained()

    def _record_kept(self, request: Request, checkpoint: Checkpoint) -> None:
        """``request`` has a checkpoint that is to be kept: at its last boundary so far, or at an end of its prompt."""
        boundary = checkpoint.boundary
        self._unretained.pop(checkpoint, None)
        resume_points = self._resume_points.setdefault(request.request_id, {})
        prompt_boundaries = prompt_ends(request.num_prompt_tokens, self._block_size)
        is_last = boundary > max(resume_points, default=0)
        if is_last:
            for passed in [passed for passed in resume_points if passed not in prompt_boundaries]:
                del resume_points[passed]
            self._demote_previous(request, boundary)
            if not self._is_kept(request, boundary):
                self._last_reached[request.request_id] = checkpoint
        if is_last or boundary in prompt_boundaries:
            resume_points[boundary] = checkpoint

    def _is_alive(self, checkpoint: Checkpoint) -> bool:
        return self._by_block.get(checkpoint.blocks[0].block_id) is checkpoint

    @staticmethod
    def _in_free_queue(checkpoint: Checkpoint) -> list[KVCacheBlock]:
        """Its blocks but those in use and those that the pool is just handing out."""
        return [block for block in checkpoint.blocks if block.ref_cnt == 0 and block.prev_free_block is not None]

    def _is_free(self, checkpoint: Checkpoint) -> bool:
        return len(self._in_free_queue(checkpoint)) == len(checkpoint.blocks)

    def _touch(self, checkpoint: Checkpoint) -> None:
        """As recently used as anything; nothing for one that is evicted, or in use and so renewed when it is freed."""
        if self._is_alive(checkpoint) and self._is_free(checkpoint):
            self._requeue(checkpoint.blocks)

    def _invalidate(self, checkpoint: Checkpoint) -> bool:
        """Its blocks hold nothing from here on and are the next to be handed out; False for one that is in use."""
        if not self._is_alive(checkpoint) or not self._is_free(checkpoint):
            return False
        self._discard(checkpoint)
        return True

    def _reused(self, block: KVCacheBlock) -> None:
        """The pool hands ``block`` out: the rest of its checkpoint is of no use and goes next."""
        checkpoint = self._by_block.get(block.block_id)
        if checkpoint is not None:
            self._discard(checkpoint)

    def _discard(self, checkpoint: Checkpoint) -> None:
        """Forget it; those of its blocks that are in the free queue lose their hashes and move to its front."""
        self._forget(checkpoint)
        blocks = self._in_free_queue(checkpoint)
        self._pool.evict_blocks({block.block_id for block in blocks})
        self._requeue(blocks)

    def _requeue(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Out of the free queue and in again: at its end with a hash, at its front without."""
        self._pool.touch(blocks)
        self._pool.free_blocks(blocks)

    def _forget(self, checkpoint: Checkpoint) -> None:
        self._unretained.pop(checkpoint, None)
        for block in checkpoint.blocks:
            del self._by_block[block.block_id]
        if checkpoint.key is not None:
            del self._by_key[checkpoint.key]


class GDNCheckpointManager(MambaManager):
    """The block manager of one GDN group: no block for a running request, hits through vLLM's own search.

    ``req_to_blocks`` is empty but for the source of a hit, from the admission to the end of its step.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ledger: CheckpointLedger | None = None
        self._sources: dict[str, int] = {}

    @classmethod
    def register(cls) -> None:
        """Map ``GDNCheckpointSpec`` to this manager; vLLM tolerates the same registration again."""
        KVCacheSpecRegistry.register(GDNCheckpointSpec, cls, uniform_type_base_spec=MambaSpec)

    def attach_ledger(self, ledger: CheckpointLedger) -> None:
        """Report what requests do to ``ledger``; one manager does for all GDN groups."""
        self._ledger = ledger

    def release_sources(self) -> None:
        """The step is scheduled: blocks that its admitted requests resume from are evictable again."""
        for request_id, index in self._sources.items():
            blocks = self.req_to_blocks[request_id]
            source, blocks[index] = blocks[index], self._null_block
            self.block_pool.free_blocks([source])
        self._sources.clear()

    # What vLLM asks

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> int:
        """Only what a hit takes out of the free queue until the end of the step."""
        return self._get_num_evictable_blocks(new_computed_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        return []

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> None:
        super().add_local_computed_blocks(request_id, new_computed_blocks, *args, **kwargs)
        blocks = self.req_to_blocks[request_id]
        if blocks and not blocks[-1].is_null:
            self._sources[request_id] = len(blocks) - 1
            if self._ledger is not None:
                self._ledger.on_resume(request_id, blocks[-1])

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        """There are none."""

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        cached = self.num_cached_block.get(request.request_id, 0)
        self.num_cached_block[request.request_id] = max(cached, num_tokens // self.block_size)
        if self._ledger is not None:
            self._ledger.publish_ready(request, num_tokens)
            self._ledger.announce(request, num_tokens, cached)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._sources.pop(request_id, None)
        if self._ledger is not None:
            self._ledger.on_free(request_id)
        return super().pop_blocks_for_free(request_id)
