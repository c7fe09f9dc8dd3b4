# SPDX-License-Identifier: Apache-2.0
"""Warm-up runs every shape of the grid once, the largest first."""

from __future__ import annotations

import pytest

from vllm_gaudi.bucketing.grid import BucketGrid, DecodeBucket, PrefillBucket
from vllm_gaudi.v1.worker.warmup import warm_up


@pytest.fixture
def grid():
    return BucketGrid(query_multiple=16, max_query=64, max_batch=6, max_context=100, kernel_block=16, max_blocks=30)


def test_every_bucket_once_largest_first_prefills_before_decodes(grid):
    ran: list[PrefillBucket | DecodeBucket] = []
    assert warm_up(grid, ran.append, show=False) == len(ran)
    assert ran == [*grid.all_prefill(), *grid.all_decode()]
    assert len(set(ran)) == len(ran)
    assert ran[0].rows == max(bucket.rows for bucket in ran)


def test_a_budget_that_is_too_small_fails_at_the_first_shape(grid):
    ran = []

    def run(bucket):
        ran.append(bucket)
        raise MemoryError

    with pytest.raises(MemoryError):
        warm_up(grid, run, show=False)
    assert len(ran) == 1


@pytest.mark.parametrize("show", [True, False])
def test_the_progress_bar_is_shown_where_it_is_asked_for(grid, capsys, show):
    warm_up(grid, lambda bucket: None, show)
    assert ("Warming up" in capsys.readouterr().err) is show
