# SPDX-License-Identifier: Apache-2.0
"""From a step's requests to padded model inputs: which rows run together, in which bucket, and with which padding.

Owns: the split of a step into forwards, all host-to-device uploads of a forward, and the last sampled token per slot.
Never: the model, sampling, or a shape outside the grid.

Ordering rule: the decode batch goes first, then prefills in scheduler order. A request admitted in this step may hit a
block that a decoding request fills in this very step, so its forward must come after the decode; an admitted request is
never in the decode batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_gaudi import device
from vllm_gaudi.attention.metadata import (
    DecodeAttention,
    HostHints,
    HPUAttentionMetadata,
    IntermediateStates,
    PrefillAttention,
)
from vllm_gaudi.bucketing.grid import BucketGrid, DecodeBucket, PrefillBucket, RowTiles
from vllm_gaudi.ops.linear import GemmRows
from vllm_gaudi.v1.worker.gdn_checkpoint.plan import IntermediateSaves, RowCopies
from vllm_gaudi.v1.worker.requests import StepRequests


@dataclass(frozen=True)
class ModelInputs:
    """One forward. ``members``: indices into the step's requests, in the order of the bucket's sequences."""

    bucket: PrefillBucket | DecodeBucket
    members: tuple[int, ...]
    input_ids: torch.Tensor  # [rows] int32
    positions: torch.Tensor  # [rows] int32, or [3, rows] for a model with multi-axis rotary positions
    attn: HPUAttentionMetadata
    logits_indices: torch.Tensor  # [batch] int64: the row of each sequence's last token (padding: row 0)
    staged: RowCopies | None = None  # what to save from the staging rows once the forward has run


@dataclass(frozen=True)
class ScheduledSequence:
    """What one request runs in a forward."""

    tokens: np.ndarray  # [n] int32, undefined for a decode, whose token is on the device
    num_computed_tokens: int  # tokens before the first of them
    kernel_blocks: np.ndarray  # [m] int32: ids of the kernel blocks of all its tokens
    state_slot: int


@dataclass(frozen=True)
class PaddingRows:
    """Where padding points: real rows that nobody's result depends on."""

    padding_block: int  # kernel block id
    zero_row: int  # state row, read by padding
    trash_row: int  # state row, written by padding
    staging_row: int = 0  # the first of the state rows that take the states of boundaries on the way


class InputBuilder:
    """Builds the forwards of a step.

    ``attention_group``: index of the attention group in the step's block tables; ``kernel_block`` tokens;
    ``kernel_blocks_per_block``; ``num_slots``; ``position_axes``: 1, or 3 for multi-axis rotary positions;
    ``tiles``, ``expert_tiles`` and ``with_hints`` as in ``ExecutionMode``.
    """

    def __init__(
        self,
        grid: BucketGrid,
        padding: PaddingRows,
        *,
        tiles: RowTiles | None,
        expert_tiles: RowTiles | None,
        with_hints: bool,
        attention_group: int,
        kernel_block: int,
        kernel_blocks_per_block: int,
        num_slots: int,
        position_axes: int,
        device: torch.device,
    ):
        self._grid = grid
        self._padding = padding
        self._tiles = tiles
        self._expert_tiles = expert_tiles
        self._attention_group = attention_group
        self._kernel_block = kernel_block
        self._per_block = kernel_blocks_per_block
        self._axes = position_axes
        self._device = device
        self._with_hints = with_hints
        # After the slots: what padding reads, and where the tokens of padding go.
        self._last_tokens = torch.zeros(num_slots + 2, dtype=torch.int32, device=device)
        self._padding_row = num_slots

    def build(self, step: StepRequests, intermediate_saves: Mapping[int, IntermediateSaves]) -> Iterator[ModelInputs]:
        """The forwards of ``step``, in the order in which they must run.

        ``intermediate_saves``: by index into ``step``, the boundaries whose states are kept on the way. All forwards
        use the same staging rows, so what one has staged is saved before the next one runs.
        """
        decodes = np.flatnonzero(~step.is_prefill)
        for members in self._decode_batches(step, decodes):
            yield self._decode_inputs(step, members)
        for members in self._prefill_batches(step, np.flatnonzero(step.is_prefill)):
            yield self._prefill_inputs(step, members, intermediate_saves)

    def store_sampled_tokens(self, slots: np.ndarray, token_ids: torch.Tensor) -> None:
        """Keep sampled ``token_ids`` [rows] (device) as the next input of ``slots`` [n] int32, the first n of them."""
        rows = np.full(token_ids.shape[0], self._padding_row + 1, np.int64)
        rows[: len(slots)] = slots
        self._last_tokens.index_copy_(0, self._upload(rows, np.int64), token_ids.to(torch.int32))

    def dummy_inputs(self, bucket: PrefillBucket | DecodeBucket) -> ModelInputs:
        """Inputs of ``bucket`` made of padding alone, for profiling and warm-up."""
        if isinstance(bucket, PrefillBucket):
            return self._prefill_tensors(bucket, (), [], {})
        return self._decode_tensors(bucket, (), [])

    # Which rows run together

    def _decode_batches(self, step: StepRequests, members: np.ndarray) -> Iterator[list[int]]:
        """Cut the decoding rows where the block buckets ends: shared blocks count once for each reader."""
        batch: list[int] = []
        blocks = 0
        for i in members.tolist():
            needed = self._num_kernel_blocks(int(step.end[i]))
            if batch and blocks + needed > self._grid.decode_blocks[-1]:
                yield batch
                batch, blocks = [], 0
            batch.append(i)
            blocks += needed
        if batch:
            yield batch

    def _prefill_batches(self, step: StepRequests, members: np.ndarray) -> Iterator[list[int]]:
        """Neighbours in scheduler order share a forward while they fit the grid together."""
        batch: list[int] = []
        queries: list[int] = []
        for i in members.tolist():
            queries.append(int(step.num_scheduled_tokens[i]))
            if batch and not self._grid.fits_one_forward(len(queries), max(queries), min(queries)):
                yield batch
                batch, queries = [], queries[-1:]
            batch.append(i)
        if batch:
            yield batch

    def _num_kernel_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._kernel_block)

    def _sequence(self, step: StepRequests, i: int) -> ScheduledSequence:
        num_kernel = self._num_kernel_blocks(int(step.end[i]))
        blocks = step.block_ids[self._attention_group][i, : -(-num_kernel // self._per_block)]
        kernel_blocks = (blocks[:, None] * self._per_block + np.arange(self._per_block, dtype=np.int32)).reshape(-1)
        return ScheduledSequence(
            step.tokens[i], int(step.num_computed_tokens[i]), kernel_blocks[:num_kernel], int(step.state_slots[i])
        )

    # What a forward is given

    def _prefill_inputs(
        self, step: StepRequests, members: list[int], intermediate_saves: Mapping[int, IntermediateSaves]
    ) -> ModelInputs:
        intermediate = {n: intermediate_saves[i] for n, i in enumerate(members) if i in intermediate_saves}
        bucket = self._grid.prefill(
            len(members),
            int(step.num_scheduled_tokens[members].max()),
            int(step.end[members].max()),
            bool(intermediate),
        )
        sequences = [self._sequence(step, i) for i in members]
        return self._prefill_tensors(bucket, tuple(members), sequences, intermediate)

    def _prefill_tensors(
        self,
        bucket: PrefillBucket,
        members: tuple[int, ...],
        sequences: Sequence[ScheduledSequence],
        intermediate_saves: Mapping[int, IntermediateSaves],
    ) -> ModelInputs:
        batch, query = bucket.batch, bucket.query
        spare = self._padding.padding_block
        ids = np.zeros((batch, query), np.int32)
        positions = np.zeros((batch, query), np.int32)
        mapping = np.broadcast_to(spare * self._kernel_block + np.arange(query) % self._kernel_block, (batch, query))
        mapping = mapping.astype(np.int64)
        table = np.full((batch, bucket.blocks), spare, np.int32)
        num_computed_tokens = np.zeros(batch, np.int32)
        query_lens = np.zeros(batch, np.int32)
        for n, sequence in enumerate(sequences):
            length, blocks = len(sequence.tokens), sequence.kernel_blocks
            where = sequence.num_computed_tokens + np.arange(length)
            ids[n, :length] = sequence.tokens
            positions[n, :length] = where
            mapping[n, :length] = blocks[where // self._kernel_block] * self._kernel_block + where % self._kernel_block
            table[n, : len(blocks)] = blocks
            num_computed_tokens[n] = sequence.num_computed_tokens
            query_lens[n] = length
        read, write = self._state_indices(sequences, batch)
        last_row = np.arange(batch) * query + np.maximum(query_lens, 1) - 1
        intermediate, staged = self._intermediate_states(bucket, num_computed_tokens, intermediate_saves)
        attn = HPUAttentionMetadata(
            batch=batch,
            query=query,
            kernel_block=self._kernel_block,
            gemm_rows=self._prefill_gemm_rows(self._tiles, bucket, query_lens if members else None),
            expert_gemm_rows=self._prefill_gemm_rows(self._expert_tiles, bucket, query_lens if members else None),
            slot_mapping=self._upload(mapping.reshape(-1), np.int64),
            state_indices_in=self._upload(read, np.int64),
            state_indices_out=self._upload(write, np.int64),
            prefill=PrefillAttention(
                block_table=self._upload(table, np.int32),
                num_computed_tokens=self._upload(num_computed_tokens, np.int32),
                query_lens=self._upload(query_lens, np.int32),
            ),
            intermediate=intermediate,
            hints=self._hints(num_computed_tokens, sequences),
        )
        return ModelInputs(
            bucket=bucket,
            members=members,
            input_ids=self._upload(ids.reshape(-1), np.int32),
            positions=self._positions(positions.reshape(-1)),
            attn=attn,
            logits_indices=self._upload(last_row, np.int64),
            staged=staged,
        )

    @staticmethod
    def _prefill_gemm_rows(
        tiles: RowTiles | None, bucket: PrefillBucket, query_lens: np.ndarray | None
    ) -> GemmRows | None:
        """The products of a prefill; with short tiles they leave padding out. ``query_lens`` None: a dummy run."""
        if tiles is None:
            return None
        if not tiles.short_tile or query_lens is None:
            return GemmRows(tiles.prefill)
        slices = (
            (n * bucket.query + first, rows)
            for n, length in enumerate(query_lens.tolist())
            for first, rows in tiles.gemm_slices(length)
        )
        return GemmRows(tiles.prefill, tuple(slices))

    def _hints(self, num_computed_tokens: np.ndarray, sequences: Sequence[ScheduledSequence]) -> HostHints | None:
        """``num_computed_tokens`` [n]: before the first row of each sequence that attends, also of padding."""
        if not self._with_hints:
            return None
        least, most = (
            (int(num_computed_tokens.min()), int(num_computed_tokens.max())) if len(num_computed_tokens) else (0, 0)
        )
        return HostHints((least, most), tuple(sequence.state_slot for sequence in sequences))

    def _intermediate_states(
        self,
        bucket: PrefillBucket,
        num_computed_tokens: np.ndarray,
        intermediate_saves: Mapping[int, IntermediateSaves],
    ) -> tuple[IntermediateStates | None, RowCopies | None]:
        """Staging rows of ``intermediate_saves`` (by sequence), and what is saved from them afterwards."""
        if not bucket.boundaries:
            return None, None
        every = self._grid.block_size
        first = every - num_computed_tokens % every
        write = np.full((bucket.batch, bucket.boundaries), self._padding.trash_row, np.int64)
        rows, blocks = [], []
        for n, boundaries in intermediate_saves.items():
            which = (boundaries.tokens - first[n]) // every
            row = self._padding.staging_row + n * bucket.boundaries + which
            write[n, which] = row
            rows.append(row)
            blocks.append(boundaries.blocks)
        intermediate = IntermediateStates(
            offset=self._upload(first, np.int32),
            interval=every,
            state_indices_out=self._upload(write.reshape(-1), np.int64),
        )
        if not rows:
            return intermediate, None
        return intermediate, RowCopies(np.concatenate(rows).astype(np.int32), np.concatenate(blocks, axis=1))

    def _decode_inputs(self, step: StepRequests, members: list[int]) -> ModelInputs:
        sequences = [self._sequence(step, i) for i in members]
        bucket = self._grid.decode(len(members), sum(len(sequence.kernel_blocks) for sequence in sequences))
        return self._decode_tensors(bucket, tuple(members), sequences)

    def _decode_tensors(
        self, bucket: DecodeBucket, members: tuple[int, ...], sequences: Sequence[ScheduledSequence]
    ) -> ModelInputs:
        batch = bucket.batch
        spare = self._padding.padding_block
        positions = np.zeros(bucket.rows, np.int32)
        token_rows = np.full(bucket.rows, self._padding_row, np.int64)
        mapping = (spare * self._kernel_block + np.arange(batch) % self._kernel_block).astype(np.int64)
        block_list = np.full(bucket.blocks, spare, np.int32)
        # Padding of the list belongs to the last row, after its own blocks, and has no token that it sees.
        block_groups = np.full(bucket.blocks, batch - 1, np.int32)
        block_usage = np.zeros(bucket.blocks, np.int32)
        first_block = np.full(batch, bucket.blocks - 1, np.int32)
        used = 0
        for n, sequence in enumerate(sequences):
            start, blocks = sequence.num_computed_tokens, sequence.kernel_blocks
            positions[n] = start
            token_rows[n] = sequence.state_slot
            mapping[n] = blocks[start // self._kernel_block] * self._kernel_block + start % self._kernel_block
            end = used + len(blocks)
            block_list[used:end] = blocks
            block_groups[used:end] = n
            block_usage[used:end] = self._kernel_block
            block_usage[end - 1] = start % self._kernel_block + 1
            first_block[n] = used
            used = end
        read, write = self._state_indices(sequences, batch)
        attn = HPUAttentionMetadata(
            batch=batch,
            query=1,
            kernel_block=self._kernel_block,
            gemm_rows=None if self._tiles is None else GemmRows(self._tiles.decode),
            expert_gemm_rows=None if self._expert_tiles is None else GemmRows(self._expert_tiles.decode),
            slot_mapping=self._upload(mapping, np.int64),
            state_indices_in=self._upload(read, np.int64),
            state_indices_out=self._upload(write, np.int64),
            decode=DecodeAttention(
                block_list=self._upload(block_list, np.int32),
                block_groups=self._upload(block_groups, np.int32),
                block_usage=self._upload(block_usage, np.int32),
                first_block=self._upload(first_block, np.int32),
            ),
            hints=self._hints(positions[: len(sequences)], sequences),
        )
        return ModelInputs(
            bucket=bucket,
            members=members,
            input_ids=self._last_tokens.index_select(0, self._upload(token_rows, np.int64)),
            positions=self._positions(positions),
            attn=attn,
            logits_indices=self._upload(np.arange(batch), np.int64),
        )

    def _state_indices(self, sequences: Sequence[ScheduledSequence], batch: int) -> tuple[np.ndarray, np.ndarray]:
        read = np.full(batch, self._padding.zero_row, np.int64)
        write = np.full(batch, self._padding.trash_row, np.int64)
        for n, sequence in enumerate(sequences):
            read[n] = write[n] = sequence.state_slot
        return read, write

    def _positions(self, positions: np.ndarray) -> torch.Tensor:
        """[rows], or one copy per axis: text alone stands at the same place on all of them."""
        if self._axes > 1:
            positions = np.broadcast_to(positions, (self._axes, len(positions)))
        return self._upload(positions, np.int32)

    def _upload(self, array: np.ndarray, dtype: type) -> torch.Tensor:
        return device.upload(np.asarray(array, dtype=dtype), self._device)
