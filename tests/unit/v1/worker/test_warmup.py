# SPDX-License-Identifier: Apache-2.0
"""Warm-up runs every shape of the grid once, the largest first."""

from __future__ import annotations

import pytest
import torch

from vllm_gaudi.bucketing.grid import BucketGrid, DecodeBucket, PrefillBucket
from vllm_gaudi.v1.worker.warmup import validate, warm_up


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


def test_one_large_shape_of_each_phase_is_tried_for_real(grid):
    ran = []
    validate(grid, lambda bucket: ran.append(bucket) or torch.zeros(2, 3))
    assert ran == [grid.all_prefill()[0], grid.all_decode()[0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_graph_that_gives_nonsense_on_zeros_stops_the_start(grid, value):
    bad = grid.all_decode()[0]
    with pytest.raises(RuntimeError, match="DecodeBucket"):
        validate(grid, lambda bucket: torch.tensor([0.0, value if bucket == bad else 1.0]))
