# SPDX-License-Identifier: Apache-2.0
"""What a device's memory holds: the arithmetic that the worker and the command line share. Numbers only.

Owns: the budget of the block pool, and how many requests of a length a pool holds.
Never: a tensor, a configuration, a log line; it imports nothing.

Ordering rule: weights, then the profile run's peak, then state rows; the pool is what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

CARD_BYTES = 128 * 10**9
"""Memory of the card that is planned for where nobody says another one: Gaudi 3's."""


@dataclass(frozen=True)
class MemoryBudget:
    """One rank's memory at start, in bytes. ``kv_cache_memory_bytes``: of --kv-cache-memory-bytes, None without it."""

    total: int  # of the device
    gpu_memory_utilization: float  # share of it that may be used
    kv_cache_memory_bytes: int | None
    non_kv_cache_memory: int  # gone once the weights are loaded: theirs, and what else the device has given out
    peak: int  # of the profile run
    states: int  # slots, reserved and staging rows
    padding_block: int  # the padding kernel block

    @property
    def budget(self) -> int:
        return (
            int(self.total * self.gpu_memory_utilization)
            if self.kv_cache_memory_bytes is None
            else self.kv_cache_memory_bytes
        )

    @property
    def available(self) -> int:
        """What is left for the block pool; not positive where nothing is."""
        others = self.non_kv_cache_memory + self.peak if self.kv_cache_memory_bytes is None else 0
        return self.budget - others - self.states - self.padding_block


def blocks_per_request(block_size: int, num_cached_groups: int, length: int) -> int:
    """Pool blocks of ``length`` tokens: attention blocks and, to be resumed, one checkpoint where GDN groups cache."""
    return -(-length // block_size) + num_cached_groups


def max_concurrency(num_blocks: int, block_size: int, num_cached_groups: int, length: int, max_num_seqs: int) -> float:
    """Most requests of ``length`` tokens that run at a time. The pool's block 0 holds nothing."""
    return min((num_blocks - 1) / blocks_per_request(block_size, num_cached_groups, length), max_num_seqs)


def per_block_layout_factor(page_bytes: int, state_bytes: int) -> float:
    """Share of the pool's blocks that is left where every block also carries a state tensor of its own.

    ``page_bytes``: K and V of a block at one position; ``state_bytes``: state of one GDN layer.
    """
    return page_bytes / (page_bytes + state_bytes)
