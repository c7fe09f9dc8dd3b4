# SPDX-License-Identifier: Apache-2.0
"""What a step does to state, as tables: who is zeroed, restored, saved, and with which blocks."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_gaudi.v1.worker.gdn_checkpoint.plan import plan_checkpoints
from vllm_gaudi.v1.worker.requests import StepRequests

B = 4
GDN_GROUPS = (0, 1)  # group 2 is attention


def step_of(*rows: tuple[int, int, bool], tables: list[list[list[int]]] | None = None) -> StepRequests:
    """One row per (computed, scheduled, admitted); slot = 10 + row.

    The block of entry e in group g is 100 (g + 1) + 10 row + e, unless ``tables`` [group][row][entry] says otherwise.
    """
    count = len(rows)
    computed = np.array([r[0] for r in rows], np.int32)
    scheduled = np.array([r[1] for r in rows], np.int32)
    entries = int(max(computed + scheduled)) // B + 2 if count else 1
    made = [[[100 * (g + 1) + 10 * r + e for e in range(entries)] for r in range(count)] for g in range(3)]
    return StepRequests(
        req_ids=tuple(f"r{i}" for i in range(count)),
        state_slots=np.arange(10, 10 + count, dtype=np.int32),
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        is_prefill=np.ones(count, bool),
        samples=np.ones(count, bool),
        admitted=np.array([r[2] for r in rows], bool),
        admission_ids=tuple(range(count)),
        block_ids=tuple(
            np.array(table, np.int32).reshape(count, len(table[0]) if table else 0) for table in tables or made
        ),
        tokens=(),
        fresh_blocks=np.array([7, 8], np.int32),
    )


NEW, RUNNING = True, False

# (computed, scheduled, admitted) -> (zeroed, restored entry, entry saved at the end)
CASES = {
    "cold, ends inside a block": ((0, 3, NEW), (True, None, None)),
    "cold, ends on a boundary": ((0, 4, NEW), (True, None, 0)),
    "cold, spans several blocks": ((0, 12, NEW), (True, None, 2)),
    "hit, then inside": ((8, 2, NEW), (False, 1, None)),
    "hit, then to the next boundary": ((8, 4, NEW), (False, 1, 2)),
    "hit with one token left": ((4, 1, NEW), (False, 0, None)),
    "running, inside": ((5, 1, RUNNING), (False, None, None)),
    "running, reaches a boundary by decode": ((7, 1, RUNNING), (False, None, 1)),
    "running, leaves a boundary": ((8, 1, RUNNING), (False, None, None)),
    "running, sub-block chunk reaches a boundary": ((3, 1, RUNNING), (False, None, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_one_row(case: str) -> None:
    row, (zeroed, restored, saved) = CASES[case]
    plan = plan_checkpoints(step_of(row), B, GDN_GROUPS)
    assert plan.zero_blocks.tolist() == [7, 8]
    assert plan.zero_state_slots.tolist() == ([10] if zeroed else [])
    for copies, entry in ((plan.restore, restored), (plan.save, saved)):
        assert copies.rows.tolist() == ([] if entry is None else [10])
        assert copies.blocks.tolist() == ([[], []] if entry is None else [[100 + entry], [200 + entry]])


def test_a_step_that_restores_one_saves_another_does_both_for_a_third_and_neither_for_a_fourth() -> None:
    step = step_of((4, 2, NEW), (6, 2, RUNNING), (8, 4, NEW), (9, 1, RUNNING))
    plan = plan_checkpoints(step, B, GDN_GROUPS)
    assert plan.zero_state_slots.tolist() == []
    assert plan.restore.rows.tolist() == [10, 12]
    assert plan.restore.blocks.tolist() == [[100, 121], [200, 221]]
    assert plan.save.rows.tolist() == [11, 12]
    assert plan.save.blocks.tolist() == [[111, 122], [211, 222]]


def test_groups_have_blocks_of_their_own_and_attention_is_left_alone() -> None:
    tables = [[[31, 32]], [[41, 42]], [[0, 0]]]
    plan = plan_checkpoints(step_of((4, 4, NEW), tables=tables), B, GDN_GROUPS)
    assert plan.restore.blocks.tolist() == [[31], [41]] and plan.save.blocks.tolist() == [[32], [42]]


def test_where_nothing_is_cached_every_admitted_slot_is_zeroed() -> None:
    plan = plan_checkpoints(step_of((0, 4, NEW), (8, 4, RUNNING), (4, 4, NEW)), B, ())
    assert plan.zero_state_slots.tolist() == [10, 12]
    assert plan.restore.num_copies == plan.save.num_copies == 0


def test_an_empty_step_still_zeroes_blocks() -> None:
    plan = plan_checkpoints(step_of(), B, GDN_GROUPS)
    assert plan.zero_blocks.tolist() == [7, 8] and plan.save.num_copies == 0


def test_a_resume_off_a_boundary_is_refused() -> None:
    with pytest.raises(RuntimeError, match="request r0 resumes at 6 tokens, which is not a multiple of B = 4"):
        plan_checkpoints(step_of((6, 2, NEW)), B, GDN_GROUPS)


def test_a_null_block_is_never_a_source() -> None:
    tables = [[[31, 32]], [[0, 42]], [[51, 52]]]
    with pytest.raises(RuntimeError, match="null block at entry 0 of KV cache group 1"):
        plan_checkpoints(step_of((4, 1, NEW), tables=tables), B, GDN_GROUPS)


# (computed, scheduled), entries with a block -> (entries saved on the way with their distance, entry saved at the end)
CROSSED = {
    "inside, then at the end": ((0, 12), {0, 1, 2}, ([(0, 4), (1, 8)], 2)),
    "ends between boundaries": ((0, 11), {0, 1, 2}, ([(0, 4), (1, 8)], None)),
    "starts between boundaries": ((6, 9), {1, 2, 3}, ([(1, 2), (2, 6)], None)),
    "only the one in the middle is kept": ((0, 12), {1}, ([(1, 8)], None)),
    "only the end is kept": ((0, 12), {2}, ([], 2)),
    "none is kept": ((0, 12), set(), ([], None)),
    "a stale entry before the chunk is left alone": ((8, 4), {0, 1, 2}, ([], 2)),
    "a decode that crosses nothing": ((5, 1), {0, 1}, ([], None)),
    "a decode onto a boundary that is not kept": ((7, 1), {0}, ([], None)),
}


@pytest.mark.parametrize("case", CROSSED)
def test_boundaries_on_the_way(case: str) -> None:
    (computed, scheduled), kept, (on_the_way, at_end) = CROSSED[case]
    tables = [[[100 * (g + 1) + e if e in kept else 0 for e in range(5)]] for g in range(3)]
    plan = plan_checkpoints(step_of((computed, scheduled, RUNNING), tables=tables), B, GDN_GROUPS)
    assert plan.save.rows.tolist() == ([] if at_end is None else [10])
    assert plan.save.blocks.tolist() == ([[], []] if at_end is None else [[100 + at_end], [200 + at_end]])
    assert list(plan.intermediate_saves) == ([0] if on_the_way else [])
    for intermediate_saves in plan.intermediate_saves.values():
        assert intermediate_saves.tokens.tolist() == [tokens for _, tokens in on_the_way]
        assert intermediate_saves.blocks.tolist() == [
            [100 + e for e, _ in on_the_way],
            [200 + e for e, _ in on_the_way],
        ]


def test_a_checkpoint_in_some_groups_only_is_refused() -> None:
    tables = [[[31, 32]], [[0, 42]], [[51, 52]]]
    with pytest.raises(RuntimeError, match="checkpoint of 4 tokens in some of the KV cache groups"):
        plan_checkpoints(step_of((0, 5, NEW), tables=tables), B, GDN_GROUPS)
