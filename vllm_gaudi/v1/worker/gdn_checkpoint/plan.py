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
class IntermediateSaves:
    """The boundaries to be kept that one request's chunk runs over, S of them."""

    tokens: np.ndarray  # [S] int32: from the chunk's first token, ascending
    blocks: np.ndarray  # [G, S] int32


@dataclass(frozen=True)
class CheckpointPlan:
    zero_blocks: np.ndarray  # [Z] int32: attention blocks
    zero_state_slots: np.ndarray  # [n] int32
    restore: RowCopies
    intermediate_saves: dict[int, IntermediateSaves]  # by index into the step's requests
    save: RowCopies


def plan_checkpoints(step: StepRequests, block_size: int, gdn_groups: Sequence[int]) -> CheckpointPlan:
    """What ``step`` does to state. ``block_size``: B tokens; ``gdn_groups``: indices into the step's block tables.

    ``gdn_groups`` is empty where nothing is cached; then every admitted slot is zeroed. Raises RuntimeError when a
    request resumes off a boundary, when the block that it resumes from is the null block, or when a boundary has a
    block in some GDN groups only.
    """
    fresh: list[int] = []
    resumed: list[int] = []
    for i in np.flatnonzero(step.admitted).tolist():
        (resumed if len(gdn_groups) and step.num_computed_tokens[i] > 0 else fresh).append(i)
    intermediate_saves, save = _saves(step, block_size, gdn_groups)
    return CheckpointPlan(
        zero_blocks=step.fresh_blocks,
        zero_state_slots=step.state_slots[fresh],
        restore=_restores(step, resumed, block_size, gdn_groups),
        intermediate_saves=intermediate_saves,
        save=save,
    )


def _restores(step: StepRequests, rows: Sequence[int], block_size: int, gdn_groups: Sequence[int]) -> RowCopies:
    """Slots of the requests ``rows`` and, per group, the block of the entry that ends where they resume."""
    sources: list[list[int]] = []
    for i in rows:
        computed = int(step.num_computed_tokens[i])
        if computed % block_size:
            raise RuntimeError(
                f"request {step.req_ids[i]} resumes at {computed} tokens, which is not a multiple of B = {block_size}; "
                "there is no checkpoint there (is --prefix-match-unit set, or a KV connector used?)"
            )
        entry = computed // block_size - 1
        sources.append([int(step.block_ids[g][i, entry]) for g in gdn_groups])
        if not all(sources[-1]):
            raise RuntimeError(
                f"request {step.req_ids[i]} has the null block at entry {entry} of KV cache group "
                f"{gdn_groups[sources[-1].index(0)]}, where the checkpoint of {computed} tokens must stand"
            )
    return _copies([int(step.state_slots[i]) for i in rows], sources, len(gdn_groups))


def _copies(rows: list[int], blocks: list[list[int]], num_groups: int) -> RowCopies:
    """``blocks`` [N][G] of state rows [N]."""
    return RowCopies(np.array(rows, np.int32), np.array(blocks, np.int32).reshape(len(rows), num_groups).T)


def _saves(
    step: StepRequests, block_size: int, gdn_groups: Sequence[int]
) -> tuple[dict[int, IntermediateSaves], RowCopies]:
    """What is saved on the way, by request, and from the slots at the end. Plain integers: a step crosses few."""
    intermediate_saves: dict[int, IntermediateSaves] = {}
    slots: list[int] = []
    at_end: list[list[int]] = []
    tables = [step.block_ids[g] for g in gdn_groups]
    crosses = step.end // block_size != step.num_computed_tokens // block_size
    for i in np.flatnonzero(crosses).tolist() if tables else ():
        start, end = int(step.num_computed_tokens[i]), int(step.end[i])
        tokens: list[int] = []
        on_the_way: list[list[int]] = []
        for entry in range(start // block_size, end // block_size):
            blocks = [int(table[i, entry]) for table in tables]
            boundary = (entry + 1) * block_size
            if not any(blocks):
                continue
            if not all(blocks):
                raise RuntimeError(
                    f"request {step.req_ids[i]} has a block for the checkpoint of {boundary} tokens in some of the KV "
                    f"cache groups {tuple(gdn_groups)} and the null block in others"
                )
            if boundary == end:
                slots.append(int(step.state_slots[i]))
                at_end.append(blocks)
            else:
                tokens.append(boundary - start)
                on_the_way.append(blocks)
        if tokens:
            intermediate_saves[i] = IntermediateSaves(np.array(tokens, np.int32), np.array(on_the_way, np.int32).T)
    return intermediate_saves, _copies(slots, at_end, len(tables))
