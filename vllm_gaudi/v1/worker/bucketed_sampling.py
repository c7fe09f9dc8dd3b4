# SPDX-License-Identifier: Apache-2.0
"""vLLM's input batch and sampler at sizes from buckets, so that sampling asks for shapes that are known beforehand.

Owns: how many rows are sampled for n requests, that the rows after them use default sampling parameters and are hidden
from a user's logits processors, the lengths that penalties are given prompts and outputs in, and the logits of a step's
sampling rows while its forwards run.
Never: which requests sample, or what is done with their tokens (``sampling``).

A device that compiles an operator per shape would otherwise compile one for every number of requests, and with
penalties for every token.

Ordering rule: ``LogitsBuffer.add`` for each forward of a step, then one ``allocate``; the next step writes over them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.utils import apply_penalties
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_gaudi.bucketing.strategy import exponential_buckets, round_up_to_bucket
from vllm_gaudi.device import upload

SHORTEST_TEXT = 128
"""Tokens: penalties are given prompts and outputs of this length and its doubles."""


def penalty_buckets(max_model_len: int) -> tuple[int, ...]:
    """Lengths in tokens that prompts and outputs are padded to."""
    return exponential_buckets(min(SHORTEST_TEXT, max_model_len), max_model_len)


class BucketedInputBatch(InputBatch):
    """vLLM's batch whose device tensors have as many rows as a step of ``row_buckets``, which ends at max_num_reqs."""

    def __init__(self, row_buckets: Sequence[int], **arguments: Any):
        self._row_buckets = tuple(row_buckets)
        self._penalty_buckets = penalty_buckets(arguments["max_model_len"])
        self._num_rows = 0
        self._num_masked = 0  # rows that may have a mask of allowed tokens
        super().__init__(**arguments)

    @property
    def num_reqs(self) -> int:
        """Requests; while metadata is made, rows: vLLM sizes its tensors by it."""
        return max(len(self.req_id_to_index), self._num_rows)

    def rows_of(self, num_requests: int) -> int:
        """Rows that are sampled for so many requests."""
        return round_up_to_bucket(self._row_buckets, num_requests)

    def forget_last_added(self) -> None:
        """The row of a request whose parameters have raised in ``add_request``: logits processors see no parameters."""
        row, _, prompt, output = self.batch_update_builder.added[-1]
        self.batch_update_builder.added[-1] = (row, SamplingParams(temperature=0), prompt, output)

    def refresh_metadata(self) -> None:
        """Metadata of ``rows_of(requests)`` rows; those after the requests use default sampling parameters."""
        requests = len(self.req_id_to_index)
        rows = self.rows_of(requests)
        for values, nothing in (
            (self.temperature_cpu, 1.0),
            (self.top_p_cpu, 1.0),
            (self.top_k_cpu, self.vocab_size),
            (self.frequency_penalties_cpu, 0.0),
            (self.presence_penalties_cpu, 0.0),
            (self.repetition_penalties_cpu, 1.0),
        ):
            values[requests:rows] = nothing
        allowed = self.allowed_token_ids_mask_cpu_tensor
        if allowed is not None:
            # vLLM moves a row's mask and leaves a copy behind, which would bind the next request in that row. Rows
            # after those that were in use are clear.
            allowed[requests : self._num_masked] = False
        self._num_masked = requests
        self._num_rows = rows
        try:
            super().refresh_metadata()
        finally:
            self._num_rows = 0

    def _make_prompt_token_ids_cpu_tensor(self) -> torch.Tensor:
        """[rows, length of a list of buckets] int64; vocab_size where a prompt has no token."""
        requests = len(self.req_id_to_index)
        lengths = self.num_prompt_tokens[:requests]
        ids = np.full(
            (self.num_reqs, round_up_to_bucket(self._penalty_buckets, int(lengths.max()))), self.vocab_size, np.int64
        )
        for row, length in enumerate(lengths.tolist()):
            ids[row, :length] = self.token_ids_cpu[row, :length]
        return torch.from_numpy(ids)


class UnpaddedLogitsProcessor(LogitsProcessor):
    """A processor of the user's, which is told of requests and given their rows, and nothing of padding.

    ``num_requests()``: how many there are, the first rows.
    """

    def __init__(self, inner: LogitsProcessor, num_requests: Callable[[], int]):
        self.inner = inner
        self._num_requests = num_requests

    def is_argmax_invariant(self) -> bool:
        return self.inner.is_argmax_invariant()

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            batch_update = dataclasses.replace(batch_update, batch_size=self._num_requests())
        self.inner.update_state(batch_update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mutates ``logits`` [rows, V] and returns them."""
        rows = logits[: self._num_requests()]
        processed = self.inner.apply(rows)
        if processed is not rows:
            rows.copy_(processed)
        return logits


def unpadded(processors: LogitsProcessors, num_requests: Callable[[], int]) -> LogitsProcessors:
    """``processors`` with those that are not vLLM's own kept from seeing padding."""
    return LogitsProcessors(
        processor
        if isinstance(processor, tuple(BUILTIN_LOGITS_PROCESSORS))
        else UnpaddedLogitsProcessor(processor, num_requests)
        for processor in processors.all
    )


class BucketedSampler(Sampler):
    """vLLM's sampler whose penalties are given outputs in lengths of a list of buckets."""

    def __init__(self, max_model_len: int, **arguments: Any):
        super().__init__(**arguments)
        self._penalty_buckets = penalty_buckets(max_model_len)

    def apply_penalties(  # static in vLLM, and called on the sampler
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> torch.Tensor:
        """Mutates ``logits`` [rows, V] and returns them; ``output_token_ids`` of the requests, the first rows."""
        if sampling_metadata.no_penalties:
            return logits
        rows, vocab_size = logits.shape
        longest = max(1, *map(len, output_token_ids)) if output_token_ids else 1
        ids = np.full((rows, round_up_to_bucket(self._penalty_buckets, longest)), vocab_size, np.int64)
        for row, tokens in enumerate(output_token_ids):
            ids[row, : len(tokens)] = tokens
        return apply_penalties(
            logits,
            sampling_metadata.prompt_token_ids,
            upload(ids, logits.device),
            sampling_metadata.presence_penalties,
            sampling_metadata.frequency_penalties,
            sampling_metadata.repetition_penalties,
        )


class LogitsBuffer:
    """Logits of at most ``max_rows`` sampling rows of a step, and one more row for those that nobody samples from."""

    def __init__(self, max_rows: int, device: torch.device):
        self._max_rows = max_rows
        self._device = device
        self._logits: torch.Tensor | None = None  # [max_rows + 1, V], made with the first logits

    def add(self, logits: torch.Tensor, logits_index: Mapping[int, int]) -> None:
        """Row i of a forward's ``logits`` [batch, V] is kept at ``logits_index[i]``; one without is not kept."""
        if self._logits is None:
            self._logits = logits.new_zeros((self._max_rows + 1, logits.shape[1]))
        indices = np.full(logits.shape[0], self._max_rows, np.int64)  # index_copy_ takes no other
        for row, place in logits_index.items():
            indices[row] = place
        self._logits.index_copy_(0, self._upload(indices), logits)

    def take(self, indices: Sequence[int], num_rows: int) -> torch.Tensor:
        """New [num_rows, V]: the rows kept at ``indices``, then padding."""
        assert self._logits is not None
        rows = np.full(num_rows, self._max_rows, np.int32)
        rows[: len(indices)] = indices
        return self._logits.index_select(0, self._upload(rows))

    def _upload(self, rows: np.ndarray) -> torch.Tensor:
        return upload(rows, self._device)
