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
    runner.store.restore = lambda copies: None


def _skip_save(runner: Any) -> None:
    runner.store.save = lambda copies: None


def _skip_zero(runner: Any) -> None:
    """Neither fresh pages nor fresh slots are zeroed."""
    before = runner.store.before_forward
    nothing = np.zeros(0, np.int32)
    runner.store.before_forward = lambda plan: before(
        dataclasses.replace(plan, zero_blocks=nothing, zero_slots=nothing)
    )


def _save_one_boundary_late(runner: Any) -> None:
    """A checkpoint is written when the request's next one is due, into the block of the earlier boundary."""
    save = runner.store.save
    waiting: dict[int, np.ndarray] = {}

    def late(copies: RowCopies) -> None:
        for n, slot in enumerate(copies.slots.tolist()):
            earlier = waiting.get(slot)
            waiting[slot] = copies.blocks[:, n : n + 1]
            if earlier is not None:
                save(RowCopies(copies.slots[n : n + 1], earlier))

    runner.store.save = late


def _wrong_group(runner: Any) -> None:
    """The checkpoint of each group goes into the block of the next group."""
    save = runner.store.save
    runner.store.save = lambda copies: save(RowCopies(copies.slots, np.roll(copies.blocks, 1, axis=0)))


FAULTS: dict[str, Callable[[Any], None]] = {
    "skip_restore": _skip_restore,
    "skip_save": _skip_save,
    "skip_zero": _skip_zero,
    "save_one_boundary_late": _save_one_boundary_late,
    "wrong_group": _wrong_group,
}


def put_in(runner: Any, name: str) -> None:
    """Break ``runner`` by the fault of this name."""
    FAULTS[name](runner)
