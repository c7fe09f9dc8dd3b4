# SPDX-License-Identifier: Apache-2.0
"""The request table follows vLLM's own scheduler records, step by step, and its slots go where they belong.

The records are vLLM's own; ``Records`` builds them and imports vLLM, which takes seconds. Two KV cache groups, of which
the second is attention; slots are few on purpose.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_gaudi.bucketing.grid import BucketGrid
from vllm_gaudi.v1.worker.inputs import InputBuilder, PaddingRows
from vllm_gaudi.v1.worker.requests import RequestTable, StepRequests
from vllm_gaudi.v1.worker.state_slots import StateSlotPool

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it
ROOT = Path(__file__).resolve().parents[4]
MAX_MODEL_LEN = 64


class Records:
    """Builders of vLLM's records from the few values that the table looks at."""

    def __init__(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        self._params, self.block_copy = SamplingParams, KVCacheBlockCopy
        self._cached, self._new, self._output = CachedRequestData, NewRequestData, SchedulerOutput

    def new(
        self, req_id: str, prompt: list[int], blocks: Any = ([1], [2]), computed: int = 0, max_tokens: int = 8
    ) -> Any:
        return self._new(
            req_id=req_id,
            prompt_token_ids=prompt,
            mm_features=[],
            sampling_params=self._params(max_tokens=max_tokens),
            pooling_params=None,
            block_ids=blocks,
            num_computed_tokens=computed,
            lora_request=None,
        )

    def output(
        self,
        scheduled: dict[str, int],
        *,
        new: tuple = (),
        running: dict[str, tuple] | None = None,
        resumed: dict[str, tuple] | None = None,
        finished: set[str] = frozenset(),  # type: ignore[assignment]
        preempted: set[str] | None = None,
        zero: list[int] | None = None,
        **rest: Any,
    ) -> Any:
        """``running``: id -> (computed, new blocks or None, number of outputs); ``resumed``: id -> (computed, blocks,
        number of outputs, all tokens)."""
        rows = {**(running or {}), **(resumed or {})}
        cached = self._cached(
            req_ids=list(rows),
            resumed_req_ids=set(resumed or {}),
            new_token_ids=[],
            all_token_ids={req_id: row[3] for req_id, row in (resumed or {}).items()},
            new_block_ids=[row[1] for row in rows.values()],
            num_computed_tokens=[row[0] for row in rows.values()],
            num_output_tokens=[row[2] for row in rows.values()],
        )
        fields = {
            "scheduled_new_reqs": list(new),
            "scheduled_cached_reqs": cached,
            "num_scheduled_tokens": scheduled,
            "total_num_scheduled_tokens": sum(scheduled.values()),
            "scheduled_spec_decode_tokens": {},
            "scheduled_encoder_inputs": {},
            "num_common_prefix_blocks": [],
            "finished_req_ids": set(finished),
            "free_encoder_mm_hashes": [],
            "preempted_req_ids": preempted,
            "new_block_ids_to_zero": zero,
        }
        return self._output(**{**fields, **rest})


@pytest.fixture(scope="module")
def records() -> Records:
    return Records()


class TableSetup:
    """A table over ``num_slots`` slots. ``step`` applies an output and samples; ``sampled`` says which tokens came."""

    def __init__(self, num_slots: int = 2):
        self.slots = StateSlotPool(num_slots)
        self.table = RequestTable(self.slots, num_groups=2, max_model_len=MAX_MODEL_LEN)

    def step(self, output: Any, sampled: dict[str, int] | None = None) -> StepRequests:
        step = self.table.apply(output)
        self.table.count_sampled(step)
        admission = dict(zip(step.req_ids, step.admission_ids, strict=True))
        for req_id, token in (sampled or {}).items():
            self.table.append_sampled(req_id, admission[req_id], token)
        return step

    def slot_of(self, req_id: str) -> int | None:
        return self.table[req_id].state_slot


@pytest.fixture
def setup() -> TableSetup:
    return TableSetup()


def tokens_of(step: StepRequests) -> list[list[int]]:
    return [tokens.tolist() for tokens in step.tokens]


class TestNew:
    def test_a_prompt_that_fits_the_step(self, setup, records):
        step = setup.step(records.output({"a": 3}, new=(records.new("a", [7, 8, 9], ([4], [5, 6])),), zero=[5, 6]))
        assert (step.req_ids, step.num_reqs, step.is_empty) == (("a",), 1, False)
        assert step.state_slots.tolist() == [0]
        assert (step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist(), step.end.tolist()) == (
            [0],
            [3],
            [3],
        )
        assert (step.is_prefill.tolist(), step.samples.tolist(), step.admitted.tolist()) == ([True], [True], [True])
        assert tokens_of(step) == [[7, 8, 9]]
        assert [table.tolist() for table in step.block_ids] == [[[4]], [[5, 6]]]
        assert step.fresh_blocks.tolist() == [5, 6]

    def test_dtypes_are_those_of_the_record(self, setup, records):
        step = setup.step(records.output({"a": 1}, new=(records.new("a", [7]),)))
        for name in ("state_slots", "num_computed_tokens", "num_scheduled_tokens", "end", "fresh_blocks"):
            assert getattr(step, name).dtype == np.int32, name
        for name in ("is_prefill", "samples", "admitted"):
            assert getattr(step, name).dtype == np.bool_, name
        assert {array.dtype for array in (*step.block_ids, *step.tokens)} == {np.dtype(np.int32)}

    def test_a_chunk_of_a_prompt_does_not_sample(self, setup, records):
        step = setup.step(records.output({"a": 2}, new=(records.new("a", [7, 8, 9]),)))
        assert (step.samples.tolist(), tokens_of(step)) == ([False], [[7, 8]])

    def test_a_cached_prefix_is_not_run_again(self, setup, records):
        step = setup.step(records.output({"a": 1}, new=(records.new("a", [7, 8, 9], computed=2),)))
        assert (step.num_computed_tokens.tolist(), tokens_of(step)) == ([2], [[9]])
        assert (step.is_prefill.tolist(), step.samples.tolist()) == ([True], [True])

    def test_a_prompt_of_one_token_is_a_prefill(self, setup, records):
        step = setup.step(records.output({"a": 1}, new=(records.new("a", [7]),)))
        assert (step.is_prefill.tolist(), step.samples.tolist()) == ([True], [True])

    def test_several_get_slots_in_scheduler_order_and_tables_are_padded_with_the_null_block(self, setup, records):
        new = (records.new("b", [1], ([3], [4])), records.new("a", [2, 3], ([5], [6, 7])))
        step = setup.step(records.output({"a": 2, "b": 1}, new=new))
        assert (step.req_ids, step.state_slots.tolist()) == (("a", "b"), [0, 1])
        assert step.block_ids[1].tolist() == [[6, 7], [4, 0]]

    def test_a_step_without_anything_is_empty(self, setup, records):
        step = setup.step(records.output({}))
        assert step.is_empty and step.num_reqs == 0
        assert [table.shape for table in step.block_ids] == [(0, 0), (0, 0)]

    def test_an_id_that_is_known_starts_over_as_the_next_piece_of_a_session_does(self, setup, records):
        first = setup.step(records.output({"a": 2}, new=(records.new("a", [7, 8]),)))
        setup.step(records.output({"b": 1}, new=(records.new("b", [9]),)))
        again = setup.step(records.output({"a": 3}, new=(records.new("a", [7, 8, 5]),)))
        assert (again.state_slots.tolist(), again.admitted.tolist()) == ([0], [True])
        assert again.admission_ids != first.admission_ids and tokens_of(again) == [[7, 8, 5]]
        assert len(setup.table) == 2


class TestRunning:
    @pytest.fixture(autouse=True)
    def _three_tokens_of_five(self, setup, records):
        setup.step(records.output({"a": 3}, new=(records.new("a", [5, 6, 7, 8, 9], ([1], [2])),)))

    def test_the_next_chunk(self, setup, records):
        step = setup.step(records.output({"a": 2}, running={"a": (3, ([], [3]), 0)}))
        assert (step.state_slots.tolist(), step.admitted.tolist()) == ([0], [False])
        assert (tokens_of(step), step.is_prefill.tolist(), step.samples.tolist()) == ([[8, 9]], [True], [True])
        assert [table.tolist() for table in step.block_ids] == [[[1]], [[2, 3]]]

    def test_no_new_blocks_leave_the_tables_as_they_are(self, setup, records):
        step = setup.step(records.output({"a": 1}, running={"a": (3, None, 0)}))
        assert [table.tolist() for table in step.block_ids] == [[[1]], [[2]]]
        assert step.samples.tolist() == [False]

    def test_the_last_single_token_of_a_prompt_is_a_prefill(self, setup, records):
        """Its state continues on the chunk grid, not by the recurrence."""
        setup.step(records.output({"a": 1}, running={"a": (3, None, 0)}))
        step = setup.step(records.output({"a": 1}, running={"a": (4, None, 0)}), {"a": 11})
        assert (step.is_prefill.tolist(), step.samples.tolist(), tokens_of(step)) == ([True], [True], [[9]])

    def test_then_it_decodes_one_token_at_a_time(self, setup, records):
        setup.step(records.output({"a": 2}, running={"a": (3, None, 0)}), {"a": 11})
        step = setup.step(records.output({"a": 1}, running={"a": (5, ([], [4]), 1)}), {"a": 12})
        assert (step.is_prefill.tolist(), step.samples.tolist(), step.admitted.tolist()) == ([False], [True], [False])
        assert (step.num_computed_tokens.tolist(), tokens_of(step)) == ([5], [[11]])
        assert step.block_ids[1].tolist() == [[2, 4]]
        assert setup.table["a"].output == [11, 12]
        assert setup.table["a"].prompt == [5, 6, 7, 8, 9]

    def test_a_request_that_is_not_scheduled_keeps_slot_and_tokens(self, setup, records):
        setup.step(records.output({"a": 2}, running={"a": (3, None, 0)}), {"a": 11})
        step = setup.step(records.output({"b": 1}, new=(records.new("b", [1]),)), {"b": 2})
        assert (step.req_ids, step.state_slots.tolist()) == (("b",), [1])
        assert (setup.slot_of("a"), setup.slots.num_taken) == (0, 2)
        step = setup.step(records.output({"b": 1, "a": 1}, running={"a": (5, None, 1), "b": (1, None, 1)}))
        assert (step.req_ids, step.state_slots.tolist()) == (("b", "a"), [1, 0])
        assert tokens_of(step) == [[2], [11]]
        assert step.is_prefill.tolist() == [False, False]

    def test_rows_stand_in_the_order_of_the_schedule_not_of_the_records(self, setup, records):
        output = records.output({"b": 1, "a": 2}, new=(records.new("b", [1], ([8], [9])),), running={"a": (3, None, 0)})
        step = setup.step(output)
        assert (step.req_ids, step.admitted.tolist()) == (("b", "a"), [True, False])
        assert (step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist()) == ([0, 3], [1, 2])
        assert step.block_ids[1].tolist() == [[9], [2]]


def test_a_table_of_boundaries_is_extended_where_it_ends(records):
    """An entry means its boundary by its place alone: group 1 has one per 4 tokens."""
    table = RequestTable(StateSlotPool(1), num_groups=2, max_model_len=MAX_MODEL_LEN, cached_groups=(1,), block_size=4)
    table.apply(records.output({"a": 9}, new=(records.new("a", list(range(30)), blocks=([1, 2, 3], [0, 7])),)))
    step = table.apply(records.output({"a": 9}, running={"a": (9, ([4, 5], [8, 9]), 0)}))
    assert step.block_ids[1].tolist() == [[0, 7, 8, 9]]
    with pytest.raises(AssertionError, match="4 entries in KV cache group 1 but 12 computed tokens in blocks of 4"):
        table.apply(records.output({"a": 4}, running={"a": (12, ([6], [10]), 0)}))


class TestReleased:
    @pytest.fixture(autouse=True)
    def _two_run(self, setup, records):
        """Both slots are taken; ``a`` has 3 tokens and one output, ``b`` the same."""
        new = (records.new("a", [1, 2, 3], ([1], [2])), records.new("b", [4, 5, 6], ([3], [4])))
        setup.step(records.output({"a": 3, "b": 3}, new=new), {"a": 10, "b": 20})

    def test_a_finished_one_is_forgotten_and_its_slot_goes_to_a_new_one_of_the_same_step(self, setup, records):
        step = setup.step(
            records.output(
                {"b": 1, "c": 2}, new=(records.new("c", [7, 8]),), running={"b": (3, None, 1)}, finished={"a"}
            )
        )
        assert (step.req_ids, step.state_slots.tolist()) == (("b", "c"), [1, 0])
        assert "a" not in setup.table and len(setup.table) == 2

    def test_two_finished_ones_make_room_for_two(self, setup, records):
        new = (records.new("d", [7]), records.new("c", [8]))
        step = setup.step(records.output({"d": 1, "c": 1}, new=new, finished={"b", "a"}))
        assert step.state_slots.tolist() == [0, 1]

    def test_without_room_a_new_one_is_an_error(self, setup, records):
        with pytest.raises(RuntimeError, match="all 2 slots are taken"):
            setup.step(records.output({"c": 1}, new=(records.new("c", [8]),)))

    def test_one_that_finishes_without_ever_having_run_is_nothing(self, setup, records):
        setup.step(records.output({}, finished={"waited only"}))
        assert (len(setup.table), setup.slots.num_taken) == (2, 2)

    def test_an_id_may_finish_and_come_again_in_one_step(self, setup, records):
        before = setup.table["a"]
        step = setup.step(records.output({"a": 2}, new=(records.new("a", [7, 8], ([5], [6])),), finished={"a"}))
        assert (step.state_slots.tolist(), step.admitted.tolist(), tokens_of(step)) == ([0], [True], [[7, 8]])
        assert setup.table["a"] is not before
        assert setup.table["a"].output == []
        assert step.block_ids[1].tolist() == [[6]]

    def test_a_preempted_one_gives_its_slot_back_and_stays_known(self, setup, records):
        step = setup.step(records.output({"b": 1}, running={"b": (3, None, 1)}, preempted={"a"}))
        assert (step.req_ids, setup.slot_of("a"), setup.slots.num_taken) == (("b",), None, 1)
        assert "a" in setup.table
        assert setup.table["a"].output == [10]

    def test_the_slot_of_a_preempted_one_goes_to_a_new_one_of_the_same_step(self, setup, records):
        step = setup.step(records.output({"c": 1}, new=(records.new("c", [8]),), preempted={"a"}))
        assert step.state_slots.tolist() == [0]

    def test_a_preempted_one_that_is_aborted_gives_its_slot_back_once(self, setup, records):
        setup.step(records.output({}, preempted={"a"}, finished={"a"}))
        assert ("a" in setup.table, setup.slots.num_taken) == (False, 1)
        setup.step(records.output({}, finished={"a"}))
        assert setup.slots.num_taken == 1

    def test_one_preempted_earlier_may_finish_later(self, setup, records):
        setup.step(records.output({}, preempted={"a"}))
        setup.step(records.output({}, finished={"a"}))
        assert ("a" in setup.table, setup.slots.num_taken) == (False, 1)

    def test_a_resumed_one_starts_over_with_other_blocks_and_all_its_tokens(self, setup, records):
        setup.step(records.output({"c": 1}, new=(records.new("c", [8]),), preempted={"a"}), {"c": 9})
        step = setup.step(
            records.output(
                {"a": 3}, resumed={"a": (0, ([6], [7, 8]), 1, [1, 2, 3, 10])}, preempted=set(), finished={"b"}
            )
        )
        assert (step.state_slots.tolist(), step.admitted.tolist()) == ([1], [True])
        assert [table.tolist() for table in step.block_ids] == [[[6]], [[7, 8]]]
        assert (tokens_of(step), step.samples.tolist(), step.is_prefill.tolist()) == ([[1, 2, 3]], [False], [True])
        step = setup.step(records.output({"a": 1}, running={"a": (3, None, 1)}), {"a": 11})
        assert (step.admitted.tolist(), step.samples.tolist()) == ([False], [True])
        assert setup.table["a"].output == [10, 11]

    def test_a_resumed_one_may_start_from_a_cached_prefix(self, setup, records):
        setup.step(records.output({}, preempted={"a"}))
        step = setup.step(records.output({"a": 2}, resumed={"a": (2, ([6], [7, 8]), 1, [1, 2, 3, 10])}), {"a": 11})
        assert (step.num_computed_tokens.tolist(), tokens_of(step)) == ([2], [[3, 10]])
        assert (step.is_prefill.tolist(), step.samples.tolist()) == ([True], [True])

    def test_preempted_and_resumed_in_one_output(self, setup, records):
        """``reset_prefix_cache`` of running requests does that: slots are given back before they are taken again."""
        resumed = {"b": (0, ([5], [6]), 1, [4, 5, 6, 20]), "a": (0, ([7], [8]), 1, [1, 2, 3, 10])}
        step = setup.step(records.output({"b": 4, "a": 4}, resumed=resumed, preempted={"a", "b"}), {"a": 11, "b": 21})
        assert (step.state_slots.tolist(), step.admitted.tolist()) == ([0, 1], [True, True])
        assert tokens_of(step) == [[4, 5, 6, 20], [1, 2, 3, 10]]
        assert setup.slots.num_taken == 2
        assert step.block_ids[1].tolist() == [[6], [8]]

    def test_resumed_without_having_been_announced_as_preempted(self, setup, records):
        step = setup.step(records.output({"a": 4}, resumed={"a": (0, ([7], [8]), 1, [1, 2, 3, 10])}))
        assert (step.state_slots.tolist(), setup.slots.num_taken) == ([0], 2)

    def test_a_resumed_one_whose_replay_stops_one_token_short_runs_its_own_last_token(self, setup, records):
        """The budget cuts its replay (4 tokens) after 3. The 4th is known to the host and was never sampled in the slot
        that it has now, whose last token is another request's."""
        inputs = builder()
        remember(inputs, setup, "a", 10)
        remember(inputs, setup, "b", 20)
        setup.step(records.output({"b": 1}, running={"b": (3, None, 1)}, preempted={"a"}), {"b": 21})
        remember(inputs, setup, "b", 21)
        step = setup.step(records.output({"a": 3}, resumed={"a": (0, ([6], [7]), 1, [1, 2, 3, 10])}, finished={"b"}))
        assert (step.state_slots.tolist(), step.samples.tolist()) == ([0], [False])
        remember(inputs, setup, "a", 99)  # what any earlier holder of the slot has left there
        step = setup.step(records.output({"a": 1}, running={"a": (3, None, 1)}))
        assert step.samples.tolist() == [True]
        (forward,) = inputs.build(step, {})
        row = int(forward.logits_indices[0])
        assert (int(forward.input_ids[row]), int(forward.positions[row])) == (10, 3)


def builder() -> InputBuilder:
    grid = BucketGrid(query_multiple=16, max_query=32, max_batch=2, max_context=64, kernel_block=16, max_blocks=8)
    return InputBuilder(
        grid,
        PaddingRows(padding_block=8, zero_row=2, trash_row=3),
        tiles=None,
        expert_tiles=None,
        with_hints=False,
        attention_group=1,
        kernel_block=16,
        kernel_blocks_per_block=1,
        num_slots=2,
        position_axes=1,
        device=torch.device("cpu"),
    )


def remember(inputs: InputBuilder, setup: TableSetup, req_id: str, token: int) -> None:
    inputs.store_sampled_tokens(np.array([setup.slot_of(req_id)], np.int32), torch.tensor([token]))


class TestAsync:
    """The next step is scheduled before the last one's tokens have reached the host."""

    @pytest.fixture(autouse=True)
    def _one_in_flight(self, setup, records):
        """``a`` has run its prompt of 3; its first token exists but is not known to the host."""
        self.first = setup.step(records.output({"a": 3}, new=(records.new("a", [1, 2, 3]),)))

    def test_a_token_in_flight_counts(self, setup, records):
        step = setup.step(records.output({"a": 1}, running={"a": (3, None, 1)}))
        assert (step.is_prefill.tolist(), step.samples.tolist(), step.num_computed_tokens.tolist()) == (
            [False],
            [True],
            [3],
        )
        step = setup.step(records.output({"a": 1}, running={"a": (4, None, 2)}))
        assert (step.is_prefill.tolist(), step.samples.tolist(), step.num_computed_tokens.tolist()) == (
            [False],
            [True],
            [4],
        )
        assert setup.table["a"].output == []

    def test_tokens_arrive_later_in_order(self, setup, records):
        second = setup.step(records.output({"a": 1}, running={"a": (3, None, 1)}))
        setup.table.append_sampled("a", self.first.admission_ids[0], 10)
        setup.step(records.output({"a": 1}, running={"a": (4, None, 2)}))
        setup.table.append_sampled("a", second.admission_ids[0], 11)
        assert setup.table["a"].output == [10, 11]
        assert setup.table["a"].tokens[:5].tolist() == [1, 2, 3, 10, 11]

    def test_the_list_of_outputs_stays_the_same_object(self, setup, records):
        """Sampling holds on to it: penalties look at what it has become, also after a preemption."""
        output = setup.table["a"].output
        setup.table.append_sampled("a", self.first.admission_ids[0], 10)
        setup.step(records.output({}, preempted={"a"}))
        setup.step(records.output({"a": 4}, resumed={"a": (0, ([1], [2]), 1, [1, 2, 3, 10])}))
        assert setup.table["a"].output is output
        assert output == [10]

    def test_a_token_in_flight_is_delivered_to_a_preempted_request(self, setup, records):
        setup.step(records.output({}, preempted={"a"}))
        setup.table.append_sampled("a", self.first.admission_ids[0], 10)
        step = setup.step(records.output({"a": 4}, resumed={"a": (0, ([1], [2]), 1, [1, 2, 3, 10])}), {"a": 11})
        assert (tokens_of(step), step.samples.tolist()) == ([[1, 2, 3, 10]], [True])
        assert setup.table["a"].output == [10, 11]

    def test_a_token_in_flight_is_stale_once_its_request_was_admitted_anew(self, setup, records):
        """Preempted and resumed in one output: the scheduler drops the token and has it sampled again."""
        step = setup.step(
            records.output({"a": 3}, resumed={"a": (0, ([1], [2]), 0, [1, 2, 3])}, preempted={"a"}), {"a": 12}
        )
        assert step.admission_ids[0] != self.first.admission_ids[0]
        setup.table.append_sampled("a", self.first.admission_ids[0], 10)
        assert setup.table["a"].output == [12]
        assert setup.table["a"].num_tokens == 4

    def test_a_token_in_flight_is_stale_once_its_request_has_finished_or_its_id_came_again(self, setup, records):
        setup.step(records.output({}, finished={"a"}))
        setup.table.append_sampled("a", self.first.admission_ids[0], 10)
        assert "a" not in setup.table
        setup.step(records.output({"a": 1}, new=(records.new("a", [7, 8]),)))
        setup.table.append_sampled("a", self.first.admission_ids[0], 10)
        assert setup.table["a"].output == []
        assert setup.table["a"].tokens[:2].tolist() == [7, 8]

    def test_only_settled_tokens_are_known_after_a_resume(self, setup, records):
        """More outputs announced than tokens sent (a placeholder), or more tokens sent than announced: the fewer."""
        setup.step(records.output({}, preempted={"a"}))
        setup.step(records.output({"a": 3}, resumed={"a": (0, ([1], [2]), 3, [1, 2, 3, 10])}))
        assert (setup.table["a"].num_tokens, setup.table["a"].output) == (4, [10])
        setup.step(records.output({}, preempted={"a"}))
        setup.step(records.output({"a": 3}, resumed={"a": (0, ([1], [2]), 1, [1, 2, 3, 10, 11])}))
        assert (setup.table["a"].num_tokens, setup.table["a"].output) == (4, [10])

    def test_admissions_are_never_used_twice(self, setup, records):
        seen = [*self.first.admission_ids]
        for _ in range(3):
            seen += setup.step(
                records.output({"a": 3}, resumed={"a": (0, ([1], [2]), 0, [1, 2, 3])}, preempted={"a"})
            ).admission_ids
        seen += setup.step(records.output({"a": 1}, new=(records.new("a", [1]),), finished={"a"})).admission_ids
        assert len(set(seen)) == len(seen)


def test_there_is_room_for_every_token_up_to_the_longest_sequence(records):
    setup = TableSetup()
    prompt = list(range(MAX_MODEL_LEN - 1))
    step = setup.step(records.output({"a": 63}, new=(records.new("a", prompt, max_tokens=500),)), {"a": 1})
    setup.table.append_sampled("a", step.admission_ids[0], 2)  # one that was in flight when the request had its last
    assert setup.table["a"].output == [1, 2]
    assert setup.table["a"].tokens[:63].tolist() == prompt


class TestRefused:
    def test_block_copies(self, setup, records):
        copies = [records.block_copy(0, 1)] if callable(records.block_copy) else [(0, 1)]
        with pytest.raises(RuntimeError, match="block copies .* refused at start"):
            setup.step(records.output({}, kv_cache_block_copies=copies))

    def test_draft_tokens(self, setup, records):
        with pytest.raises(RuntimeError, match="draft tokens"):
            setup.step(records.output({}, scheduled_spec_decode_tokens={"a": [1]}))

    def test_replaced_block_tables(self, setup, records):
        setup.step(records.output({"a": 1}, new=(records.new("a", [1]),)))
        with pytest.raises(RuntimeError, match="block"):
            setup.step(records.output({}, block_table_updates={"a": ([3], [4])}))


RANKS = """
from types import SimpleNamespace as N
from vllm_gaudi.v1.worker.requests import RequestTable
from vllm_gaudi.v1.worker.state_slots import StateSlotPool

def output(scheduled, new=(), finished=(), preempted=(), resumed=()):
    cached = N(req_ids=list(resumed), resumed_req_ids=set(resumed), all_token_ids={r: [1, 2] for r in resumed},
               new_block_ids=[([1],)] * len(resumed), num_computed_tokens=[0] * len(resumed),
               num_output_tokens=[0] * len(resumed))
    fresh = [N(req_id=r, prompt_token_ids=[1, 2], sampling_params=N(max_tokens=4), num_computed_tokens=0,
               block_ids=([1],)) for r in new]
    return N(scheduled_cached_reqs=cached, scheduled_new_reqs=fresh, num_scheduled_tokens={r: 2 for r in scheduled},
             finished_req_ids=set(finished), preempted_req_ids=set(preempted), kv_cache_block_copies=None,
             block_table_updates=None, scheduled_spec_decode_tokens={}, new_block_ids_to_zero=None)

names = [f"request-{i}" for i in range(8)]
table = RequestTable(StateSlotPool(8), 1, 64)
found = [table.apply(output(names, new=names)).state_slots.tolist()]
found.append(table.apply(output([], finished=names[2:5], preempted=names[5:])).state_slots.tolist())
found.append(table.apply(output(["x", *names[5:]], new=["x"], resumed=names[5:])).state_slots.tolist())
found.append(table.apply(output(names[5:], preempted=names[5:], resumed=names[5:])).state_slots.tolist())
print(found)
"""


def test_ranks_of_different_hash_seeds_hand_out_the_same_slots():
    """Sets of ids come in another order in every process; ranks must agree without talking to each other."""
    found = set()
    for seed in ("0", "1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", RANKS], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert found == {"[[0, 1, 2, 3, 4, 5, 6, 7], [], [2, 3, 4, 5], [3, 4, 5]]\n"}
