# SPDX-License-Identifier: Apache-2.0
"""Logprobs of prompt tokens: computed chunk by chunk as a prompt runs, collected until its last chunk.

Owns: which rows of a forward get logprobs, the logits call for them, and what unfinished prompts have so far.
Never: sampled tokens, or a wait for the device: tensors travel to the host while later steps run.

Ordering rule: ``compute`` follows each forward, before the next one; a prompt is handed out with its last chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from vllm_gaudi import device
from vllm_gaudi.v1.worker.inputs import ModelInputs
from vllm_gaudi.v1.worker.requests import RequestState, RequestTable, StepRequests
from vllm_gaudi.v1.worker.sampling import HostLogprobs

MOST_ROWS = 128
"""Prompt tokens whose logprobs are computed at a time."""

MOST_LOGITS = 2**23
"""Elements of such a chunk: it takes about four times its size in float32, beside the model."""


def chunk_rows(vocab_size: int) -> int:
    """Prompt tokens whose logprobs are computed at a time: 128, or the power of two that keeps to ``MOST_LOGITS``."""
    return max(1, min(MOST_ROWS, 2 ** ((MOST_LOGITS // vocab_size).bit_length() - 1)))


class PromptLogprobsInFlight:
    """Prompt logprobs of one request, from chunks that may still be on their way to the host."""

    def __init__(self, request: RequestState, num_logprobs: int):
        self.request = request
        self._shape = (request.num_prompt - 1, num_logprobs + 1)
        self._chunks: list[tuple[int, HostLogprobs]] = []

    def add(self, start: int, num_tokens: int, chunk: LogprobsTensors) -> None:
        """Tokens from ``start`` on have the first rows of ``chunk`` [n, num_logprobs + 1], in place of earlier ones."""
        self._chunks.append((start, HostLogprobs(chunk, num_tokens)))

    def get(self) -> LogprobsTensors:
        """All tokens, on the host; blocks until the last chunk has arrived."""
        whole = LogprobsTensors.empty_cpu(*self._shape)
        for start, chunk in self._chunks:
            arrived = chunk.get()
            where = slice(start, start + arrived.logprobs.shape[0])
            whole.logprob_token_ids[where].copy_(arrived.logprob_token_ids)
            whole.logprobs[where].copy_(arrived.logprobs)
            whole.selected_token_ranks[where].copy_(arrived.selected_token_ranks)
        return whole


class PromptLogprobsWorker:
    """``prompt_logits(hidden, rows)`` gives logits [n, V] of any rows; ``logprobs_mode`` as vLLM's flag."""

    def __init__(
        self,
        prompt_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        sampler: Sampler,
        vocab_size: int,
        logprobs_mode: str,
        device: torch.device,
    ):
        self._prompt_logits = prompt_logits
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._chunk_rows = chunk_rows(vocab_size)
        self._wants_raw_logits = logprobs_mode in ("raw_logits", "processed_logits")
        self._device = device
        self._in_flight: dict[str, PromptLogprobsInFlight] = {}

    def compute(
        self, step: StepRequests, inputs: ModelInputs, hidden: torch.Tensor, requests: RequestTable
    ) -> dict[str, PromptLogprobsInFlight]:
        """Logprobs of the prompt tokens that the forward ``inputs`` -> ``hidden`` [rows, H] has run over.

        Returns the prompts that it completes, by request id.
        """
        finished = {}
        for n, i in enumerate(inputs.members):
            request = requests[step.req_ids[i]]
            num_logprobs = self.num_prompt_logprobs(request)
            if num_logprobs is None or step.num_computed_tokens[i] >= request.num_prompt or request.output:
                continue
            start, end = int(step.num_computed_tokens[i]), int(step.end[i])
            last = min(end, request.num_prompt - 1)  # the last token that has a next prompt token
            in_flight = self._in_flight_of(request, num_logprobs)
            for offset, count, size in _slices(last - start, inputs.attn.query, self._chunk_rows):
                row = n * inputs.attn.query + offset
                targets = np.zeros(size, np.int64)
                targets[:count] = request.tokens[start + offset + 1 : start + offset + count + 1]
                rows = torch.arange(row, row + size, dtype=torch.int32, device=self._device)
                chunk = self._logprobs(self._prompt_logits(hidden, rows), targets, num_logprobs)
                in_flight.add(start + offset, count, chunk)
            if end >= request.num_prompt:
                finished[request.req_id] = in_flight
                self._in_flight.pop(request.req_id, None)
        return finished

    def profile(self, hidden: torch.Tensor, num_logprobs: int) -> None:
        """One chunk, with ``num_logprobs`` of each token, of ``hidden`` [rows, H]."""
        size = min(self._chunk_rows, hidden.shape[0])
        rows = torch.arange(size, dtype=torch.int32, device=self._device)
        self._logprobs(self._prompt_logits(hidden, rows), np.zeros(size, np.int64), num_logprobs)

    def num_prompt_logprobs(self, request: RequestState) -> int | None:
        """How many logprobs the request wants of each prompt token, or None."""
        wanted = request.sampling_params.prompt_logprobs
        return self._vocab_size if wanted == -1 else wanted

    def remove_requests(self, req_ids: set[str]) -> None:
        for req_id in req_ids:
            self._in_flight.pop(req_id, None)

    def _in_flight_of(self, request: RequestState, num_logprobs: int) -> PromptLogprobsInFlight:
        """What is known of this very request; another one may have had its id."""
        known = self._in_flight.get(request.req_id)
        if known is None or known.request is not request:
            known = self._in_flight[request.req_id] = PromptLogprobsInFlight(request, num_logprobs)
        return known

    def _logprobs(self, logits: torch.Tensor, targets: np.ndarray, num_logprobs: int) -> LogprobsTensors:
        """Logprobs of ``targets`` [n] (the prompt's next tokens) under ``logits`` [n, V], with the top ones."""
        scores = logits.to(torch.float32) if self._wants_raw_logits else self._sampler.compute_logprobs(logits)
        return self._sampler.gather_logprobs(scores, num_logprobs, device.upload(targets, self._device))


def _slices(num_tokens: int, query: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Windows of one size, at most ``most``, over the first ``num_tokens`` of ``query`` rows: (first row, used rows,
    size).
    """
    size = min(most, query)
    for first in range(0, num_tokens, size):
        offset = min(first, query - size)
        yield offset, min(size, num_tokens - offset), size
