# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of memory from literal numbers. Published sizes of whole models: tests/e2e/test_plan_numbers.py."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_gaudi.v1.worker.memory import (
    MemoryBudget,
    blocks_per_request,
    max_concurrency,
    per_block_layout_factor,
)

BUDGET = MemoryBudget(
    total=10_000,
    gpu_memory_utilization=0.5,
    kv_cache_memory_bytes=None,
    non_kv_cache_memory=2000,
    peak=300,
    states=400,
    padding_block=50,
)


def test_a_share_of_the_device_pays_for_everything():
    assert (BUDGET.budget, BUDGET.available) == (5000, 5000 - 2000 - 300 - 400 - 50)


def test_given_bytes_pay_for_states_and_the_padding_block_only():
    given = dataclasses.replace(BUDGET, kv_cache_memory_bytes=3000)
    assert (given.budget, given.available) == (3000, 3000 - 400 - 50)
    assert dataclasses.replace(BUDGET, kv_cache_memory_bytes=0).budget == 0


def test_what_is_missing_is_negative():
    assert dataclasses.replace(BUDGET, non_kv_cache_memory=6000).available == 5000 - 6000 - 300 - 400 - 50


@pytest.mark.parametrize(("groups", "length", "blocks"), [(3, 1, 4), (3, 16, 4), (3, 17, 5), (0, 17, 2), (0, 16, 1)])
def test_a_conversation_takes_its_blocks_and_a_checkpoint(groups, length, blocks):
    assert blocks_per_request(16, groups, length) == blocks


def test_the_null_block_holds_no_conversation_and_slots_are_a_limit():
    assert max_concurrency(41, 16, 3, 80, max_num_seqs=99) == 5.0
    assert max_concurrency(41, 16, 3, 80, max_num_seqs=2) == 2
    assert max_concurrency(1, 16, 3, 80, max_num_seqs=2) == 0


def test_a_second_tensor_per_block_costs_its_share():
    assert per_block_layout_factor(3_670_016, 3_207_168) == pytest.approx(0.5337, abs=5e-5)
