# SPDX-License-Identifier: Apache-2.0
"""The slot pool: one small number per running request, under which its live GDN state and last token stand.

Owns: the free list. Never: tensors, or the meaning of a slot.

Ordering rule: free before take. Slots are handed out lowest first and the callers free and take in sorted or scheduler
order, so every tensor-parallel rank hands out the same ones.
"""

from __future__ import annotations

import heapq

NUM_RESERVED_ROWS = 2
"""State rows after the slots: ZERO (never written, read by padding) and TRASH (never read, written by padding)."""


class StateSlotPool:
    """``num_slots`` slots, 0 .. num_slots - 1."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._taken: set[int] = set()

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def take(self) -> int:
        """The lowest free slot. Raises RuntimeError when none is free."""
        if not self._free:
            raise RuntimeError(
                f"all {self.num_slots} slots are taken: more requests run at once than max_num_seqs, or a slot of a "
                "preempted or finished request was not given back"
            )
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. Raises RuntimeError when it was not taken."""
        if slot not in self._taken:
            raise RuntimeError(f"slot {slot} is given back but was not taken")
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)
