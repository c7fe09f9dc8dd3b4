# SPDX-License-Identifier: Apache-2.0
"""What prefix caching does, counted where it is decided: checkpoints moved, and why a request did not hit.

Owns: the counters and the reasons. Standard library only; never vLLM, never the worker.

A step saves one checkpoint for every row that ends on a boundary and restores one for every admitted row that starts on
one: the same rule as the worker's plan, applied to the same scheduler output, so the counts are the worker's.

Ordering rule: ``record_step`` sees steps in scheduling order; a boundary counts as published from its step on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

PREFIX = "vllm_gaudi:"
SAVED = PREFIX + "checkpoints_saved"
RESTORED = PREFIX + "checkpoints_restored"
BYTES = PREFIX + "checkpoint_bytes_moved"
MISSES = PREFIX + "prefix_cache_misses"

SHORT = "shorter_than_block"
NO_CHECKPOINT = "no_checkpoint"
EVICTED = "checkpoint_evicted"
DEFERRED = "deferred_one_step"
REASONS = (SHORT, NO_CHECKPOINT, EVICTED, DEFERRED)


class CacheStats:
    """``block_size``: B tokens; ``checkpoint_bytes`` of one boundary on one rank; ``memory``: boundaries remembered."""

    def __init__(self, block_size: int, checkpoint_bytes: int, memory: int):
        self._block_size = block_size
        self._checkpoint_bytes = checkpoint_bytes
        self._memory = memory
        self._published: OrderedDict[Hashable, int] = OrderedDict()  # block hash -> step that published it
        self._arrival: dict[str, int] = {}
        self._step = 0
        self._counts: dict[str, int] = {}

    def arrived(self, req_id: str) -> None:
        """A request has joined the queue."""
        self._arrival[req_id] = self._step

    def left(self, req_id: str) -> None:
        """A request is gone, scheduled or not."""
        self._arrival.pop(req_id, None)

    def next_step(self) -> None:
        self._step += 1

    def saved(self) -> None:
        """A row of this step ends on a boundary."""
        self._add(SAVED, 1)
        self._add(BYTES, self._checkpoint_bytes)

    def published(self, boundary_hash: Hashable) -> None:
        """From this step on, the boundary whose last block has this hash can be hit."""
        self._published.pop(boundary_hash, None)
        self._published[boundary_hash] = self._step
        if len(self._published) > self._memory:
            self._published.popitem(last=False)

    def restored(self) -> None:
        """A row admitted in this step resumes from a checkpoint."""
        self._add(RESTORED, 1)
        self._add(BYTES, self._checkpoint_bytes)

    def admitted(
        self, req_id: str, num_prompt: int, hit: int, attention_hit: int, hashes: Sequence[Hashable]
    ) -> str | None:
        """A request is scheduled for the first time; returns the reason of its miss, None for a hit or a new prompt.

        ``num_prompt``, ``hit``, ``attention_hit`` tokens (``attention_hit``: how far the attention blocks alone would
        have carried it, 0 when no further than ``hit``); ``hashes``: of its full blocks, in order.
        """
        reason = self._reason(req_id, num_prompt, hit, attention_hit, hashes)
        self._arrival.pop(req_id, None)
        if reason is not None:
            self._add(f"{MISSES}:{reason}", 1)
        return reason

    def drain(self) -> dict[str, int]:
        """Counts since the last call, by metric name (misses by name and reason)."""
        counts, self._counts = self._counts, {}
        return counts

    def _reason(
        self, req_id: str, num_prompt: int, hit: int, attention_hit: int, hashes: Sequence[Hashable]
    ) -> str | None:
        reachable = (num_prompt - 1) // self._block_size
        if reachable == 0:
            return SHORT
        published = [i + 1 for i in range(reachable) if hashes[i : i + 1] and hashes[i] in self._published]
        if max(published, default=0) * self._block_size > hit:
            return EVICTED
        if attention_hit > hit:
            return NO_CHECKPOINT
        if hit and self._published.get(hashes[hit // self._block_size - 1], -1) > self._arrival.get(req_id, self._step):
            return DEFERRED
        return None

    def _add(self, name: str, count: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + count
