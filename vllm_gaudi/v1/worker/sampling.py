# SPDX-License-Identifier: Apache-2.0
"""Sampling: which requests sample in a step, with which parameters, and what came out.

Owns: vLLM's ``InputBatch`` (sampling rows only: a request is in it exactly when it samples in this step), the sampler,
the logits processors, seeded generators.
Never: token rows of the model, slots, block tables, or how many rows a device is given (``bucketed_sampling``).

Ordering rule: tokens sampled in the step before have reached the host (``drain_sampled_tokens``) before this step's
rows are updated, since penalties, bad words and the minimum of tokens look at a request's output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors, build_logitsprocs
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_gaudi.device import HostCopy, upload
from vllm_gaudi.v1.worker.bucketed_sampling import (
    BucketedInputBatch,
    BucketedSampler,
    LogitsBuffer,
    penalty_buckets,
    unpadded,
)
from vllm_gaudi.v1.worker.requests import RequestState, RequestTable, StepRequests

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput

logger = init_logger("vllm.vllm_gaudi.sampling")

MAX_DROPPED_TOKENS = 4
"""Tokens of a request that asynchronous scheduling may have on their way when all are dropped; vLLM has two steps."""


class HostLogprobs:
    """Logprobs on their way to the host; ``get`` blocks until they have arrived."""

    def __init__(self, logprobs: LogprobsTensors, num_rows: int):
        """``logprobs``: on the device, one row per request or position, ``num_rows`` of them and then padding."""
        self._num_rows = num_rows
        self._parts = [
            HostCopy(part) for part in (logprobs.logprob_token_ids, logprobs.logprobs, logprobs.selected_token_ranks)
        ]

    def get(self) -> LogprobsTensors:
        """The same on the host. Safe to call again."""
        return LogprobsTensors(*(part.get()[: self._num_rows] for part in self._parts))


@dataclass(frozen=True)
class SampledStep:
    """What one step sampled; row i belongs to ``req_ids[i]``. The tensors may still be on their way to the host."""

    req_ids: tuple[str, ...]
    admission_ids: tuple[int, ...]
    token_ids: HostCopy  # [rows, 1] int32; rows after the requests are padding
    logprobs: HostLogprobs | None
    failed_req_ids: tuple[str, ...] = ()  # whose parameters raise: what stands in their rows is of no use

    def tokens(self) -> list[list[int]]:
        """One token of each request, none of a failed one; blocks until they are on the host."""
        tokens = self.token_ids.get()[: len(self.req_ids)].tolist()
        for req_id in self.failed_req_ids:
            tokens[self.req_ids.index(req_id)] = []
        return tokens


class SamplingState:
    """Sampling rows, as many as a step of ``row_buckets``, whose last one is the most requests of a step."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, row_buckets: Sequence[int]):
        model_config = vllm_config.model_config
        processors = model_config.logits_processors or ()
        self._device = device
        self._vocab_size = model_config.get_vocab_size()
        self._max_model_len = model_config.max_model_len
        self.most_logprobs = self._vocab_size if model_config.max_logprobs == -1 else model_config.max_logprobs
        self._row_buckets = tuple(row_buckets)
        self.sampler = BucketedSampler(
            model_config.max_model_len,
            logprobs_mode=model_config.logprobs_mode,
            use_fp64_gumbel=model_config.use_fp64_gumbel,
        )
        self.logits_buffer = LogitsBuffer(self._row_buckets[-1], device)
        self._batch = BucketedInputBatch(
            self._row_buckets,
            max_num_reqs=self._row_buckets[-1],
            max_model_len=model_config.max_model_len,
            max_num_batched_tokens=1,
            device=device,
            vocab_size=self._vocab_size,
            block_sizes=[1],  # block tables are the request table's; vLLM's batch wants one of at least one block
            kernel_block_sizes=[1],
            max_num_blocks_per_req=[1],
            logitsprocs=unpadded(
                build_logitsprocs(vllm_config, device, False, False, processors),
                lambda: len(self._batch.req_id_to_index),
            ),
            logitsprocs_need_output_token_ids=bool(processors),
            reasoning_config=vllm_config.reasoning_config,
        )
        self._states: dict[str, tuple[RequestState, CachedRequestState]] = {}
        self._row_admission: dict[str, int] = {}
        self._failed: set[str] = set()  # of the rows
        self._in_flight: SampledStep | None = None
        # A reset of the running requests drops tokens that asynchronous scheduling has on their way.
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self._snapshots: dict[str, dict[int, torch.Tensor]] = {}

    def num_rows(self, num_requests: int) -> int:
        """Rows that are sampled for so many requests."""
        return self._batch.rows_of(num_requests)

    def remove_requests(self, req_ids: set[str]) -> None:
        """These requests have ended; their rows go with the next ``sample``."""
        for req_id in req_ids:
            self._states.pop(req_id, None)
            self._snapshots.pop(req_id, None)

    def drain_sampled_tokens(self, table: RequestTable) -> None:
        """Wait for the tokens of the step before, if any, and append them to their requests."""
        sampled, self._in_flight = self._in_flight, None
        if sampled is None:
            return
        for req_id, admission, tokens in zip(sampled.req_ids, sampled.admission_ids, sampled.tokens(), strict=True):
            for token in tokens:
                table.append_sampled(req_id, admission, token)

    def sample(
        self,
        step: StepRequests,
        table: RequestTable,
        logits_index: Mapping[str, int],
        grammar_output: GrammarOutput | None,
    ) -> tuple[SampledStep, torch.Tensor]:
        """Sample one token for each request of ``logits_index``, whose logits ``logits_buffer`` keeps at its place.

        Returns the step's record and the token ids [rows] on the device, the record's requests first. A request whose
        parameters raise fails alone.
        """
        failed = self._update_rows(step, table, logits_index)
        req_ids = tuple(self._batch.req_ids)
        self._snapshot_generators(table)
        logits = self.logits_buffer.take([logits_index[req_id] for req_id in req_ids], self.num_rows(len(req_ids)))
        if grammar_output is not None:
            forbidden = np.zeros(logits.shape, np.bool_)
            forbidden[: len(req_ids)] = forbidden_tokens(grammar_output, req_ids, logits.shape[1])
            logits.masked_fill_(upload(forbidden, self._device), float("-inf"))
        out: SamplerOutput = self.sampler(logits=logits, sampling_metadata=self._batch.sampling_metadata)
        logprobs = out.logprobs_tensors
        sampled = SampledStep(
            req_ids=req_ids,
            admission_ids=tuple(self._row_admission[req_id] for req_id in req_ids),
            token_ids=HostCopy(out.sampled_token_ids),
            logprobs=None if logprobs is None else HostLogprobs(logprobs, len(req_ids)),
            failed_req_ids=failed,
        )
        self._in_flight = sampled
        return sampled, out.sampled_token_ids.reshape(-1)

    def warm_up(self, run_all: bool) -> None:
        """Sample padding: every number of rows, or the largest only, greedily, at random, and both with top-p and
        top-k.

        ``logits_buffer`` has been given logits of the model once.
        """
        for rows in self._row_buckets if run_all else self._row_buckets[-1:]:
            for metadata in self._plain_metadata(rows):
                self.sampler(logits=self.logits_buffer.take((), rows), sampling_metadata=metadata)

    def build_logprobs(self) -> None:
        """Have vLLM compile its count of ranks, which it does for the first request that wants logprobs: 0.3 s."""
        scores = torch.zeros((2, self._vocab_size), device=self._device)
        self.sampler.gather_logprobs(scores, 1, torch.zeros(2, dtype=torch.int64, device=self._device))

    def profile(self) -> None:
        """Sample for the most requests what takes most memory: penalties over the longest texts, and all logprobs that
        a request may ask for.

        ``logits_buffer`` has been given logits of the model once.
        """
        rows = self._row_buckets[-1]
        ones = torch.ones(rows, dtype=torch.float32, device=self._device)
        longest = np.full((rows, penalty_buckets(self._max_model_len)[-1]), self._vocab_size, np.int64)
        metadata = dataclasses.replace(
            next(iter(self._plain_metadata(rows))),
            no_penalties=False,
            prompt_token_ids=upload(longest, self._device),
            presence_penalties=ones,
            frequency_penalties=ones,
            repetition_penalties=ones,
            output_token_ids=[[0] * self._max_model_len] * rows,
            max_num_logprobs=self.most_logprobs,
        )
        self.sampler(logits=self.logits_buffer.take((), rows), sampling_metadata=metadata)

    def _plain_metadata(self, rows: int) -> Iterator[SamplingMetadata]:
        # Logits processors have state of their own, and have not been told of any row.
        nothing = dataclasses.replace(
            self._batch.sampling_metadata,
            all_greedy=True,
            all_random=False,
            logitsprocs=LogitsProcessors(),
            thinking_budget_state_holder=None,
        )
        yield nothing
        ones = torch.ones(rows, dtype=torch.float32, device=self._device)
        whole = torch.full((rows,), self._vocab_size, dtype=torch.int32, device=self._device)
        for all_random in (True, False):
            for top_p, top_k in ((None, None), (ones, None), (None, whole), (ones, whole)):
                yield dataclasses.replace(
                    nothing, all_greedy=False, all_random=all_random, temperature=ones, top_p=top_p, top_k=top_k
                )

    def _update_rows(self, step: StepRequests, table: RequestTable, req_ids: Iterable[str]) -> tuple[str, ...]:
        """Make the batch hold exactly ``req_ids``; removals free rows that additions fill.

        Returns those of a row that only looks like theirs, because something of their own raises.
        """
        admission_of = dict(zip(step.req_ids, step.admission_ids, strict=True))
        wanted = {req_id: admission_of[req_id] for req_id in req_ids}
        for req_id, admission in list(self._row_admission.items()):
            if wanted.get(req_id) != admission:
                self._batch.remove_request(req_id)
                del self._row_admission[req_id]
                self._failed.discard(req_id)
        for req_id, admission in wanted.items():
            if req_id not in self._row_admission:
                self._add_row(table[req_id])
                self._row_admission[req_id] = admission
        self._batch.condense()
        self._batch.refresh_metadata()
        return tuple(self._failed)

    def _add_row(self, request: RequestState) -> None:
        try:
            self._batch.add_request(self._state_of(request))
        except Exception:  # of any kind: what raises here is this request's own, and the others go on
            logger.exception("Request %s ends with an error: nothing can be sampled for it", request.req_id)
            self._failed.add(request.req_id)
            if request.req_id in self._batch.req_id_to_index:
                self._batch.forget_last_added()
            else:
                self._batch.add_request(self._new_state(request, SamplingParams(temperature=0), None))

    def _state_of(self, request: RequestState) -> CachedRequestState:
        """vLLM's view of the request; its output list is the request's own, so it grows by itself."""
        known = self._states.get(request.req_id)
        if known is not None and known[0] is request:
            self._rewind_generator(known[1])
            return known[1]
        self._snapshots.pop(request.req_id, None)
        params = request.sampling_params
        generator = None
        if params.sampling_type == SamplingType.RANDOM_SEED:
            generator = torch.Generator(device=self._device)
            generator.manual_seed(params.seed)
        state = self._new_state(request, params, generator)
        self._states[request.req_id] = (request, state)
        return state

    @staticmethod
    def _new_state(
        request: RequestState, params: SamplingParams, generator: torch.Generator | None
    ) -> CachedRequestState:
        return CachedRequestState(
            req_id=request.req_id,
            prompt_token_ids=request.prompt,
            mm_features=[],
            sampling_params=params,
            generator=generator,
            block_ids=([],),
            num_computed_tokens=0,
            output_token_ids=request.output,
        )

    def _snapshot_generators(self, table: RequestTable) -> None:
        """Where each seeded generator stands before the token that is now drawn from it, by its place in the output."""
        if not self._is_async:
            return
        for row, generator in self._batch.generators.items():
            state = self._states[self._batch.req_ids[row]][1]
            snapshots = self._snapshots.setdefault(state.req_id, {})
            snapshots[len(state.output_token_ids)] = generator.get_state()
            while len(snapshots) > MAX_DROPPED_TOKENS:
                del snapshots[min(snapshots)]

    def _rewind_generator(self, state: CachedRequestState) -> None:
        """Back to before the first token that the scheduler has dropped, if it has: it will be drawn again."""
        snapshot = self._snapshots.get(state.req_id, {}).get(len(state.output_token_ids))
        if snapshot is not None:
            assert state.generator is not None
            state.generator.set_state(snapshot)


def forbidden_tokens(grammar: GrammarOutput, req_ids: Sequence[str], vocab_size: int) -> np.ndarray:
    """Bool [n, vocab_size], true where row i's grammar (if it has one) forbids the token. ``req_ids``: of the n rows.

    vLLM's bitmask has a word for 32 tokens, its lowest bit the first. Its own kernel for a device that is neither a
    CPU nor a GPU goes through inductor, which a Gaudi has not; a mask made on the host needs no kernel.
    """
    forbidden = np.zeros((len(req_ids), vocab_size), np.bool_)
    row_of = {req_id: row for row, req_id in enumerate(req_ids)}
    for req_id, words in zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True):
        row = row_of.get(req_id)
        if row is not None:
            allowed = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")[:vocab_size]
            forbidden[row, : len(allowed)] = allowed == 0
    return forbidden
