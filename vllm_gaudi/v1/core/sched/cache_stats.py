# SPDX-License-Identifier: Apache-2.0
"""What prefix caching does, counted where it is decided: checkpoints moved, and why a request did not hit.

Owns: the counters and the reasons. Standard library only; never vLLM, never the worker.

Ordering rule: a step's admissions are counted before what that step publishes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

PREFIX = "vllm_gaudi:"
SAVED = PREFIX + "checkpoints_saved"
SKIPPED = PREFIX + "checkpoints_skipped"
RESTORED = PREFIX + "checkpoints_restored"
BYTES = PREFIX + "checkpoint_bytes_moved"
MISSES = PREFIX + "prefix_cache_misses"
REACHABLE = PREFIX + "prefix_cache_reachable_tokens"
COUNTERS = {
    SAVED: "GDN checkpoints saved, one per cached boundary of a request.",
    SKIPPED: "GDN checkpoints not saved because no block was free for them.",
    RESTORED: "GDN checkpoints restored, one per admitted request that resumed from one.",
    BYTES: "Bytes moved between GDN slots and blocks, on one rank.",
    REACHABLE: "Prompt tokens that requests had reused, had every boundary that was ever kept still been there.",
    MISSES: "Requests that could have hit the prefix cache and did not, by reason.",
}

SHORT = "shorter_than_block"
NO_CHECKPOINT = "no_checkpoint"
EVICTED = "checkpoint_evicted"
DEFERRED = "deferred_one_step"
REASONS = {
    SHORT: "the prompt has no whole block before its last token",
    NO_CHECKPOINT: "attention blocks reach further than any state that was kept",
    EVICTED: "a state further on was published once and its blocks hold something else now",
    DEFERRED: "the request waits one step for another one that computes the same prefix, and hits then",
}
"""Why a request did not hit, or not at once, with the sentence for a reader."""


class CacheStats:
    """``block_size``: B tokens; ``checkpoint_bytes`` of one boundary on one rank; ``memory``: boundaries remembered."""

    def __init__(self, block_size: int, checkpoint_bytes: int, memory: int):
        self._block_size = block_size
        self._checkpoint_bytes = checkpoint_bytes
        self._memory = memory
        self._published: OrderedDict[Hashable, None] = OrderedDict()  # block hashes, latest last
        self._counts: dict[str, int] = {}

    def saved(self, count: int, skipped: int) -> None:
        """A step saves ``count`` checkpoints and lets ``skipped`` go for want of a block."""
        self._add(SAVED, count)
        self._add(BYTES, count * self._checkpoint_bytes)
        self._add(SKIPPED, skipped)

    def published(self, boundary_hash: Hashable) -> None:
        """From the next step on, the boundary whose last block has this hash can be hit."""
        self._published[boundary_hash] = None
        self._published.move_to_end(boundary_hash)
        if len(self._published) > self._memory:
            self._published.popitem(last=False)

    def restored(self) -> None:
        """A row admitted in this step resumes from a checkpoint."""
        self._add(RESTORED, 1)
        self._add(BYTES, self._checkpoint_bytes)

    def admitted(
        self, num_prompt: int, hit: int, attention_hit: int, hashes: Sequence[Hashable], was_deferred: bool
    ) -> str | None:
        """A request is scheduled for the first time; returns the reason of its miss, None for a hit or a new prompt.

        ``num_prompt``, ``hit``, ``attention_hit`` tokens (``attention_hit``: how far the attention blocks alone would
        have carried it, 0 when no further than ``hit``); ``hashes``: of its full blocks, in order; ``was_deferred``: it
        has waited a step for the checkpoint of a request with the same prefix.
        """
        published = self._furthest_published(num_prompt, hashes)
        self._add(REACHABLE, max(hit, attention_hit, published))
        reason = self._reason(num_prompt, hit, attention_hit, published, was_deferred)
        if reason is not None:
            self._add(f"{MISSES}:{reason}", 1)
        return reason

    def drain(self) -> dict[str, int]:
        """Counts since the last call, by metric name (misses by name and reason)."""
        counts, self._counts = self._counts, {}
        return counts

    def _reason(self, num_prompt: int, hit: int, attention_hit: int, published: int, was_deferred: bool) -> str | None:
        if num_prompt <= self._block_size:
            return SHORT
        if published > hit:
            return EVICTED
        if attention_hit > hit:
            return NO_CHECKPOINT
        return DEFERRED if was_deferred and hit else None

    def _furthest_published(self, num_prompt: int, hashes: Sequence[Hashable]) -> int:
        """Tokens before the last boundary of the prompt that was published once, whether or not it is still there."""
        reachable = (num_prompt - 1) // self._block_size
        known = [i + 1 for i, block in enumerate(hashes[:reachable]) if block in self._published]
        return max(known, default=0) * self._block_size

    def _add(self, name: str, count: int) -> None:
        if count:
            self._counts[name] = self._counts.get(name, 0) + count
