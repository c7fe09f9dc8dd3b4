# SPDX-License-Identifier: Apache-2.0
"""The request table: what the worker knows of each request, and what one step does with it.

Owns: tokens known to the host, block tables, counts and slots of every request; the frozen record of a step.
Never: device tensors, sampling, or a decision about state (zero, restore, save).

Ordering rule: release, then admit, then advance. A request that finished, was preempted, or is about to be resumed
hands its slot back before anyone is admitted; resumed means admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_gaudi.v1.worker.state_slots import StateSlotPool

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(eq=False)
class RequestState:
    """One request; ``tokens`` holds prompt and output as far as the host knows them."""

    req_id: str
    num_prompt: int
    tokens: np.ndarray  # [capacity] int32
    num_tokens: int  # tokens known to exist, sampled ones that have not reached the host included
    sampling_params: Any
    admission_id: int = 0  # number of this admission, never used twice; a sample of an earlier one is stale
    has_sampled: bool = False  # in this admission, so that its last token stands on the device under its slot
    num_computed_tokens: int = 0
    state_slot: int | None = None
    blocks: list[list[int]] = field(default_factory=list)  # per group, position-indexed
    output: list[int] = field(default_factory=list)  # output token ids that have reached the host

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.num_prompt].tolist()


@dataclass(frozen=True)
class StepRequests:
    """One step, in scheduler order. R requests, G groups, M = blocks of the longest table."""

    req_ids: tuple[str, ...]
    state_slots: np.ndarray  # [R] int32
    num_computed_tokens: np.ndarray  # [R] int32: tokens computed before this step
    num_scheduled_tokens: np.ndarray  # [R] int32
    is_prefill: np.ndarray  # [R] bool: runs in the chunk form
    samples: np.ndarray  # [R] bool: reaches its last known token, so its next token is sampled
    admitted: np.ndarray  # [R] bool: new or resumed in this step
    admission_ids: tuple[int, ...]  # per request: number of the admission that this step belongs to
    block_ids: tuple[np.ndarray, ...]  # per group [R, M] int32, position-indexed, 0 = null block
    tokens: tuple[np.ndarray, ...]  # per request: the scheduled token ids [n] int32 (undefined for a decode row)
    fresh_blocks: np.ndarray  # [Z] int32: attention blocks to zero

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @property
    def end(self) -> np.ndarray:
        """[R] int32: tokens computed after this step."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def is_empty(self) -> bool:
        return not self.req_ids


class RequestTable:
    """All requests that the scheduler has sent and not yet declared finished.

    ``num_groups``: KV cache groups; ``max_model_len`` tokens; ``cached_groups``: those whose table has one entry per
    boundary, ``block_size`` tokens apart.
    """

    def __init__(
        self,
        slots: StateSlotPool,
        num_groups: int,
        max_model_len: int,
        cached_groups: Sequence[int] = (),
        block_size: int = 0,
    ):
        self._slots = slots
        self._num_groups = num_groups
        self._max_model_len = max_model_len
        self._cached_groups = tuple(cached_groups)
        self._block_size = block_size
        self._requests: dict[str, RequestState] = {}
        self._num_admissions = 0

    def __getitem__(self, req_id: str) -> RequestState:
        return self._requests[req_id]

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def apply(self, output: SchedulerOutput) -> StepRequests:
        """Follow the scheduler by one step. Raises RuntimeError on what this engine was told never to schedule."""
        cached = output.scheduled_cached_reqs
        if output.kv_cache_block_copies:
            raise RuntimeError("the scheduler asks for block copies (partial-block hits), which are refused at start")
        if output.block_table_updates:
            raise RuntimeError("the scheduler rewrites block tables (HiSparse), which is not supported")
        if output.scheduled_spec_decode_tokens:
            raise RuntimeError("the scheduler sends draft tokens, but speculative decoding is refused at start")
        idle = {new.req_id for new in output.scheduled_new_reqs} | cached.resumed_req_ids
        self._release(output.finished_req_ids, idle | (output.preempted_req_ids or set()))
        admitted = self._admit(output)
        self._advance(cached)
        return self._step(output, admitted)

    def append_sampled(self, req_id: str, admission_id: int, token: int) -> None:
        """A sampled token has reached the host; dropped when the request ended or was admitted anew meanwhile."""
        state = self._requests.get(req_id)
        if state is None or state.admission_id != admission_id:
            return
        position = state.num_prompt + len(state.output)
        state.tokens[position] = token
        state.output.append(token)

    def count_sampled(self, step: StepRequests) -> None:
        """Each sampling row of ``step`` now has one more token, whether or not the host knows it yet."""
        for req_id, samples in zip(step.req_ids, step.samples, strict=True):
            if samples:
                state = self._requests[req_id]
                state.num_tokens += 1
                state.has_sampled = True

    def _release(self, finished: set[str], idle: set[str]) -> None:
        for req_id in sorted(finished | idle):
            state = self._requests.get(req_id)
            if state is not None and state.state_slot is not None:
                self._slots.free(state.state_slot)
                state.state_slot = None
        for req_id in finished:
            self._requests.pop(req_id, None)

    def _admit(self, output: SchedulerOutput) -> set[str]:
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:  # in place of a known one: a session's next piece
            prompt = np.asarray(new.prompt_token_ids, dtype=np.int32)
            tokens = np.zeros(min(self._max_model_len, len(prompt) + new.sampling_params.max_tokens) + 1, np.int32)
            tokens[: len(prompt)] = prompt
            self._requests[new.req_id] = RequestState(
                req_id=new.req_id,
                num_prompt=len(prompt),
                tokens=tokens,
                num_tokens=len(prompt),
                sampling_params=new.sampling_params,
                num_computed_tokens=new.num_computed_tokens,
                blocks=[list(ids) for ids in new.block_ids],
            )
        for i, req_id in enumerate(cached.req_ids):
            if req_id not in cached.resumed_req_ids:
                continue
            state = self._requests[req_id]
            self._learn_output(state, cached.all_token_ids[req_id], cached.num_output_tokens[i])
            state.num_computed_tokens = cached.num_computed_tokens[i]
            state.blocks = [list(ids) for ids in cached.new_block_ids[i]]
        admitted = {new.req_id for new in output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        for req_id in output.num_scheduled_tokens:
            if req_id in admitted:
                state = self._requests[req_id]
                state.state_slot = self._slots.take()
                self._num_admissions += 1
                state.admission_id = self._num_admissions
                state.has_sampled = False
        return admitted

    def _learn_output(self, state: RequestState, all_tokens: list[int], num_output: int) -> None:
        """Take over the scheduler's tokens; only what it has settled is known to exist after a preemption."""
        settled = min(len(all_tokens), state.num_prompt + num_output)
        state.tokens[:settled] = all_tokens[:settled]
        state.output[:] = all_tokens[state.num_prompt : settled]
        state.num_tokens = settled

    def _advance(self, cached: Any) -> None:
        for i, req_id in enumerate(cached.req_ids):
            if req_id in cached.resumed_req_ids:
                continue
            state = self._requests[req_id]
            state.num_computed_tokens = cached.num_computed_tokens[i]
            new_blocks = cached.new_block_ids[i]
            if new_blocks is not None:
                for group in self._cached_groups:
                    # Entries are appended, so a wrong length would save into another boundary's block.
                    length = len(state.blocks[group])
                    assert not new_blocks[group] or length == state.num_computed_tokens // self._block_size, (
                        f"request {req_id} has {length} entries in KV cache group {group} but "
                        f"{state.num_computed_tokens} computed tokens in blocks of {self._block_size}"
                    )
                for known, ids in zip(state.blocks, new_blocks, strict=True):
                    known.extend(ids)

    def _step(self, output: SchedulerOutput, admitted: set[str]) -> StepRequests:
        req_ids = tuple(output.num_scheduled_tokens)
        states = [self._requests[req_id] for req_id in req_ids]
        num_scheduled_tokens = np.fromiter(output.num_scheduled_tokens.values(), np.int32, len(states))
        num_computed_tokens = np.fromiter((s.num_computed_tokens for s in states), np.int32, len(states))
        num_tokens = np.fromiter((s.num_tokens for s in states), np.int32, len(states))
        is_admitted = np.fromiter((r in admitted for r in req_ids), bool, len(states))
        has_sampled = np.fromiter((s.has_sampled for s in states), bool, len(states))
        # A single token is a decode only when it was sampled under this slot. A prompt's last token, or the last one
        # that a resumed request replays, comes from the host and continues on the chunk grid.
        is_decode = (num_scheduled_tokens == 1) & (num_computed_tokens + 1 == num_tokens) & has_sampled
        return StepRequests(
            req_ids=req_ids,
            state_slots=np.fromiter((s.state_slot for s in states), np.int32, len(states)),
            num_computed_tokens=num_computed_tokens,
            num_scheduled_tokens=num_scheduled_tokens,
            is_prefill=~is_decode,
            samples=num_computed_tokens + num_scheduled_tokens >= num_tokens,
            admitted=is_admitted,
            admission_ids=tuple(s.admission_id for s in states),
            block_ids=tuple(self._table(states, group) for group in range(self._num_groups)),
            tokens=tuple(
                s.tokens[c : c + n] for s, c, n in zip(states, num_computed_tokens, num_scheduled_tokens, strict=True)
            ),
            fresh_blocks=np.asarray(output.new_block_ids_to_zero or (), dtype=np.int32),
        )

    @staticmethod
    def _table(states: list[RequestState], group: int) -> np.ndarray:
        width = max((len(s.blocks[group]) for s in states), default=0)
        table = np.zeros((len(states), width), dtype=np.int32)
        for row, state in enumerate(states):
            table[row, : len(state.blocks[group])] = state.blocks[group]
        return table
