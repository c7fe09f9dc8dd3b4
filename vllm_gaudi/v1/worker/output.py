# SPDX-License-Identifier: Apache-2.0
"""From a sampled step to what vLLM's engine reads.

Owns: vLLM's output records, with and without waiting for the device.
Never: sampling, or the requests' own state.

Ordering rule: ``get_output`` may run in another thread than the next step; it reads only what this step froze.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_gaudi.v1.worker.prompt_logprobs import PromptLogprobsInFlight
from vllm_gaudi.v1.worker.requests import StepRequests
from vllm_gaudi.v1.worker.sampling import SampledStep


@dataclass
class HPUModelRunnerOutput(ModelRunnerOutput):
    """vLLM's, and the requests that could not be served: the scheduler ends each of them with an error."""

    failed_req_ids: tuple[str, ...] = ()


class StepOutput(AsyncModelRunnerOutput):
    """``sampled`` is None for a step in which no request reached its last known token."""

    def __init__(
        self,
        step: StepRequests,
        sampled: SampledStep | None,
        prompt_logprobs: dict[str, PromptLogprobsInFlight],
    ):
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        sampling = sampled.req_ids if sampled is not None else ()
        is_sampling = set(sampling)
        self._req_ids = [*sampling, *(req_id for req_id in step.req_ids if req_id not in is_sampling)]

    def get_output(self) -> HPUModelRunnerOutput:
        """Wait for the sampled tokens and return the step's output; requests that did not sample get an empty list."""
        tokens: list[list[int]] = []
        logprobs = None
        if self._sampled is not None:
            tokens = self._sampled.tokens()
            if self._sampled.logprobs is not None:
                logprobs = self._sampled.logprobs.get().tolists()
        tokens += [[] for _ in range(len(self._req_ids) - len(tokens))]
        return HPUModelRunnerOutput(
            req_ids=self._req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(self._req_ids)},
            sampled_token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs_dict={req_id: scores.get() for req_id, scores in self._prompt_logprobs.items()},
            pooler_output=[],
            failed_req_ids=() if self._sampled is None else self._sampled.failed_req_ids,
        )
