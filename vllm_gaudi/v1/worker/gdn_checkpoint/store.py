# SPDX-License-Identifier: Apache-2.0
"""The checkpoint store: moves GDN state between live slots and the K/V pages of cached blocks, bit for bit.

Owns: the int32 views of pages and state tensors (made once, here, outside any compiled code) and the moments of a
step at which bytes move.
Never: which requests (``plan``), where in the page (``layout``), block ownership (vLLM's block pool).

Ordering rule: inside ``before_forward``, zero fresh attention pages and fresh slots, then restore. A block of the zero
list may have become a checkpoint block within the same scheduling step, so zeroing comes before every restore and save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_gaudi import device
from vllm_gaudi.ops.row_copy import copy_rows_, zero_rows_
from vllm_gaudi.v1.worker.gdn_checkpoint.layout import CheckpointLayout
from vllm_gaudi.v1.worker.gdn_checkpoint.plan import CheckpointPlan, RowCopies


class StateZeroer:
    """What a step needs where nothing is cached: fresh pages and slots are zeroed, nothing else moves.

    ``k``, ``v``: attention pages by position, [tokens, kv_heads, head], the pool's blocks of ``block_size`` tokens and
    the padding kernel block behind them; ``conv``, ``ssm``: live state per GDN layer in group order, [rows, ...]; all
    are aliased and mutated. ``num_blocks`` of the pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        conv: Sequence[torch.Tensor],
        ssm: Sequence[torch.Tensor],
    ):
        self._device = k[0].device
        self._pages = {
            "k": [_pages(t, num_blocks, block_size) for t in k],
            "v": [_pages(t, num_blocks, block_size) for t in v],
        }
        self._states = {"conv": [_rows(t) for t in conv], "ssm": [_rows(t) for t in ssm]}

    def before_forward(self, plan: CheckpointPlan) -> None:
        """Write zeros over the K and V pages of ``zero_blocks`` and the state rows of ``zero_state_slots``."""
        for tensors, rows in ((self._pages, plan.zero_blocks), (self._states, plan.zero_state_slots)):
            flat = [tensor for part in tensors.values() for tensor in part]
            if len(rows) and flat:
                zero_rows_(flat, self._upload(padded(rows)))

    def save(self, copies: RowCopies) -> None:
        """Nothing is kept."""

    def warm_up(self, trash_row: int, most: int) -> None:
        """Zero the null block and the state row ``trash_row``, at every size that up to ``most`` rows are padded to."""
        for size in _sizes(most):
            rows = np.full(size, trash_row, np.int32)
            nothing = RowCopies(rows[:0], np.empty((0, 0), np.int32))
            self.before_forward(
                CheckpointPlan(np.zeros(size, np.int32), rows, restore=nothing, intermediate_saves={}, save=nothing)
            )

    def describe(self) -> str:
        """One line for the operator."""
        return "Prefix caching keeps no GDN checkpoints"

    def _upload(self, rows: np.ndarray) -> torch.Tensor:
        return device.upload(rows, self._device)


class GDNCheckpointStore(StateZeroer):
    """Adds checkpoints: arguments as for ``StateZeroer``, and the layout that says where they stand."""

    def __init__(
        self,
        layout: CheckpointLayout,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        conv: Sequence[torch.Tensor],
        ssm: Sequence[torch.Tensor],
    ):
        super().__init__(layout.num_blocks, layout.block_size, k, v, conv, ssm)
        self.layout = layout
        # Per GDN group: the page side and the state side of every segment of every layer, pairwise.
        self._page_side: list[list[torch.Tensor]] = []
        self._state_side: list[list[torch.Tensor]] = []
        layer = 0
        for positions in layout.layer_indices:
            page_side, state_side = [], []
            for position in positions:
                for part in layout.segments:
                    page = self._pages[part.half][position]
                    state = self._states[part.state][layer]
                    page_side.append(page[:, part.page_word : part.page_word + part.num_words])
                    state_side.append(state[:, part.state_word : part.state_word + part.num_words])
                layer += 1
            self._page_side.append(page_side)
            self._state_side.append(state_side)

    def before_forward(self, plan: CheckpointPlan) -> None:
        """Zero what is fresh, then restore what resumes. Mutates pages of ``zero_blocks`` and the admitted slots."""
        super().before_forward(plan)
        self.restore(plan.restore)

    def restore(self, copies: RowCopies) -> None:
        """Block -> state row, for every layer of every GDN group."""
        if copies.num_copies:
            rows = self._upload(padded(copies.rows))
            for group, blocks in enumerate(copies.blocks):
                copy_rows_(self._state_side[group], self._page_side[group], rows, self._upload(padded(blocks)))

    def save(self, copies: RowCopies) -> None:
        """State row -> block, for every layer of every GDN group."""
        if copies.num_copies:
            rows = self._upload(padded(copies.rows))
            for group, blocks in enumerate(copies.blocks):
                copy_rows_(self._page_side[group], self._state_side[group], self._upload(padded(blocks)), rows)

    def warm_up(self, trash_row: int, most: int) -> None:
        """As without checkpoints; and copy the null block to the state row and back."""
        super().warm_up(trash_row, most)
        for size in _sizes(most):
            rows = np.full(size, trash_row, np.int32)
            copies = RowCopies(rows, np.zeros((len(self.layout.group_ids), size), np.int32))
            self.restore(copies)
            self.save(copies)

    def read(self, group: int, block: int) -> list[torch.Tensor]:
        """For tests and tools: words of the checkpoint in ``block`` of the ``group``-th GDN group, by segment."""
        return [page[block].clone() for page in self._page_side[group]]

    def describe(self) -> str:
        """One line for the operator: groups, B, packing, bytes and blocks of a checkpoint."""
        layout = self.layout
        sizes = {half: sum(s.num_words for s in layout.segments if s.half == half) for half in ("k", "v")}
        fill = {half: 100 * words / layout.page_words for half, words in sizes.items()}
        return (
            f"GDN checkpoint store is active (mamba_cache_mode align): {len(layout.group_ids)} GDN groups of "
            f"{'/'.join(str(len(p)) for p in layout.layer_indices)} layers, B = {layout.block_size} tokens, "
            f"{'whole heads' if layout.whole_heads else 'SSM cut at the end of K'} "
            f"(K half {fill['k']:.0f} % full, V half {fill['v']:.0f} %), "
            f"{layout.checkpoint_bytes} bytes per checkpoint, {layout.blocks_per_boundary} blocks per cached boundary, "
            "0 blocks pinned per running request"
        )


def _pages(cache: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """[num_blocks, page_words] int32 over one K or V tensor, without its padding kernel block."""
    return cache[: num_blocks * block_size].view(num_blocks, -1).view(torch.int32)


def _rows(state: torch.Tensor) -> torch.Tensor:
    """[rows, words] int32 over one state tensor."""
    return state.view(state.shape[0], -1).view(torch.int32)


def padded(rows: np.ndarray) -> np.ndarray:
    """[N] int32 -> [size] int32, N > 0: the last entry repeated, so that the number of shapes stays small."""
    num_padding = _sizes(len(rows))[-1] - len(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], num_padding)]).astype(np.int32)


def _sizes(most: int) -> tuple[int, ...]:
    """Powers of two up to the first that holds ``most`` rows."""
    return tuple(1 << power for power in range((most - 1).bit_length() + 1))
