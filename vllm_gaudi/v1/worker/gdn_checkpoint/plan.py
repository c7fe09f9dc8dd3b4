# SPDX-License-Identifier: Apache-2.0
"""When state moves: what one step zeroes, restores and saves. A pure function of the step; numpy only.

Owns: the rule. A request admitted with k*B tokens computed resumes from entry k-1 of every GDN group; one admitted with
nothing starts from zeros; a step that ends on k*B saves into entry k-1, prefill or decode alike, because the scheduler
publishes that block's hash whether or not anybody will use it.
Never: tensors, or any other entry of a block table (entries of freed blocks stay in it).

Ordering rule: zero, then restore, then the forward, then save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm_gaudi.v1.worker.requests import StepRequests


@dataclass(frozen=True)
class RowCopies:
    """N copies between a slot and one block in each of G GDN groups."""

    slots: np.ndarray  # [N] int32
    blocks: np.ndarray  # [G, N] int32

    @property
    def num_copies(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class CheckpointPlan:
    zero_blocks: np.ndarray  # [Z] int32: attention blocks
    zero_slots: np.ndarray  # [n] int32
    restore: RowCopies
    save: RowCopies


def plan_checkpoints(step: StepRequests, block_size: int, gdn_groups: Sequence[int]) -> CheckpointPlan:
    """What ``step`` does to state. ``block_size``: B tokens; ``gdn_groups``: indices into the step's block tables.

    ``gdn_groups`` is empty where nothing is cached; then every admitted slot is zeroed. Raises RuntimeError when a
    request resumes off a boundary, or when a block that must exist is the null block.
    """
    admitted = np.flatnonzero(step.admitted)
    resumed = admitted[step.num_computed[admitted] > 0] if len(gdn_groups) else admitted[:0]
    fresh = np.setdiff1d(admitted, resumed, assume_unique=True)
    on_boundary = step.end % block_size == 0 if len(gdn_groups) else np.zeros(step.num_reqs, bool)
    off_grid = resumed[step.num_computed[resumed] % block_size != 0]
    if len(off_grid):
        i = int(off_grid[0])
        raise RuntimeError(
            f"request {step.req_ids[i]} resumes at {step.num_computed[i]} tokens, which is not a multiple of B = "
            f"{block_size}; there is no checkpoint there (is --prefix-match-unit set, or a KV connector used?)"
        )
    return CheckpointPlan(
        zero_blocks=step.fresh_blocks,
        zero_slots=step.slots[fresh],
        restore=_copies(step, resumed, step.num_computed, block_size, gdn_groups),
        save=_copies(step, np.flatnonzero(on_boundary), step.end, block_size, gdn_groups),
    )


def _copies(
    step: StepRequests, rows: np.ndarray, boundary: np.ndarray, block_size: int, gdn_groups: Sequence[int]
) -> RowCopies:
    """Slots of ``rows`` and, per group, the block of the entry that ends at ``boundary`` [R] tokens."""
    entries = boundary[rows] // block_size - 1
    blocks = np.stack([step.block_ids[g][rows, entries] for g in gdn_groups]) if len(gdn_groups) else rows[None][:0]
    if (blocks == 0).any():
        group, n = (int(x) for x in np.argwhere(blocks == 0)[0])
        raise RuntimeError(
            f"request {step.req_ids[int(rows[n])]} has the null block at entry {int(entries[n])} of KV cache group "
            f"{gdn_groups[group]}, where the checkpoint of {int(boundary[rows[n]])} tokens must stand"
        )
    return RowCopies(slots=step.slots[rows], blocks=blocks.astype(np.int32))
