# SPDX-License-Identifier: Apache-2.0
"""Where prefill chunks end: on the GDN grid whenever a budget allows it, always further on, and at the prompt's end.

The split is a pure function; importing it imports vLLM, so each test does that itself.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it
chunks = st.sampled_from((4, 16, 32, 64))


@pytest.fixture(scope="module")
def chunk_end_on_grid():
    from vllm_gaudi.v1.core.sched.hpu_scheduler import chunk_end_on_grid

    return chunk_end_on_grid


@pytest.mark.parametrize(
    ("start", "end", "prefill_end", "chunk", "max_tokens", "expected"),
    [
        (0, 48, 100, 16, 48, 48),  # on the grid already
        (0, 50, 100, 16, 50, 48),  # cut back
        (48, 98, 100, 16, 50, 96),
        (96, 100, 100, 16, 50, 100),  # the last chunk ends where the prompt ends
        (0, 100, 100, 16, 200, 100),
        (0, 9, 100, 16, 48, 0),  # decodes left 9 tokens: wait for a step with more
        (16, 31, 100, 16, 48, 16),
        (16, 32, 100, 16, 48, 32),
        (0, 9, 100, 16, 9, 9),  # no step can reach the grid: go on below it
        (9, 18, 100, 16, 9, 16),  # but never over a grid point
        (16, 25, 100, 16, 9, 25),
        (20, 60, 100, 16, 48, 32),  # from off the grid back onto it, and no further in one go
        (20, 24, 100, 16, 48, 24),
        (9, 18, 18, 16, 9, 16),  # at a prompt's end as well
        (99, 100, 100, 16, 1, 100),
        (0, 1, 100, 16, 1, 1),
        (0, 16, 100, 16, 16, 16),  # a budget of exactly one chunk
    ],
)
def test_known_cases(chunk_end_on_grid, start, end, prefill_end, chunk, max_tokens, expected):
    assert chunk_end_on_grid(start, end, prefill_end, chunk, max_tokens) == expected


@given(st.integers(0, 500), st.integers(1, 300), st.integers(1, 800), chunks, st.integers(1, 300))
def test_an_end_is_within_the_step_and_on_the_grid(chunk_end_on_grid, start, tokens, prefill_end, chunk, max_tokens):
    assume(start < prefill_end)
    end = min(start + min(tokens, max_tokens), prefill_end)
    found = chunk_end_on_grid(start, end, prefill_end, chunk, max_tokens)
    assert start <= found <= end
    if start % chunk:
        assert found == min(end, (start // chunk + 1) * chunk)
    elif end == prefill_end:
        assert found == end
    elif chunk <= max_tokens:
        assert found == start or found % chunk == 0
    else:
        assert found > start, "a budget that never reaches the grid goes on all the same"
        assert found // chunk == start // chunk or found % chunk == 0, "and not over a grid point"


@given(
    st.integers(1, 600),
    chunks,
    st.integers(1, 200),
    st.lists(st.floats(0, 1), max_size=30),
    st.data(),
)
def test_a_prompt_always_gets_to_its_end(chunk_end_on_grid, prefill_end, chunk, max_tokens, loads, data):
    """Steps whose budget others have eaten up in part may pass it by; each step with the whole budget goes on."""
    start = data.draw(st.integers(0, (prefill_end - 1) // chunk)) * chunk  # a cached prefix ends on the grid
    visited = [start]
    for load in loads:
        left = max(1, round(max_tokens * load))
        start = chunk_end_on_grid(start, min(start + left, prefill_end), prefill_end, chunk, max_tokens)
        visited.append(start)
        if start == prefill_end:
            break
    while start < prefill_end:
        further = chunk_end_on_grid(start, min(start + max_tokens, prefill_end), prefill_end, chunk, max_tokens)
        assert further > start, f"stands still at {start}"
        start = further
        visited.append(start)
    if chunk <= max_tokens:
        assert all(point % chunk == 0 for point in visited if point < prefill_end)
    else:  # every grid point that lies in between was stopped at
        assert {point for point in range(visited[0], prefill_end) if point % chunk == 0} <= set(visited)


class TestMixin:
    """The override itself, on a scheduler that was never started."""

    @pytest.fixture(params=["HPUScheduler", "HPUAsyncScheduler"])
    def scheduler(self, request):
        from vllm_gaudi.v1.core.sched import hpu_async_scheduler, hpu_scheduler

        owner = hpu_scheduler if request.param == "HPUScheduler" else hpu_async_scheduler
        scheduler_class = getattr(owner, request.param)
        found = scheduler_class.__new__(scheduler_class)
        found._caches_gdn_blocks = False
        found._ledger = None
        found._deferred = set()
        found._gdn_chunk = 16
        found.max_num_scheduled_tokens = 50
        found.scheduler_config = SimpleNamespace(long_prefill_token_threshold=0, max_num_seqs=4)
        return found

    @staticmethod
    def request(computed, prompt, total=None):
        return SimpleNamespace(
            num_computed_tokens=computed, num_prompt_tokens=prompt, num_tokens=prompt if total is None else total
        )

    @pytest.mark.parametrize(
        ("computed", "prompt", "total", "asked", "given_"),
        [
            (0, 100, 100, 50, 48),
            (48, 100, 100, 50, 48),
            (96, 100, 100, 4, 4),
            (0, 100, 100, 9, 0),
            (100, 100, 101, 1, 1),  # a decode
            (107, 100, 108, 1, 1),
            (0, 20, 61, 50, 48),  # resumed: its outputs are replayed on the grid as well
            (48, 20, 61, 13, 13),  # a step that reaches the last known token ends where vLLM ends it
            (48, 20, 61, 12, 12),  # the replay's end is the end of a prefill, on the grid or not
            (60, 20, 61, 1, 1),
        ],
    )
    def test_tokens_of_a_chunk(self, scheduler, computed, prompt, total, asked, given_):
        assert scheduler._mamba_block_aligned_split(self.request(computed, prompt, total), asked) == given_

    def test_tokens_hit_in_the_cache_are_counted_before_the_grid(self, scheduler):
        assert scheduler._mamba_block_aligned_split(self.request(0, 100), 50, 32, 0) == 48
        assert scheduler._mamba_block_aligned_split(self.request(0, 100), 50, 16, 16) == 48

    def test_a_threshold_below_the_chunk_goes_on_below_the_grid(self, scheduler):
        scheduler.scheduler_config.long_prefill_token_threshold = 5
        assert scheduler._mamba_block_aligned_split(self.request(0, 100), 5) == 5
        assert scheduler._mamba_block_aligned_split(self.request(15, 100), 5) == 1

    def test_a_waiting_request_gives_way_to_a_twin_of_the_pass_once(self, scheduler):
        from vllm.v1.request import RequestStatus

        promised = []
        scheduler._ledger = SimpleNamespace(will_be_cached=lambda request, hit: promised.append(hit) or True)
        twin = self.request(0, 100)
        twin.request_id, twin.skip_reading_prefix_cache, twin.status = "twin", False, RequestStatus.WAITING
        assert scheduler._mamba_block_aligned_split(twin, 50, 32) == 0
        assert scheduler._mamba_block_aligned_split(twin, 50, 32) == 48
        assert promised == [32]
        for change in ({"status": RequestStatus.RUNNING}, {"skip_reading_prefix_cache": True}):
            scheduler._deferred.clear()
            assert scheduler._mamba_block_aligned_split(SimpleNamespace(**{**vars(twin), **change}), 50) == 48
