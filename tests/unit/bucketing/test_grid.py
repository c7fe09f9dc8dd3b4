# SPDX-License-Identifier: Apache-2.0
"""The grid: every bucket that a step can ask for is known before the first step, and no lookup fails within limits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi.bucketing.grid import (
    CONFIG_KEYS,
    MIN_ROWS,
    MOST_DECODE_TOKENS,
    BucketGrid,
    DecodeBucket,
    ExactGrid,
    PrefillBucket,
    RowTiles,
)

SMALL: dict[str, Any] = {
    "query_multiple": 16,
    "max_query": 50,
    "max_batch": 5,
    "max_context": 100,
    "kernel_block": 16,
    "max_blocks": 20,
}


@st.composite
def limits(draw: Any) -> dict[str, Any]:
    """Limits of an engine, with a list of buckets of the user's in some dimensions."""
    query_multiple = draw(st.sampled_from((16, 64)))
    max_context = draw(st.integers(1, 3000))
    found = {
        "query_multiple": query_multiple,
        "max_query": draw(st.integers(1, min(700, max_context))),
        "max_batch": draw(st.integers(1, 40)),
        "max_context": max_context,
        "kernel_block": draw(st.sampled_from((16, 32, 64, 128))),
        "max_blocks": draw(st.integers(1, 400)),
    }
    steps = st.lists(st.integers(1, 50), max_size=4)
    overrides = draw(st.dictionaries(st.sampled_from(CONFIG_KEYS), steps))
    if "prefill_query_buckets" in overrides:
        overrides["prefill_query_buckets"] = [step * query_multiple for step in overrides["prefill_query_buckets"]]
    if "prefill_batch_buckets" in overrides:
        overrides["prefill_batch_buckets"].append(1)
    return {**found, "overrides": overrides}


def row_blocks(given: dict[str, Any]) -> int:
    return -(-given["max_context"] // given["kernel_block"])


@given(limits(), st.data())
def test_every_prefill_that_a_step_can_run_has_its_bucket_in_the_grid(given, data):
    grid = BucketGrid(**given)
    query = data.draw(st.integers(1, min(given["max_query"], given["max_context"])))
    batch = data.draw(st.integers(1, given["max_batch"]))
    context = data.draw(st.integers(query, given["max_context"]))
    assert grid.fits_one_forward(1, query), "a sequence alone always fits"
    if not grid.fits_one_forward(batch, query):
        return
    bucket = grid.prefill(batch, query, context)
    assert bucket.batch >= batch and bucket.query >= query
    assert bucket.blocks * given["kernel_block"] >= context
    assert bucket.batch == 1 or bucket.rows <= grid.max_prefill_rows
    assert bucket in grid.all_prefill()


@given(limits(), st.data())
def test_every_decode_that_a_step_can_run_has_its_bucket_in_the_grid(given, data):
    grid = BucketGrid(**given)
    batch = data.draw(st.integers(1, given["max_batch"]))
    needed = data.draw(st.lists(st.integers(1, row_blocks(given)), min_size=batch, max_size=batch))
    blocks = sum(needed)
    assert max(needed) <= grid.decode_blocks[-1], "a sequence alone always fits"
    if blocks > grid.decode_blocks[-1]:
        return  # the input builder cuts such a batch
    bucket = grid.decode(batch, blocks)
    assert bucket.batch >= batch and bucket.blocks >= blocks
    assert bucket.rows >= max(batch, MIN_ROWS) and bucket.rows % MIN_ROWS == 0
    assert bucket in grid.all_decode()


@given(limits(), st.data())
def test_an_exact_grid_pads_to_row_tiles_and_stays_within_the_listed_buckets(given, data):
    multiple = given["query_multiple"]
    given["block_size"] = data.draw(st.sampled_from([0, 16, 48, 96, 640]))
    grid, listed = ExactGrid(**given), BucketGrid(**given)
    query = data.draw(st.integers(1, min(given["max_query"], given["max_context"])))
    shortest = data.draw(st.integers(1, query))
    batch = data.draw(st.integers(1, given["max_batch"]))
    context = data.draw(st.integers(query, given["max_context"]))
    assert grid.fits_one_forward(1, query, query)
    if grid.fits_one_forward(batch, query, shortest):
        bucket, padded = grid.prefill(batch, query, context), listed.prefill(batch, query, context)
        assert (bucket.batch, bucket.blocks) == (batch, -(-context // given["kernel_block"]))
        assert bucket.query == -(-query // multiple) * multiple <= padded.query
        assert batch == 1 or (bucket.rows <= grid.max_prefill_rows and query - shortest < multiple)
        assert grid.prefill(batch, query, context, keeps_intermediate=True).boundaries * batch <= grid.num_staging
    blocks = data.draw(st.integers(batch, max(batch, grid.decode_blocks[-1])))
    if blocks <= grid.decode_blocks[-1]:
        assert grid.decode(batch, blocks) == DecodeBucket(batch, blocks)
    assert grid.all_prefill() == listed.all_prefill() and grid.all_decode() == listed.all_decode()
    assert grid.num_staging == listed.num_staging


def test_an_exact_grid_pads_no_sequence_for_another():
    grid = ExactGrid(query_multiple=64, max_query=512, max_batch=8, max_context=1000, kernel_block=128, max_blocks=90)
    assert grid.fits_one_forward(3, 128, 65) and grid.prefill(3, 128, 128) == PrefillBucket(3, 128, 1)
    assert not grid.fits_one_forward(3, 128, 64)
    assert grid.fits_one_forward(3, 170, 129) is False, "three times 192 rows are too many"
    assert grid.prefill(1, 321, 900) == PrefillBucket(1, 384, 8)
    assert grid.decode(3, 9) == DecodeBucket(3, 9)


def test_an_exact_grid_keeps_no_more_boundaries_in_a_forward_than_the_listed_buckets_do():
    """Two prompts of 64 rows would need four staging rows where the buckets has three: its two are padded to four."""
    limits = {"query_multiple": 64, "max_query": 112, "max_batch": 8, "max_context": 512, "kernel_block": 16}
    grid = ExactGrid(**limits, max_blocks=90, block_size=48)
    assert grid.num_staging == BucketGrid(**limits, max_blocks=90, block_size=48).num_staging == 3
    assert not grid.fits_one_forward(2, 50, 50)
    assert ExactGrid(**limits, max_blocks=90).fits_one_forward(2, 50, 50)


@pytest.mark.parametrize(
    ("length", "slices"),
    [
        (0, []),
        (1, [(0, 16)]),
        (17, [(0, 16), (16, 16)]),
        (32, [(0, 16), (16, 16)]),
        (33, [(0, 64)]),
        (64, [(0, 64)]),
        (80, [(0, 64), (64, 16)]),
        (160, [(0, 64), (64, 64), (128, 16), (144, 16)]),
        (161, [(0, 64), (64, 64), (128, 64)]),
    ],
)
def test_a_last_tile_at_most_half_full_is_cut(length, slices):
    assert RowTiles(64, 16, 16).gemm_slices(length) == slices
    assert RowTiles(64, 16).gemm_slices(length) == [(row, 64) for row in range(0, length, 64)]


@given(limits())
def test_the_grid_lists_each_bucket_once_largest_first_and_only_within_limits(given):
    grid = BucketGrid(**given)
    prefills, decodes = grid.all_prefill(), grid.all_decode()
    assert len(set(prefills)) == len(prefills) > 0
    assert len(set(decodes)) == len(decodes) > 0
    assert all((a.rows, a.batch * a.blocks) >= (b.rows, b.batch * b.blocks) for a, b in pairwise(prefills))
    assert all((a.batch, a.blocks) >= (b.batch, b.blocks) for a, b in pairwise(decodes))
    assert all(bucket.query % given["query_multiple"] == 0 for bucket in prefills)
    assert max(bucket.batch for bucket in prefills) <= min(4, given["max_batch"])
    assert max(bucket.query for bucket in prefills) < given["max_query"] + given["query_multiple"]
    assert max(bucket.blocks for bucket in prefills) <= row_blocks(given)
    assert max(bucket.batch for bucket in decodes) == given["max_batch"]
    assert max(bucket.blocks for bucket in decodes) <= max(row_blocks(given), given["max_blocks"])


@pytest.mark.parametrize("max_query", [257, 512, 513, 2048, 8192])
def test_a_budget_above_the_longest_context_is_fine(max_query):
    """vLLM's default budget is thousands of tokens, whatever the model's length."""
    grid = BucketGrid(
        query_multiple=64, max_query=max_query, max_batch=8, max_context=256, kernel_block=16, max_blocks=99
    )
    assert max(bucket.blocks for bucket in grid.all_prefill()) == 16
    for query in (1, 64, 65, 256):
        assert grid.prefill(1, query, 256) in grid.all_prefill()
    assert grid.prefill(4, 64, 256) in grid.all_prefill()


@pytest.mark.parametrize("steps", [[], [2], [4]])
def test_a_ladder_of_batches_without_1_still_holds_a_sequence_alone(steps):
    grid = BucketGrid(**SMALL, overrides={"prefill_batch_buckets": steps})
    bucket = grid.prefill(1, 50, 50)
    assert bucket in grid.all_prefill()
    assert bucket.rows <= grid.max_prefill_rows


def test_all_lists_exactly_what_can_be_asked_for():
    """By brute force over small limits: nothing is missing, and warm-up runs no shape in vain."""
    grid = BucketGrid(**SMALL)
    asked = {
        grid.prefill(batch, query, context)
        for batch in range(1, 6)
        for query in range(1, 51)
        for context in range(query, 101)
        if grid.fits_one_forward(batch, query)
    }
    assert set(grid.all_prefill()) == asked
    asked = {grid.decode(batch, blocks) for batch in range(1, 6) for blocks in range(batch, min(7 * batch, 20) + 1)}
    assert set(grid.all_decode()) == asked


def test_the_default_ladders():
    grid = BucketGrid(query_multiple=64, max_query=512, max_batch=8, max_context=1000, kernel_block=128, max_blocks=90)
    assert grid.prefill_batches == (1, 4)
    assert grid.prefill_queries == (64, 128, 256, 512)
    assert grid.prefill_blocks == (1, 2, 4, 8)
    assert grid.decode_batches == (1, 2, 4, 8)
    assert grid.decode_blocks == (8, 16, 32, 64)
    assert grid.prefill(1, 65, 900) == PrefillBucket(1, 128, 8)
    assert grid.prefill(2, 64, 64) == PrefillBucket(4, 64, 1)
    assert grid.decode(3, 9) == DecodeBucket(4, 16)


def test_sequences_share_a_prefill_only_up_to_the_rows_of_the_largest():
    grid = BucketGrid(query_multiple=64, max_query=512, max_batch=8, max_context=1000, kernel_block=128, max_blocks=90)
    assert grid.fits_one_forward(4, 128)
    assert grid.fits_one_forward(2, 128)
    assert not grid.fits_one_forward(2, 129)
    assert not grid.fits_one_forward(5, 1)
    assert grid.fits_one_forward(1, 512)


@pytest.mark.parametrize(
    ("ask", "size"),
    [
        (lambda grid: grid.prefill(5, 16, 16), 5),
        (lambda grid: grid.prefill(1, 65, 100), 65),
        (lambda grid: grid.prefill(1, 16, 113), 8),
        (lambda grid: grid.decode(6, 6), 6),
        (lambda grid: grid.decode(1, 21), 21),
    ],
)
def test_beyond_the_limits_there_is_no_bucket(ask, size):
    """A made-up shape would be compiled in the middle of serving."""
    with pytest.raises(RuntimeError, match=f"a size of {size} is above the top"):
        ask(BucketGrid(**SMALL))


@pytest.mark.parametrize(
    ("key", "steps", "attribute", "buckets"),
    [
        ("prefill_batch_buckets", [2], "prefill_batches", (1, 2, 4)),  # one is always there
        ("prefill_batch_buckets", [1, 2, 3, 9], "prefill_batches", (1, 2, 3, 4)),
        ("prefill_query_buckets", [48], "prefill_queries", (48, 64)),
        ("prefill_block_buckets", [5, 3], "prefill_blocks", (3, 5, 7)),
        ("decode_batch_buckets", [], "decode_batches", (5,)),
        ("decode_block_buckets", [10], "decode_blocks", (10, 20)),
    ],
)
def test_a_ladder_of_the_users_replaces_ours_and_is_topped_up(key, steps, attribute, buckets):
    default, grid = BucketGrid(**SMALL), BucketGrid(**SMALL, overrides={key: steps})
    for name in ("prefill_batches", "prefill_queries", "prefill_blocks", "decode_batches", "decode_blocks"):
        assert getattr(grid, name) == (buckets if name == attribute else getattr(default, name))


@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_a_wrong_step_is_refused_by_the_name_of_its_ladder(key):
    with pytest.raises(ValueError, match=f"{key} has -1"):
        BucketGrid(**SMALL, overrides={key: [16, -1]})


def test_a_query_step_off_the_chunk_grid_is_refused():
    with pytest.raises(ValueError, match="prefill_query_buckets has 24; .*multiple of 16"):
        BucketGrid(**SMALL, overrides={"prefill_query_buckets": [24]})


def test_the_users_mapping_is_not_changed():
    overrides = {"decode_batch_buckets": [2]}
    BucketGrid(**SMALL, overrides=overrides)
    assert overrides == {"decode_batch_buckets": [2]}


class TestBoundaries:
    """Where GDN states are cached, a prefill bucket says how many boundaries on the way it keeps: none or all."""

    @staticmethod
    def grid(**changes) -> BucketGrid:
        numbers = {
            "query_multiple": 64,
            "max_query": 256,
            "max_batch": 8,
            "max_context": 1024,
            "kernel_block": 32,
            "max_blocks": 100,
            "block_size": 96,
        }
        return BucketGrid(**{**numbers, **changes})

    @pytest.mark.parametrize(("query", "boundaries"), [(64, 1), (96, 1), (97, 2), (192, 2), (256, 3)])
    def test_a_chunk_runs_over_as_many_as_its_worst_start_allows(self, query, boundaries):
        assert self.grid().boundaries_within(query) == boundaries
        # By count: boundaries strictly inside (start, start + query) for every start on the GDN grid.
        worst = max(sum(1 for at in range(start + 1, start + query) if at % 96 == 0) for start in range(0, 960, 32))
        assert worst <= boundaries

    def test_a_bucket_keeps_none_or_all(self):
        grid = self.grid()
        assert grid.prefill(1, 200, 300).boundaries == 0
        assert grid.prefill(1, 200, 300, keeps_intermediate=True).boundaries == grid.boundaries_within(256)
        both = {(b.batch, b.query, b.blocks): set() for b in grid.all_prefill()}
        for bucket in grid.all_prefill():
            both[bucket.batch, bucket.query, bucket.blocks].add(bucket.boundaries)
        assert all(kept == {0, grid.boundaries_within(query)} for (_, query, _), kept in both.items())

    def test_staging_rows_hold_what_any_forward_keeps(self):
        grid = self.grid()
        assert grid.num_staging == max(bucket.batch * bucket.boundaries for bucket in grid.all_prefill()) == 4

    def test_none_where_nothing_is_cached_or_no_boundary_can_be_passed(self):
        assert self.grid(block_size=0).num_staging == 0
        assert self.grid(max_context=96).num_staging == 0
        assert {bucket.boundaries for bucket in self.grid(block_size=0).all_prefill()} == {0}


@pytest.mark.parametrize(
    ("context", "batch", "pool", "most"),
    [
        (4096, 256, 10**6, MOST_DECODE_TOKENS // 128),  # more than one forward may read: bounded
        (4096, 64, 10**6, 2048),  # all of the requests' contexts
        (4096, 256, 100, 100),  # the pool
        (2 * MOST_DECODE_TOKENS, 4, 10**6, 2 * MOST_DECODE_TOKENS // 128),  # a sequence alone always fits
    ],
)
def test_what_a_decode_reads_is_bounded_whatever_the_pool(context, batch, pool, most):
    limits = {"query_multiple": 64, "max_query": 2048, "kernel_block": 128}
    grid = BucketGrid(max_context=context, max_batch=batch, max_blocks=pool, **limits)
    assert grid.decode_blocks[-1] == most
