# SPDX-License-Identifier: Apache-2.0
"""Watches a scheduler and its block pool, and says which boundaries must be hittable and which blocks may be in use.

Owns: an account of its own: what each step crossed, what retention must keep of it, what the pool has handed to
somebody else since. Never: the ledger's records; it is the one under test.

Ordering rule: made right after the engine; ``check`` between engine steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.request import RequestStatus


class CheckpointWitness:
    """``scheduler``: one of ours, prefix caching on; its methods are wrapped."""

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._managers = scheduler._gdn_managers
        self._groups = {manager.kv_cache_group_id for manager in self._managers}
        self._block_size = scheduler._ledger._block_size
        self._retention = scheduler.kv_cache_manager.coordinator.retention_interval
        self._must: set[Any] = set()  # hashes that are to be kept and were not evicted
        self._reached: dict[str, tuple[Any, int]] = {}  # request, the last boundary that it was given blocks for
        self._given: dict[int, tuple[str, int]] = {}  # block id -> request and boundary it was given for
        self._is_handing_out = False
        self.num_intermediate = 0
        self.num_skipped = 0
        self._wrap()

    # What must hold

    def check(self) -> None:
        """Raises AssertionError on a lost boundary, a part of a checkpoint, a pinned block or a wrong free count."""
        cached = self._cached()
        for block_hash, groups in cached.items():
            assert groups == dict.fromkeys(self._groups, 1), f"{block_hash!r} is cached in GDN groups {groups}"
        lost = self._must - set(cached)
        assert not lost, f"{len(lost)} boundaries that are to be kept cannot be hit and were not evicted"
        for request, boundary in self._reached.values():
            settled = request.num_computed_tokens - request.num_output_placeholders
            ended = request.is_finished() and request.status != RequestStatus.FINISHED_ABORTED
            if boundary * self._block_size > settled or not (ended or request.status == RequestStatus.RUNNING):
                continue
            if boundary <= len(request.block_hashes):
                key = request.block_hashes[boundary - 1]
                assert key in cached, f"{request.request_id} has lost its last boundary {boundary}"
        self._check_blocks()

    def _check_blocks(self) -> None:
        coordinator = self._scheduler.kv_cache_manager.coordinator
        used: Counter[int] = Counter()
        for manager in coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                ids = [block.block_id for block in blocks if not block.is_null]
                assert not ids or manager.kv_cache_group_id not in self._groups, "a request holds a GDN block"
                used.update(ids)
        for block in self._pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == used[block.block_id], f"{block} is in use {used[block.block_id]} times"
        assert self._pool.get_num_free_blocks() == self._pool.num_gpu_blocks - 1 - len(used)

    def _cached(self) -> dict[Any, dict[int, int]]:
        """GDN groups that hold each hash, and in how many blocks."""
        found: dict[Any, dict[int, int]] = {}
        for key, blocks in self._pool.cached_block_hash_to_block._cache.items():
            if get_group_id(key) in self._groups:
                count = len(blocks) if isinstance(blocks, dict) else 1
                found.setdefault(get_block_hash(key), {})[get_group_id(key)] = count
        return found

    # What happens

    def _wrap(self) -> None:
        pool, ledger = self._pool, self._scheduler._ledger
        get_new_blocks, evict, reset = pool.get_new_blocks, pool._maybe_evict_cached_block, pool.reset_prefix_cache
        take = ledger.allocate

        def handed_out(num_blocks: int) -> Any:
            self._is_handing_out = True
            try:
                blocks = get_new_blocks(num_blocks)
            finally:
                self._is_handing_out = False
            for block in blocks:  # also a checkpoint's that has no hash yet
                name, boundary = self._given.pop(block.block_id, ("", 0))
                if name in self._reached and self._reached[name][1] == boundary:
                    del self._reached[name]
            return blocks

        def evicted(block: Any) -> bool:
            key = block.block_hash
            if key is not None and self._is_handing_out and get_group_id(key) in self._groups:
                self._evicted(get_block_hash(key))
            return evict(block)

        def was_reset() -> bool:
            done = reset()
            if done:
                self._must.clear()
                self._reached.clear()
            return done

        def taken(ranges: Any) -> Any:
            ranges = list(ranges)
            free, cached = pool.get_num_free_blocks(), set(self._cached())
            entries = take(ranges)
            self._account(ranges, entries, free, cached)
            return entries

        pool.get_new_blocks, pool._maybe_evict_cached_block = handed_out, evicted
        pool.reset_prefix_cache, ledger.allocate = was_reset, taken

    def _account(self, ranges: list[Any], entries: dict[str, Any], free: int, cached: set[Any]) -> None:
        count = len(self._groups)
        num_taken = sum(any(blocks) for boundaries in entries.values() for blocks in boundaries)
        now = self._cached()
        for crossing in ranges:
            request = crossing.request
            first, last = crossing.start // self._block_size + 1, crossing.end // self._block_size
            given = entries.get(request.request_id, [])
            assert len(given) == max(0, last - first + 1)
            for boundary, blocks in zip(range(first, last + 1), given, strict=True):
                assert all(blocks) or not any(blocks), "a checkpoint in some groups only"
                must = self._is_for_good(request, boundary)
                if boundary != last and not must:
                    continue
                known = boundary <= len(request.block_hashes)
                key = request.block_hashes[boundary - 1] if known else None
                if not any(blocks) and key not in now:
                    assert key in cached or free - count * num_taken < count, "skipped with blocks to spare"
                    self.num_skipped += 1
                    continue
                if known and must and key in now:
                    self.num_intermediate += 1
                    self._must.add(key)
                if boundary == last:
                    self._reached[request.request_id] = (request, boundary)
                    self._given.update((block, (request.request_id, boundary)) for block in blocks if block)

    def _evicted(self, block_hash: Any) -> None:
        self._must.discard(block_hash)
        for name, (request, boundary) in list(self._reached.items()):
            if request.block_hashes[boundary - 1 : boundary] == [block_hash]:
                del self._reached[name]

    def _is_for_good(self, request: Any, boundary: int) -> bool:
        tokens = boundary * self._block_size
        if self._retention is None or (self._retention and tokens % self._retention == 0):
            return True
        prompt = request.num_prompt_tokens
        return (
            tokens <= prompt <= tokens + self._block_size
            or tokens <= request.shared_prefix_boundary < tokens + self._block_size
        )
