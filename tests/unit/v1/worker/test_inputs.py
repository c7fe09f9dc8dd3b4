# SPDX-License-Identifier: Apache-2.0
"""Padded model inputs from literal steps: every scheduled token stands once where its block table says, pads stand in
padding rows, and the forwards come in the order in which one may read what another writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi.bucketing.grid import BucketGrid, DecodeBucket, ExactGrid, PrefillBucket, RowTiles
from vllm_gaudi.ops.linear import GemmRows
from vllm_gaudi.v1.worker.gdn_checkpoint.plan import IntermediateSaves
from vllm_gaudi.v1.worker.inputs import InputBuilder, ModelInputs, PaddingRows
from vllm_gaudi.v1.worker.requests import StepRequests

KERNEL = 4  # tokens of a kernel block
PER_BLOCK = 2  # kernel blocks of a block
BLOCK = KERNEL * PER_BLOCK
NUM_BLOCKS = 30  # with the null block
NUM_SLOTS = 6
SPARE = NUM_BLOCKS * PER_BLOCK
ZERO, TRASH, STAGING = NUM_SLOTS, NUM_SLOTS + 1, NUM_SLOTS + 2
MAX_CONTEXT = 64


@dataclass(frozen=True)
class Row:
    """One request of a step. A decode's token is ``100 + slot``, remembered on the device; a prefill's are its
    positions + 1000."""

    slot: int
    computed: int
    scheduled: int
    blocks: tuple[int, ...]
    is_prefill: bool = True
    admitted: bool = False

    @property
    def end(self) -> int:
        return self.computed + self.scheduled

    def place(self, position: int) -> int:
        """Row of the K/V pages that holds a position, counted in tokens over kernel blocks."""
        return self.blocks[position // BLOCK] * BLOCK + position % BLOCK

    def kernel_blocks(self) -> list[int]:
        """Those of all tokens up to the step's end, in the order of the tokens."""
        return list(dict.fromkeys(self.place(position) // KERNEL for position in range(self.end)))


def decode(slot: int, computed: int, *blocks: int) -> Row:
    return Row(slot, computed, 1, blocks, is_prefill=False)


def step_of(*rows: Row) -> StepRequests:
    def array(values: list, dtype: Any = np.int32) -> np.ndarray:
        return np.array(values, dtype)

    table = np.zeros((len(rows), max((len(row.blocks) for row in rows), default=0)), np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row.blocks)] = row.blocks
    return StepRequests(
        req_ids=tuple(f"r{i}" for i in range(len(rows))),
        state_slots=array([row.slot for row in rows]),
        num_computed_tokens=array([row.computed for row in rows]),
        num_scheduled_tokens=array([row.scheduled for row in rows]),
        is_prefill=array([row.is_prefill for row in rows], bool),
        samples=array([True] * len(rows), bool),
        admitted=array([row.admitted for row in rows], bool),
        admission_ids=tuple(range(len(rows))),
        block_ids=(np.full((len(rows), 1), 29, np.int32), table),  # group 0 is a GDN group, whose blocks nobody may use
        tokens=tuple(np.arange(row.computed, row.end, dtype=np.int32) + 1000 for row in rows),
        fresh_blocks=array([]),
    )


def make(
    axes: int = 1,
    max_blocks: int = NUM_BLOCKS * PER_BLOCK,
    caches: bool = False,
    is_host: bool = False,
    tail: int | None = None,
    **overrides: list[int],
) -> InputBuilder:
    grid = (ExactGrid if is_host else BucketGrid)(
        query_multiple=8,
        max_query=32,
        max_batch=NUM_SLOTS,
        max_context=MAX_CONTEXT,
        kernel_block=KERNEL,
        max_blocks=max_blocks,
        block_size=KERNEL * PER_BLOCK if caches else 0,
        overrides=overrides,
    )
    builder = InputBuilder(
        grid,
        PaddingRows(SPARE, ZERO, TRASH, STAGING),
        tiles=RowTiles(64, 16) if tail is None else RowTiles(8, 2, tail),
        expert_tiles=RowTiles(32, 8),
        with_hints=is_host,
        attention_group=1,
        kernel_block=KERNEL,
        kernel_blocks_per_block=PER_BLOCK,
        num_slots=NUM_SLOTS,
        position_axes=axes,
        device=torch.device("cpu"),
    )
    builder.store_sampled_tokens(np.arange(NUM_SLOTS, dtype=np.int32), torch.arange(100, 100 + NUM_SLOTS))
    return builder


def check_prefill(inputs: ModelInputs, rows: list[Row]) -> None:
    """Every value of a prefill forward over ``rows`` (its members), padding included."""
    attn, bucket = inputs.attn, inputs.bucket
    assert isinstance(bucket, PrefillBucket) and attn.decode is None and attn.prefill is not None
    assert (attn.batch, attn.query, attn.gemm_rows) == (bucket.batch, bucket.query, GemmRows(64))
    assert attn.expert_gemm_rows == GemmRows(32)
    assert inputs.input_ids.shape == (bucket.rows,) == attn.slot_mapping.shape
    ids, places = inputs.input_ids.view(attn.batch, -1), attn.slot_mapping.view(attn.batch, -1)
    positions = inputs.positions.view(attn.batch, -1)
    table = attn.prefill.block_table
    assert table.shape == (bucket.batch, bucket.blocks)
    for n in range(bucket.batch):
        row = rows[n] if n < len(rows) else None
        length = row.scheduled if row else 0
        assert int(attn.prefill.query_lens[n]) == length
        if row:
            real = list(range(row.computed, row.end))
            assert int(attn.prefill.num_computed_tokens[n]) == row.computed
            assert positions[n, :length].tolist() == real
            assert ids[n, :length].tolist() == [1000 + p for p in real]
            assert places[n, :length].tolist() == [row.place(p) for p in real]
            blocks = row.kernel_blocks()
            assert table[n, : len(blocks)].tolist() == blocks
            assert (int(attn.state_indices_in[n]), int(attn.state_indices_out[n])) == (row.slot, row.slot)
            assert int(inputs.logits_indices[n]) == n * bucket.query + length - 1
        else:
            blocks = []
            assert int(attn.prefill.num_computed_tokens[n]) == 0
            assert (int(attn.state_indices_in[n]), int(attn.state_indices_out[n])) == (ZERO, TRASH)
            assert 0 <= int(inputs.logits_indices[n]) < bucket.rows
        assert (table[n, len(blocks) :] == SPARE).all()
        assert (places[n, length:] // KERNEL == SPARE).all()
        assert not positions[n, length:].any() and not ids[n, length:].any()


def check_decode(inputs: ModelInputs, rows: list[Row]) -> None:
    """Every value of a decode forward over ``rows`` (its members), padding included."""
    attn, bucket = inputs.attn, inputs.bucket
    assert isinstance(bucket, DecodeBucket) and attn.prefill is None and attn.decode is not None
    assert (attn.batch, attn.query, attn.gemm_rows) == (bucket.batch, 1, GemmRows(16))
    assert attn.expert_gemm_rows == GemmRows(8)
    assert inputs.input_ids.shape == inputs.positions.shape == (bucket.rows,)
    assert attn.slot_mapping.shape == attn.state_indices_in.shape == attn.state_indices_out.shape == (bucket.batch,)
    assert attn.decode.block_list.shape == (bucket.blocks,)
    assert inputs.logits_indices.tolist() == list(range(bucket.batch))
    num = len(rows)
    assert inputs.input_ids.tolist() == [100 + row.slot for row in rows] + [0] * (bucket.rows - num)
    assert inputs.positions.tolist() == [row.computed for row in rows] + [0] * (bucket.rows - num)
    assert attn.state_indices_in.tolist() == [row.slot for row in rows] + [ZERO] * (bucket.batch - num)
    assert attn.state_indices_out.tolist() == [row.slot for row in rows] + [TRASH] * (bucket.batch - num)
    assert attn.slot_mapping[:num].tolist() == [row.place(row.computed) for row in rows]
    assert (attn.slot_mapping[num:] // KERNEL == SPARE).all()
    lists = [row.kernel_blocks() for row in rows]
    flat = [block for blocks in lists for block in blocks]
    num_pads = bucket.blocks - len(flat)
    assert attn.decode.block_list.tolist() == flat + [SPARE] * num_pads
    readers = [n for n, blocks in enumerate(lists) for _ in blocks]
    assert attn.decode.block_groups.tolist() == readers + [bucket.batch - 1] * num_pads
    seen = [
        min(KERNEL, row.end - KERNEL * k) for row, blocks in zip(rows, lists, strict=True) for k in range(len(blocks))
    ]
    assert attn.decode.block_usage.tolist() == seen + [0] * num_pads
    firsts = np.cumsum([0] + [len(blocks) for blocks in lists])[:-1].tolist()
    assert attn.decode.first_block[:num].tolist() == firsts
    assert ((attn.decode.first_block >= 0) & (attn.decode.first_block < bucket.blocks)).all()
    rows_in_order = attn.decode.block_groups.tolist()
    assert rows_in_order == sorted(rows_in_order)


def check(builder: InputBuilder, *rows: Row) -> list[ModelInputs]:
    """Build the step of ``rows``, check all of it, and return its forwards."""
    forwards = list(builder.build(step_of(*rows), {}))
    members = [i for inputs in forwards for i in inputs.members]
    decodes = [i for i, row in enumerate(rows) if not row.is_prefill]
    prefills = [i for i, row in enumerate(rows) if row.is_prefill]
    assert members == decodes + prefills, "decodes first, then prefills, each in scheduler order"
    for inputs in forwards:
        chosen = [rows[i] for i in inputs.members]
        (check_prefill if isinstance(inputs.bucket, PrefillBucket) else check_decode)(inputs, chosen)
    return forwards


class TestPrefill:
    def test_alone(self):
        (forward,) = check(make(), Row(2, 0, 5, (3,)))
        assert forward.bucket == PrefillBucket(1, 8, 2)

    def test_a_chunk_with_context(self):
        (forward,) = check(make(), Row(0, 10, 8, (3, 7, 5)))
        assert forward.attn.slot_mapping.tolist() == [58, 59, 60, 61, 62, 63, 40, 41]
        assert forward.attn.prefill.block_table[0, :5].tolist() == [6, 7, 14, 15, 10]

    def test_several_short_ones_share_a_forward(self):
        forwards = check(make(), Row(0, 0, 5, (3,)), Row(1, 8, 2, (4, 5)), Row(2, 0, 8, (6,)))
        assert [forward.bucket for forward in forwards] == [PrefillBucket(4, 8, 4)]

    def test_neighbours_share_a_forward_only_while_they_fit(self):
        rows = [Row(slot, 0, n, (2 * slot + 1, 2 * slot + 2)) for slot, n in enumerate((3, 8, 9, 16, 1, 2))]
        forwards = check(make(), *rows)
        assert [forward.members for forward in forwards] == [(0, 1), (2,), (3,), (4, 5)]

    def test_no_more_than_the_largest_batch_share_a_forward(self):
        forwards = check(make(), *(Row(slot, 0, 1, (slot + 1,)) for slot in range(6)))
        assert [forward.members for forward in forwards] == [(0, 1, 2, 3), (4, 5)]

    def test_a_long_table_is_cut_to_what_the_step_reads(self):
        """Blocks allocated ahead stand in the table already; reading them would read what nobody has written."""
        (forward,) = check(make(), Row(0, 0, 4, (3, 7, 5, 9)))
        assert forward.attn.prefill.block_table.tolist() == [[6, SPARE]]

    def test_dtypes(self):
        (forward,) = check(make(), Row(0, 0, 4, (3,)))
        attn = forward.attn
        assert forward.input_ids.dtype == torch.int32
        assert {t.dtype for t in (forward.logits_indices, attn.slot_mapping)} == {torch.int64}
        assert {t.dtype for t in (forward.input_ids, forward.positions)} == {torch.int32}
        assert {attn.state_indices_in.dtype, attn.state_indices_out.dtype} == {torch.int64}
        assert {t.dtype for t in vars(attn.prefill).values() if t is not None} == {torch.int32}


class TestDecode:
    def test_alone(self):
        (forward,) = check(make(), decode(3, 9, 4, 6))
        assert forward.bucket == DecodeBucket(1, 8)
        assert forward.attn.decode.block_list[:3].tolist() == [8, 9, 12]
        assert forward.attn.decode.block_usage[:3].tolist() == [4, 4, 2]

    @pytest.mark.parametrize("computed", [1, 3, 4, 7, 8, 15, 16])
    def test_around_the_ends_of_blocks(self, computed):
        check(make(), decode(0, computed, 5, 2, 9))

    @pytest.mark.parametrize("num", range(1, NUM_SLOTS + 1))
    def test_every_batch_size(self, num):
        forwards = check(make(), *(decode(slot, 3 + slot, 2 * slot + 1, 2 * slot + 2) for slot in range(num)))
        assert len(forwards) == 1

    def test_the_batch_is_cut_where_the_ladder_of_blocks_ends(self):
        """Blocks that several rows share are listed for each of them and may be more than there are in the pool."""
        rows = [decode(slot, 39, 1, 2, 3, 4, 5 + slot) for slot in range(5)]  # 10 kernel blocks each
        forwards = check(make(max_blocks=24), *rows)
        assert [forward.members for forward in forwards] == [(0, 1), (2, 3), (4,)]
        assert all(forward.bucket.blocks <= 24 for forward in forwards)

    def test_a_single_row_is_never_cut(self):
        forwards = check(make(max_blocks=1), decode(0, 63, *range(1, 9)), decode(1, 1, 9))
        assert [forward.members for forward in forwards] == [(0,), (1,)]

    def test_alternating_batches_of_one_shape_have_nothing_of_each_other(self):
        builder = make()
        first = check(builder, decode(0, 3, 1), decode(1, 3, 2))
        second = check(builder, decode(4, 3, 7), decode(5, 3, 8))
        assert first[0].bucket == second[0].bucket
        assert first[0].attn.state_indices_in.tolist() == [0, 1]

    def test_dtypes(self):
        (forward,) = check(make(), decode(0, 3, 1))
        attn = forward.attn
        assert forward.input_ids.dtype == torch.int32
        assert {t.dtype for t in (forward.logits_indices, attn.slot_mapping)} == {torch.int64}
        assert {t.dtype for t in (forward.input_ids, forward.positions)} == {torch.int32}
        assert {attn.state_indices_in.dtype, attn.state_indices_out.dtype} == {torch.int64}
        assert {t.dtype for t in vars(attn.decode).values()} == {torch.int32}


def test_decodes_run_before_prefills():
    """A request that is admitted may hit a block that a decoding one fills in this very step."""
    forwards = check(make(), Row(0, 0, 3, (1,), admitted=True), decode(1, 7, 2), Row(2, 0, 3, (3,)), decode(3, 7, 4))
    assert [type(forward.bucket) for forward in forwards] == [DecodeBucket, PrefillBucket]
    assert [forward.members for forward in forwards] == [(1, 3), (0, 2)]


class TestOnAHostWithoutAnyGraph:
    def test_a_prefill_is_padded_to_the_row_tile_alone(self):
        (forward,) = check(make(is_host=True), Row(0, 8, 17, (3, 4, 5, 6)))
        assert forward.bucket == PrefillBucket(1, 24, 7)
        assert forward.attn.hints.num_computed_range == (8, 8)

    def test_only_chunks_of_one_padded_length_share_a_forward(self):
        rows = Row(0, 0, 3, (1,)), Row(1, 0, 8, (2,)), Row(2, 0, 9, (3, 4)), Row(3, 4, 4, (5,))
        forwards = check(make(is_host=True), *rows)
        assert [forward.members for forward in forwards] == [(0, 1), (2,), (3,)]
        assert [forward.attn.hints.num_computed_range for forward in forwards] == [(0, 0), (0, 0), (4, 4)]

    def test_a_decode_is_told_its_rows_and_has_no_pads_in_its_list(self):
        (forward,) = check(make(is_host=True), decode(5, 9, 4, 6), decode(1, 2, 5), decode(3, 3, 7))
        assert forward.bucket == DecodeBucket(3, 5)
        assert forward.attn.hints.state_indices_cpu == (5, 1, 3)

    def test_a_device_is_not_told(self):
        (forward,) = check(make(), decode(5, 9, 4, 6))
        assert forward.attn.hints is None
        (forward,) = check(make(), Row(0, 0, 3, (1,)))
        assert forward.attn.hints is None
        assert forward.attn.gemm_rows.slices is None


class TestGemmSlices:
    @pytest.mark.parametrize(
        ("length", "slices"),
        [
            (1, [(0, 2)]),
            (4, [(0, 2), (2, 2)]),
            (5, [(0, 8)]),
            (8, [(0, 8)]),
            (9, [(0, 8), (8, 2)]),
            (12, [(0, 8), (8, 2), (10, 2)]),
            (13, [(0, 8), (8, 8)]),
        ],
    )
    def test_a_tile_at_most_half_full_is_cut(self, length, slices):
        (forward,) = make(is_host=True, tail=2).build(step_of(Row(2, 0, length, (3, 4))), {})
        assert forward.attn.gemm_rows.slices == tuple(slices)

    def test_each_sequence_has_its_own_and_pads_have_none(self):
        rows = [Row(slot, 0, length, (slot + 3,)) for slot, length in enumerate((3, 8, 1))]
        (forward,) = make(tail=2, prefill_batch_buckets=[4]).build(step_of(*rows), {})
        assert forward.bucket.batch == 4 and forward.bucket.query == 8
        assert forward.attn.gemm_rows.slices == ((0, 2), (2, 2), (8, 8), (16, 2))

    def test_what_a_step_computes_of_a_sequence_alone_counts(self):
        (forward,) = make(is_host=True, tail=2).build(step_of(Row(2, 8, 3, (3, 4))), {})
        assert forward.attn.gemm_rows.slices == ((0, 2), (2, 2))

    def test_dummies_run_all_their_rows(self):
        assert make(tail=2).dummy_inputs(PrefillBucket(1, 8, 2)).attn.gemm_rows == GemmRows(8)


def test_an_empty_step_has_no_forward():
    assert list(make().build(step_of(), {})) == []


@pytest.mark.parametrize("rows", [(Row(0, 5, 4, (3, 4)), Row(1, 0, 2, (5,))), (decode(0, 9, 3, 4), decode(2, 2, 5))])
def test_three_axes_of_positions_are_three_equal_rows(rows):
    (one,) = make(1).build(step_of(*rows), {})
    (three,) = make(3).build(step_of(*rows), {})
    assert three.positions.shape == (3, one.positions.shape[0])
    assert three.positions.is_contiguous() and three.positions.dtype == torch.int32
    for axis in three.positions:
        assert torch.equal(axis, one.positions)


class TestLastTokens:
    def test_a_sampled_token_is_the_next_input_of_its_slot_alone(self):
        builder = make()
        builder.store_sampled_tokens(np.array([4, 1], np.int32), torch.tensor([7, 8]))
        (forward,) = builder.build(step_of(decode(1, 3, 1), decode(4, 3, 2), decode(0, 3, 3)), {})
        assert forward.input_ids[:3].tolist() == [8, 7, 100]

    def test_sampled_tokens_of_another_dtype_are_taken(self):
        builder = make()
        builder.store_sampled_tokens(np.array([0], np.int32), torch.tensor([511], dtype=torch.int64))
        (forward,) = builder.build(step_of(decode(0, 3, 1)), {})
        assert (forward.input_ids.dtype, int(forward.input_ids[0])) == (torch.int32, 511)

    def test_an_input_that_was_built_does_not_change_with_the_next_sample(self):
        """With asynchronous scheduling the next step's sample comes while this one's input may still be read."""
        builder = make()
        (forward,) = builder.build(step_of(decode(0, 3, 1)), {})
        builder.store_sampled_tokens(np.array([0], np.int32), torch.tensor([7]))
        assert int(forward.input_ids[0]) == 100


@pytest.mark.parametrize("axes", [1, 3])
def test_dummies_of_all_buckets_are_pads_alone(axes):
    builder = make(axes)
    grid = builder._grid
    for bucket in [*grid.all_prefill(), *grid.all_decode()]:
        inputs = builder.dummy_inputs(bucket)
        assert inputs.bucket == bucket and inputs.members == ()
        assert inputs.positions.shape == ((bucket.rows,) if axes == 1 else (3, bucket.rows))
        if axes == 1:
            (check_prefill if isinstance(bucket, PrefillBucket) else check_decode)(inputs, [])


@st.composite
def steps(draw: Any) -> list[Row]:
    """Requests with slots and blocks of their own, except that a prefix of blocks may be shared."""
    slots = draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(1, NUM_SLOTS))]
    free = list(draw(st.permutations(range(1, NUM_BLOCKS - 1))))
    shared = [free.pop() for _ in range(2)]
    budget, rows = 32, []
    for slot in slots:
        is_prefill = draw(st.booleans())
        scheduled = draw(st.integers(1, max(1, min(budget, 20)))) if is_prefill else 1
        budget -= scheduled
        computed = draw(st.integers(0 if is_prefill else 1, 24))
        num_blocks = -(-(computed + scheduled) // BLOCK) + draw(st.integers(0, 1))
        own = shared[: min(draw(st.integers(0, 2)), computed // BLOCK)]
        blocks = (*own, *(free.pop() for _ in range(min(num_blocks - len(own), len(free)))))
        if budget < 0 or len(blocks) * BLOCK < computed + scheduled:
            break
        rows.append(Row(slot, computed, scheduled, blocks, is_prefill))
    return rows


@given(steps(), st.sampled_from((16, 24, 60)))
def test_any_step(rows, max_blocks):
    """All values are checked; and over all forwards no write falls on a place that is not its own request's."""
    forwards = check(make(max_blocks=max_blocks), *rows)
    written = [place for inputs in forwards for place in inputs.attn.slot_mapping.tolist()]
    live = [row.place(position) for row in rows for position in range(row.computed, row.end)]
    assert sorted(place for place in written if place // KERNEL != SPARE) == sorted(live)
    states = [slot for inputs in forwards for slot in inputs.attn.state_indices_out.tolist()]
    assert sorted(slot for slot in states if slot != TRASH) == sorted(row.slot for row in rows)
    assert all(ZERO not in inputs.attn.state_indices_out.tolist() for inputs in forwards)
    assert all(TRASH not in inputs.attn.state_indices_in.tolist() for inputs in forwards)
    grid = make(max_blocks=max_blocks)._grid
    known = {*grid.all_prefill(), *grid.all_decode()}
    assert all(inputs.bucket in known for inputs in forwards)


class TestKeptBoundaries:
    """Rows that take the states of boundaries on the way, and what is saved from them."""

    B = KERNEL * PER_BLOCK  # 8 tokens

    @staticmethod
    def intermediate_saves(*tokens: int, first_block: int) -> IntermediateSaves:
        blocks = np.arange(first_block, first_block + len(tokens), dtype=np.int32)
        return IntermediateSaves(np.array(tokens, np.int32), np.stack([blocks, blocks + 100]))

    def test_one_of_three_sequences_keeps_one(self):
        builder = make(caches=True)
        step = step_of(Row(2, 4, 8, (1, 2)), Row(1, 0, 8, (3,)), Row(0, 4, 4, (4,)))
        (plain,) = builder.build(step, {})
        assert plain.attn.intermediate is None and plain.staged is None and plain.bucket.boundaries == 0
        (one,) = builder.build(step, {0: self.intermediate_saves(4, first_block=7)})
        intermediate = one.attn.intermediate
        assert one.bucket.boundaries == 1 and intermediate.interval == self.B
        assert intermediate.offset.tolist()[:3] == [4, 8, 4] and intermediate.offset.dtype == torch.int32
        assert intermediate.state_indices_out.tolist() == [STAGING] + [TRASH] * (one.bucket.batch - 1)
        assert one.staged.rows.tolist() == [STAGING] and one.staged.blocks.tolist() == [[7], [107]]

    @pytest.mark.parametrize(("distances", "rows"), [((12,), [1]), ((4, 12), [0, 1]), ((4, 20), [0, 2])])
    def test_each_boundary_has_a_row_of_its_own_and_the_others_go_to_trash(self, distances, rows):
        builder = make(caches=True)
        step = step_of(Row(1, 4, 24, (1, 2, 3, 4)))
        (forward,) = builder.build(step, {0: self.intermediate_saves(*distances, first_block=9)})
        assert forward.bucket.boundaries == 4 and forward.attn.intermediate.offset.tolist() == [4]
        assert forward.attn.intermediate.state_indices_out.tolist() == [
            STAGING + i if i in rows else TRASH for i in range(4)
        ]
        assert forward.staged.rows.tolist() == [STAGING + i for i in rows]
        assert forward.staged.blocks[0].tolist() == list(range(9, 9 + len(rows)))

    def test_the_rows_of_a_forward_are_those_the_grid_counts(self):
        grid = make(caches=True)._grid
        for bucket in grid.all_prefill():
            assert bucket.batch * bucket.boundaries <= grid.num_staging

    def test_pads_of_a_warm_up_write_to_trash_alone(self):
        dummy = make(caches=True).dummy_inputs(PrefillBucket(2, 16, 4, 2))
        assert dummy.attn.intermediate.state_indices_out.tolist() == [TRASH] * 4 and dummy.staged is None
        assert dummy.attn.intermediate.offset.tolist() == [self.B, self.B]
