# SPDX-License-Identifier: Apache-2.0
"""Buckets: how they are made, how one given by the user is read, and how a step is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi.bucketing.strategy import exponential_buckets, round_up, round_up_to_bucket, user_buckets

sizes = st.integers(1, 5000)


@pytest.mark.parametrize(
    ("lowest", "highest", "buckets"),
    [
        (1, 1, (1,)),
        (1, 2, (1, 2)),
        (1, 3, (1, 2, 3)),
        (1, 8, (1, 2, 4, 8)),
        (1, 9, (1, 2, 4, 8, 9)),
        (64, 64, (64,)),
        (64, 448, (64, 128, 256, 448)),
        (3, 50, (3, 6, 12, 24, 48, 50)),
    ],
)
def test_doubling(lowest, highest, buckets):
    assert exponential_buckets(lowest, highest) == buckets


@given(sizes, sizes)
def test_doubling_starts_and_ends_where_it_should_and_never_leaps(first, second):
    lowest, highest = sorted((first, second))
    buckets = exponential_buckets(lowest, highest)
    assert buckets[0] == lowest and buckets[-1] == highest
    assert all(low < high <= 2 * low for low, high in zip(buckets, buckets[1:], strict=False))


@pytest.mark.parametrize("lowest", [0, -1])
def test_doubling_of_nothing_would_never_end(lowest):
    with pytest.raises(ValueError, match=f"not at {lowest}"):
        exponential_buckets(lowest, 8)


@pytest.mark.parametrize(
    ("values", "multiple", "highest", "buckets"),
    [
        ([], 1, 8, (8,)),
        ([8], 1, 8, (8,)),
        ([2, 4], 1, 8, (2, 4, 8)),
        ([4, 2, 4], 1, 8, (2, 4, 8)),
        ([2, 100], 1, 8, (2, 8)),
        ([128, 64], 64, 192, (64, 128, 192)),
        ((2, 4), 2, 6, (2, 4, 6)),
    ],
)
def test_an_explicit_ladder_is_sorted_cut_and_topped_up(values, multiple, highest, buckets):
    assert user_buckets("steps", values, multiple, highest) == buckets


@pytest.mark.parametrize("value", [0, -64, 65, 64.0, "64", True, None, [64]])
def test_an_explicit_step_that_is_wrong_is_refused_with_name_value_and_what_is_legal(value):
    with pytest.raises(ValueError, match="prefill_query_buckets has") as error:
        user_buckets("prefill_query_buckets", [64, value], 64, 256)
    text = str(error.value)
    assert text.startswith(f"prefill_query_buckets has {value!r};")
    assert "positive multiple of 64" in text


def test_a_ladder_that_is_no_list_is_refused_by_name():
    with pytest.raises(ValueError, match="decode_batch_buckets"):
        user_buckets("decode_batch_buckets", 8, 1, 16)


@given(sizes, sizes)
def test_round_up(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@given(st.lists(sizes, min_size=1, unique=True), sizes)
def test_the_smallest_step_that_holds_a_value(values, value):
    buckets = sorted(values)
    if value > buckets[-1]:
        with pytest.raises(RuntimeError, match=f"a size of {value} is above the top"):
            round_up_to_bucket(buckets, value)
    else:
        found = round_up_to_bucket(buckets, value)
        assert found >= value
        assert all(step < value for step in buckets if step < found)
