# SPDX-License-Identifier: Apache-2.0
"""The store on tensors made by hand: a saved state comes back bit for bit, and nothing else moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_gaudi.v1.worker.gdn_checkpoint.layout import StateShape, make_layout
from vllm_gaudi.v1.worker.gdn_checkpoint.plan import CheckpointPlan, RowCopies
from vllm_gaudi.v1.worker.gdn_checkpoint.store import GDNCheckpointStore, StateZeroer, padded

NUM_BLOCKS, KERNEL_BLOCK, PER_BLOCK, KV_HEADS, HEAD = 7, 16, 2, 2, 32
BLOCK = KERNEL_BLOCK * PER_BLOCK
ROWS = 6
SIZES = [2, 1]  # GDN layers per group
NOTHING = np.zeros(0, np.int32)
NO_COPIES = RowCopies(NOTHING, np.zeros((2, 0), np.int32))


def copies(rows: list[int], blocks: list[list[int]]) -> RowCopies:
    return RowCopies(np.array(rows, np.int32), np.array(blocks, np.int32))


def plan(**changes) -> CheckpointPlan:
    empty = {
        "zero_blocks": NOTHING,
        "zero_state_slots": NOTHING,
        "restore": NO_COPIES,
        "intermediate_saves": {},
        "save": NO_COPIES,
    }
    return CheckpointPlan(**{**empty, **changes})


@pytest.fixture(params=[(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2])
def parts(request) -> dict:
    """Pages, states and a store over them; every word random, NaN patterns included."""
    page_dtype, ssm_dtype = request.param
    generator = torch.Generator().manual_seed(11)

    def words(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        count = int(np.prod(shape)) * dtype.itemsize // 4
        filled = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=generator)
        return filled.view(dtype).view(*shape)

    page = (NUM_BLOCKS * BLOCK + KERNEL_BLOCK, KV_HEADS, HEAD)
    tensors = {
        "k": [words(*page, dtype=page_dtype) for _ in range(2)],
        "v": [words(*page, dtype=page_dtype) for _ in range(2)],
        "conv": [words(ROWS, 3, 32, dtype=page_dtype) for _ in range(sum(SIZES))],
        "ssm": [words(ROWS, 3, 16, 16, dtype=ssm_dtype) for _ in range(sum(SIZES))],
    }
    layout = make_layout(
        state=StateShape((3, 32), page_dtype.itemsize, (3, 16, 16), ssm_dtype.itemsize),
        block_size=BLOCK,
        num_blocks=NUM_BLOCKS,
        page_bytes=2 * BLOCK * KV_HEADS * HEAD * page_dtype.itemsize,
        group_ids=(0, 1),
        group_sizes=SIZES,
        num_attention_layers=2,
    )
    return {**tensors, "store": GDNCheckpointStore(layout, **tensors)}


def snapshot(parts: dict) -> dict[str, list[torch.Tensor]]:
    """Every tensor as words: NaN does not equal itself."""
    return {
        name: [t.reshape(t.shape[0], -1).view(torch.int32).clone() for t in parts[name]]
        for name in ("k", "v", "conv", "ssm")
    }


def changed_rows(before: dict, after: dict, name: str) -> list[set[int]]:
    return [
        set(torch.nonzero((a != b).any(dim=1))[:, 0].tolist()) for a, b in zip(before[name], after[name], strict=True)
    ]


def test_a_saved_state_is_restored_bit_for_bit(parts: dict) -> None:
    store, before = parts["store"], snapshot(parts)
    store.save(copies([1, 4], [[2, 6], [3, 5]]))
    for tensor in (*parts["conv"], *parts["ssm"]):
        tensor[[1, 4]] = 0
    store.restore(copies([4, 1], [[6, 2], [5, 3]]))
    after = snapshot(parts)
    for name in ("conv", "ssm"):
        for a, b in zip(before[name], after[name], strict=True):
            assert torch.equal(a, b)


def test_a_restore_into_another_slot_brings_the_same_words(parts: dict) -> None:
    parts["store"].save(copies([1], [[2], [3]]))
    parts["store"].restore(copies([5], [[2], [3]]))
    for tensor in (*parts["conv"], *parts["ssm"]):
        assert torch.equal(tensor[5].reshape(-1).view(torch.int32), tensor[1].reshape(-1).view(torch.int32))


def test_a_save_changes_the_blocks_of_its_groups_alone(parts: dict) -> None:
    before = snapshot(parts)
    parts["store"].save(copies([1], [[2], [3]]))
    after = snapshot(parts)
    assert changed_rows(before, after, "conv") == changed_rows(before, after, "ssm") == [set()] * 3
    rows = {block: set(range(block * BLOCK, (block + 1) * BLOCK)) for block in (2, 3)}
    # Group 0 has layers at both positions, group 1 at the first alone; the padding kernel block never changes.
    for name in ("k", "v"):
        first, second = changed_rows(before, after, name)
        assert first <= rows[2] | rows[3] and second <= rows[2]
        assert first & rows[2] and first & rows[3] and second & rows[2]


def test_zeroing_comes_before_restoring_and_touches_nothing_else(parts: dict) -> None:
    store = parts["store"]
    store.save(copies([1], [[2], [3]]))
    before = snapshot(parts)
    store.before_forward(
        plan(
            zero_blocks=np.array([5], np.int32),
            zero_state_slots=np.array([0], np.int32),
            restore=copies([4], [[2], [3]]),
        )
    )
    after = snapshot(parts)
    for name in ("conv", "ssm"):
        assert changed_rows(before, after, name) == [{0, 4}] * 3
        assert not any(words[0].any() for words in after[name])
        assert all(torch.equal(words[4], words[1]) for words in after[name])
    rows = set(range(5 * BLOCK, 6 * BLOCK))
    for name in ("k", "v"):
        assert changed_rows(before, after, name) == [rows] * 2
        assert not any(words[list(rows)].any() for words in after[name])


def test_a_block_that_became_a_checkpoint_in_the_pass_that_zeroes_it_keeps_its_checkpoint(parts: dict) -> None:
    store, step = parts["store"], plan(zero_blocks=np.array([2], np.int32), save=copies([1], [[2], [3]]))
    store.before_forward(step)
    store.save(step.save)
    store.restore(copies([5], [[2], [3]]))
    for tensor in (*parts["conv"], *parts["ssm"]):
        assert torch.equal(tensor[5].reshape(-1).view(torch.int32), tensor[1].reshape(-1).view(torch.int32))


def test_without_a_cache_slots_and_pages_are_zeroed_and_nothing_is_kept(parts: dict) -> None:
    plain = StateZeroer(NUM_BLOCKS, BLOCK, parts["k"], parts["v"], parts["conv"], parts["ssm"])
    before = snapshot(parts)
    step = plan(zero_state_slots=np.array([3], np.int32), save=copies([1], [[2], [3]]))
    plain.before_forward(step)
    plain.save(step.save)
    after = snapshot(parts)
    assert changed_rows(before, after, "ssm") == [{3}] * 3 and changed_rows(before, after, "k") == [set()] * 2


def test_it_describes_itself_in_numbers(parts: dict) -> None:
    line = parts["store"].describe()
    assert "2 GDN groups of 2/1 layers" in line and "B = 32 tokens" in line and "3 blocks per cached boundary" in line
    assert str(parts["store"].layout.checkpoint_bytes) in line


@pytest.mark.parametrize(("given", "wanted"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16)])
def test_row_counts_are_padded_to_powers_of_two_by_the_last_row(given: int, wanted: int) -> None:
    made = padded(np.arange(given, dtype=np.int32))
    assert len(made) == wanted and made.dtype == np.int32
    assert made[:given].tolist() == list(range(given)) and set(made[given:].tolist()) <= {given - 1}
