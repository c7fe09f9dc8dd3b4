# SPDX-License-Identifier: Apache-2.0
"""Fault switches: ways to break a running engine's checkpoints, so that a test can show that its gate turns red.

Owns: the table of faults. Never: used outside tests.

Ordering rule: a fault is put in after the engine has started and stays until the engine is closed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_gaudi.v1.worker.gdn_checkpoint.plan import RowCopies


def _skip_restore(runner: Any) -> None:
    runner.step.store.restore = lambda copies: None


def _skip_save(runner: Any) -> None:
    runner.step.store.save = lambda copies: None


def _skip_zero(runner: Any) -> None:
    """Neither fresh pages nor fresh slots are zeroed."""
    before = runner.step.store.before_forward
    nothing = np.zeros(0, np.int32)
    runner.step.store.before_forward = lambda plan: before(
        dataclasses.replace(plan, zero_blocks=nothing, zero_state_slots=nothing)
    )


def _save_one_boundary_late(runner: Any) -> None:
    """A checkpoint is written when the request's next one is due, into the block of the earlier boundary."""
    save = runner.step.store.save
    waiting: dict[int, np.ndarray] = {}

    def late(copies: RowCopies) -> None:
        for n, slot in enumerate(copies.rows.tolist()):
            earlier = waiting.get(slot)
            waiting[slot] = copies.blocks[:, n : n + 1]
            if earlier is not None:
                save(RowCopies(copies.rows[n : n + 1], earlier))

    runner.step.store.save = late


def _wrong_group(runner: Any) -> None:
    """The checkpoint of each group goes into the block of the next group."""
    save = runner.step.store.save
    runner.step.store.save = lambda copies: save(RowCopies(copies.rows, np.roll(copies.blocks, 1, axis=0)))


def _skip_staged(runner: Any) -> None:
    """States of boundaries that a forward runs over stay in their staging rows."""
    save = runner.step.store.save
    runner.step.store.save = lambda copies: save(copies) if _is_at_end(runner, copies) else None


def _neighbours_staging_row(runner: Any) -> None:
    """Each boundary on the way gets the state of the one before it, the first one that of the last."""
    save = runner.step.store.save
    runner.step.store.save = lambda copies: save(
        copies if _is_at_end(runner, copies) else RowCopies(_next_staging_row(runner, copies.rows), copies.blocks)
    )


def _is_at_end(runner: Any, copies: RowCopies) -> bool:
    return not (copies.rows >= runner.step.caches.first_staging_row).any()


def _next_staging_row(runner: Any, rows: np.ndarray) -> np.ndarray:
    first, count = runner.step.caches.first_staging_row, runner.step.grid.num_staging
    return (first + (rows - first - 1) % count).astype(np.int32)


def _keep_nothing_for_good(scheduler: Any) -> None:
    ledger = scheduler._ledger
    ledger._is_kept = lambda request, boundary: False
    ledger._has_room = lambda is_unretained: False


def _pin_sources(scheduler: Any) -> None:
    for manager in scheduler._gdn_managers:
        manager.release_sources = manager._sources.clear


def _leave_siblings(scheduler: Any) -> None:
    """When one block of a checkpoint is handed out, the others keep their hashes."""
    scheduler._ledger._reused = lambda block: None


def _take_half(scheduler: Any) -> None:
    """The last GDN group gets no block for a checkpoint."""
    take = scheduler._ledger.allocate
    scheduler._ledger.allocate = lambda ranges: {
        name: [(*blocks[:-1], 0) for blocks in boundaries] for name, boundaries in take(ranges).items()
    }


SCHEDULER_FAULTS: dict[str, Callable[[Any], None]] = {
    "keep_nothing_for_good": _keep_nothing_for_good,
    "pin_sources": _pin_sources,
    "leave_siblings": _leave_siblings,
    "take_half": _take_half,
}

FAULTS: dict[str, Callable[[Any], None]] = {
    "skip_restore": _skip_restore,
    "skip_save": _skip_save,
    "skip_zero": _skip_zero,
    "save_one_boundary_late": _save_one_boundary_late,
    "wrong_group": _wrong_group,
    "skip_staged": _skip_staged,
    "neighbours_staging_row": _neighbours_staging_row,
}


def put_in(runner: Any, name: str) -> None:
    """Break ``runner`` by the fault of this name."""
    FAULTS[name](runner)


def put_in_scheduler(scheduler: Any, name: str) -> None:
    """Break ``scheduler`` by the fault of this name."""
    SCHEDULER_FAULTS[name](scheduler)
