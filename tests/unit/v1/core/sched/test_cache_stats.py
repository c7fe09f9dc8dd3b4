# SPDX-License-Identifier: Apache-2.0
"""One reason for every request that could have hit and did not; the reasons add up to the misses."""

from __future__ import annotations

import pytest

from vllm_gaudi.v1.core.sched.cache_stats import (
    BYTES,
    DEFERRED,
    EVICTED,
    MISSES,
    NO_CHECKPOINT,
    REACHABLE,
    RESTORED,
    SAVED,
    SHORT,
    SKIPPED,
    CacheStats,
)

B = 4
HASHES = ["h1", "h2", "h3"]


@pytest.fixture
def stats() -> CacheStats:
    return CacheStats(block_size=B, checkpoint_bytes=100, memory=4)


# published hashes, prompt tokens, hit, attention alone -> reason, tokens that were reachable
CASES = {
    "a prompt of a block or less": ([], 4, 0, 0, SHORT, 0),
    "a prompt that nobody has sent": ([], 13, 0, 0, None, 0),
    "a hit to the end": (["h3"], 13, 12, 0, None, 12),
    "attention knew more than GDN": (["h1"], 13, 4, 8, NO_CHECKPOINT, 8),
    "the state was kept and is gone": (["h1", "h3"], 13, 4, 12, EVICTED, 12),
    "attention and state are gone": (["h2"], 13, 0, 0, EVICTED, 8),
    "a boundary beyond the last usable one": (["h3"], 12, 8, 0, None, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_reasons(stats: CacheStats, case: str) -> None:
    published, prompt, hit, attention, reason, reachable = CASES[case]
    for block_hash in published:
        stats.published(block_hash)
    assert stats.admitted(prompt, hit, attention, HASHES, False) == reason
    missed = {} if reason is None else {f"{MISSES}:{reason}": 1}
    assert stats.drain() == missed | ({REACHABLE: reachable} if reachable else {})


def test_a_request_that_waited_for_its_twin_is_deferred(stats: CacheStats) -> None:
    stats.published("h2")
    assert stats.admitted(9, 8, 0, HASHES, True) == DEFERRED
    assert stats.admitted(9, 8, 0, HASHES, False) is None
    assert stats.admitted(9, 4, 0, HASHES, True) == EVICTED, "what it waited for has gone again"


def test_moves_are_counted_in_bytes_and_drained_once(stats: CacheStats) -> None:
    stats.saved(2, 0)
    stats.saved(0, 3)
    stats.restored()
    assert stats.drain() == {SAVED: 2, SKIPPED: 3, RESTORED: 1, BYTES: 300}
    assert stats.drain() == {}


def test_memory_of_published_boundaries_is_bounded(stats: CacheStats) -> None:
    for i in range(100):
        stats.published(i)
    assert len(stats._published) == 4
