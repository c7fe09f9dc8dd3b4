# SPDX-License-Identifier: Apache-2.0
"""The slot pool: lowest first, never twice, and a slot that is lost or given back twice is reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi.v1.worker.state_slots import StateSlotPool


def test_slots_are_handed_out_lowest_first():
    pool = StateSlotPool(4)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_the_order_of_giving_back_does_not_matter(order):
    pool = StateSlotPool(3)
    for _ in range(3):
        pool.take()
    for slot in order:
        pool.free(slot)
    assert [pool.take(), pool.take()] == [0, 2]


def test_more_requests_than_slots_are_an_error_that_says_why():
    pool = StateSlotPool(2)
    pool.take(), pool.take()
    with pytest.raises(RuntimeError, match="all 2 slots are taken.*max_num_seqs.*not given back"):
        pool.take()
    assert pool.num_taken == 2
    pool.free(1)
    assert pool.take() == 1


@pytest.mark.parametrize("slot", [-1, 1, 2, 7])
def test_a_slot_that_was_not_taken_cannot_be_given_back(slot):
    pool = StateSlotPool(2)
    pool.take()
    with pytest.raises(RuntimeError, match=f"slot {slot} is given back but was not taken"):
        pool.free(slot)
    assert pool.num_taken == 1


def test_a_slot_given_back_twice_is_found_at_once():
    """Otherwise two requests would later share one state."""
    pool = StateSlotPool(2)
    slot = pool.take()
    pool.free(slot)
    with pytest.raises(RuntimeError, match="slot 0 is given back"):
        pool.free(slot)
    assert [pool.take(), pool.take()] == [0, 1]


@given(st.integers(1, 6), st.lists(st.integers(0, 9), max_size=60))
def test_the_pool_follows_a_set_of_free_slots(num_slots, choices):
    """Even choices take, odd ones give back one of those taken."""
    pool, free, taken = StateSlotPool(num_slots), set(range(num_slots)), []
    for choice in choices:
        if choice % 2 == 0 and free:
            slot = pool.take()
            assert slot == min(free)
            free.remove(slot)
            taken.append(slot)
        elif taken:
            slot = taken.pop(choice % len(taken))
            pool.free(slot)
            free.add(slot)
        assert pool.num_taken == len(taken)
