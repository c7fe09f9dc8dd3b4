# SPDX-License-Identifier: Apache-2.0
"""When state moves: what one step zeroes, restores and saves. A pure function of the step; numpy only.

Owns: the rule. A request admitted with k*B tokens computed resumes from entry k-1 of every GDN group; one admitted with
nothing starts from zeros. A boundary k*B that a step crosses is saved into entry k-1, where the scheduler has put a
block there; the null block there means that this boundary is not kept. A boundary that the step ends on is in the slot
then, prefill or decode alike; one that it crosses on the way is in a staging row after its forward.
Never: tensors, or any other entry of a block table (entries of freed blocks stay in it).

Ordering rule: zero, then restore, then each forward with the saves of its staging rows, then the saves of slots.
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
    """N copies between a state row and one block in each of G GDN groups."""

    rows: np.ndarray  # [N] int32: slots or staging rows
    blocks: np.ndarray  # [G, N] int32

    @property
    def num_copies(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Crossed:
    """The boundaries to be kept that one request's chunk runs over, S of them."""

    tokens: np.ndarray  # [S] int32: from the chunk's first token, ascending
    blocks: np.ndarray  # [G, S] int32


@dataclass(frozen=True)
class CheckpointPlan:
    zero_blocks: np.ndarray  # [Z] int32: attention blocks
    zero_slots: np.ndarray  # [n] int32
    restore: RowCopies
    crossed: dict[int, Crossed]  # by index into the step's requests
    save: RowCopies


def plan_checkpoints(step: StepRequests, block_size: int, gdn_groups: Sequence[int]) -> CheckpointPlan:
    """What ``step`` does to state. ``block_size``: B tokens; ``gdn_groups``: indices into the step's block tables.

    ``gdn_groups`` is empty where nothing is cached; then every admitted slot is zeroed. Raises RuntimeError when a
    request resumes off a boundary, when the block that it resumes from is the null block, or when a boundary has a
    block in some GDN groups only.
    """
    admitted = np.flatnonzero(step.admitted)
    resumed = admitted[step.num_computed[admitted] > 0] if len(gdn_groups) else admitted[:0]
    fresh = np.setdiff1d(admitted, resumed, assume_unique=True)
    off_grid = resumed[step.num_computed[resumed] % block_size != 0]
    if len(off_grid):
        i = int(off_grid[0])
        raise RuntimeError(
            f"request {step.req_ids[i]} resumes at {step.num_computed[i]} tokens, which is not a multiple of B = "
            f"{block_size}; there is no checkpoint there (is --prefix-match-unit set, or a KV connector used?)"
        )
    crossed, save = _saves(step, block_size, gdn_groups)
    return CheckpointPlan(
        zero_blocks=step.fresh_blocks,
        zero_slots=step.slots[fresh],
        restore=_restores(step, resumed, block_size, gdn_groups),
        crossed=crossed,
        save=save,
    )


def _restores(step: StepRequests, rows: np.ndarray, block_size: int, gdn_groups: Sequence[int]) -> RowCopies:
    """Slots of the requests ``rows`` and, per group, the block of the entry that ends where they resume."""
    entries = step.num_computed[rows] // block_size - 1
    blocks = np.stack([step.block_ids[g][rows, entries] for g in gdn_groups]) if len(gdn_groups) else rows[None][:0]
    if (blocks == 0).any():
        group, n = (int(x) for x in np.argwhere(blocks == 0)[0])
        raise RuntimeError(
            f"request {step.req_ids[int(rows[n])]} has the null block at entry {int(entries[n])} of KV cache group "
            f"{gdn_groups[group]}, where the checkpoint of {step.num_computed[rows[n]]} tokens must stand"
        )
    return RowCopies(rows=step.slots[rows], blocks=blocks.astype(np.int32))


def _saves(step: StepRequests, block_size: int, gdn_groups: Sequence[int]) -> tuple[dict[int, Crossed], RowCopies]:
    """What is saved on the way, by request, and from the slots at the end."""
    crossed: dict[int, Crossed] = {}
    slots: list[int] = []
    at_end: list[np.ndarray] = []
    first, last = step.num_computed // block_size, step.end // block_size
    for i in np.flatnonzero(last > first).tolist() if len(gdn_groups) else ():
        entries = np.arange(first[i], last[i])
        blocks = np.stack([step.block_ids[g][i, entries] for g in gdn_groups])
        kept = (blocks != 0).any(axis=0)
        if (blocks[:, kept] == 0).any():
            boundary = int((entries[kept][(blocks[:, kept] == 0).any(axis=0)][0] + 1) * block_size)
            raise RuntimeError(
                f"request {step.req_ids[i]} has a block for the checkpoint of {boundary} tokens in some of the KV "
                f"cache groups {tuple(gdn_groups)} and the null block in others"
            )
        if kept[-1] and step.end[i] % block_size == 0:
            slots.append(int(step.slots[i]))
            at_end.append(blocks[:, -1])
            kept[-1] = False
        if kept.any():
            tokens = (entries[kept] + 1) * block_size - step.num_computed[i]
            crossed[i] = Crossed(tokens.astype(np.int32), blocks[:, kept].astype(np.int32))
    ends = np.stack(at_end, axis=1) if at_end else np.zeros((len(gdn_groups), 0))
    return crossed, RowCopies(rows=np.asarray(slots, np.int32), blocks=ends.astype(np.int32))
