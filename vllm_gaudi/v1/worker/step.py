# SPDX-License-Identifier: Apache-2.0
"""The step: what the owners of one pool do, and in which order. Nothing else lives here.

Owns: the order of a step, which is its correctness argument:

    free before take        the request table hands slots back before it admits anyone
    zero before restore     a fresh attention page may have become a checkpoint's block within one scheduling step
    restore before read     the forward reads slots, never blocks
    decode before admitted  an admitted request may hit an attention block that a decoding one fills in this step
    forward before save     a checkpoint is the state after a boundary's last token: in a staging row when the forward
                            runs over it, and saved before the next forward stages; in the slot at the step's end
    save before hand-on     the next step may give the block, or the hit on it, to another request

Never: tensor arithmetic, a branch on the model's family, or padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_gaudi.bucketing.grid import BucketGrid, DecodeBucket, PrefillBucket
from vllm_gaudi.v1.worker.gdn_checkpoint.plan import plan_checkpoints
from vllm_gaudi.v1.worker.gdn_checkpoint.store import StateZeroer
from vllm_gaudi.v1.worker.graphs import GraphRunner
from vllm_gaudi.v1.worker.inputs import InputBuilder, ModelInputs
from vllm_gaudi.v1.worker.kv_cache import KVCaches
from vllm_gaudi.v1.worker.output import StepOutput
from vllm_gaudi.v1.worker.prompt_logprobs import PromptLogprobsInFlight, PromptLogprobsWorker
from vllm_gaudi.v1.worker.requests import RequestTable, StepRequests
from vllm_gaudi.v1.worker.sampling import SamplingState
from vllm_gaudi.v1.worker.state_slots import StateSlotPool

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput


@dataclass(frozen=True)
class PendingStep:
    """A step whose forwards are issued and whose tokens are not sampled yet."""

    step: StepRequests
    logits_index: dict[str, int]  # of the requests that sample, where their logits are kept
    prompt_logprobs: dict[str, PromptLogprobsInFlight]


class StepRunner:
    """The owners of one pool, complete and never exchanged, and the two halves of a step over them.

    ``cached_groups``: KV cache groups whose blocks are cached, empty without prefix caching; ``is_async``: outputs are
    handed out before the device has finished.
    """

    def __init__(
        self,
        *,
        graphs: GraphRunner,
        grid: BucketGrid,
        caches: KVCaches,
        store: StateZeroer,
        state_slots: StateSlotPool,
        requests: RequestTable,
        inputs: InputBuilder,
        sampling: SamplingState,
        prompt_logprobs: PromptLogprobsWorker,
        cached_groups: tuple[int, ...],
        is_async: bool,
    ):
        self.graphs = graphs
        self.grid = grid
        self.caches = caches
        self.store = store
        self.state_slots = state_slots
        self.requests = requests
        self.inputs = inputs
        self.sampling = sampling
        self.prompt_logprobs = prompt_logprobs
        self.cached_groups = cached_groups
        self.is_async = is_async
        self._pending: PendingStep | None = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the step's forwards. Returns None when ``sample_tokens`` must follow."""
        if self._pending is not None:
            raise RuntimeError("execute_model is called again before sample_tokens")
        self._remove_requests(scheduler_output.finished_req_ids)
        step = self.requests.apply(scheduler_output)
        plan = plan_checkpoints(step, self.caches.geometry.block_size, self.cached_groups)
        self.store.before_forward(plan)
        if step.is_empty:
            return EMPTY_MODEL_RUNNER_OUTPUT
        logits_index: dict[str, int] = {}
        prompt_logprobs: dict[str, PromptLogprobsInFlight] = {}
        for inputs in self.inputs.build(step, plan.intermediate_saves):
            hidden = self.graphs.run(inputs)
            if inputs.staged is not None:
                self.store.save(inputs.staged)
            prompt_logprobs |= self.prompt_logprobs.compute(step, inputs, hidden, self.requests)
            self._keep_logits(step, inputs, hidden, logits_index)
        self.store.save(plan.save)
        self._pending = PendingStep(step=step, logits_index=logits_index, prompt_logprobs=prompt_logprobs)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample the tokens of the step that ``execute_model`` has issued."""
        pending, self._pending = self._pending, None
        if pending is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.sampling.drain_sampled_tokens(self.requests)
        step = pending.step
        sampled = None
        if pending.logits_index:
            sampled, token_ids = self.sampling.sample(step, self.requests, pending.logits_index, grammar_output)
            slot_of = dict(zip(step.req_ids, step.state_slots.tolist(), strict=True))
            self.inputs.store_sampled_tokens(
                np.array([slot_of[req_id] for req_id in sampled.req_ids], np.int32), token_ids
            )
        self.requests.count_sampled(step)
        output = StepOutput(step, sampled, pending.prompt_logprobs)
        return output if self.is_async else output.get_output()

    def dummy_run(self, bucket: PrefillBucket | DecodeBucket) -> torch.Tensor:
        """Run one bucket of padding through model and logits, which are returned and kept as nobody's."""
        inputs = self.inputs.dummy_inputs(bucket)
        logits = self.graphs.logits(self.graphs.run(inputs), inputs.logits_indices)
        self.sampling.logits_buffer.add(logits, {})
        return logits

    def profile_prompt_logprobs(self, bucket: PrefillBucket, num_logprobs: int) -> None:
        """One bucket of padding, and so many logprobs of each token of a chunk of it."""
        self.prompt_logprobs.profile(self.graphs.run(self.inputs.dummy_inputs(bucket)), num_logprobs)

    def _remove_requests(self, finished: set[str]) -> None:
        self.sampling.remove_requests(finished)
        self.prompt_logprobs.remove_requests(finished)

    def _keep_logits(
        self, step: StepRequests, inputs: ModelInputs, hidden: torch.Tensor, logits_index: dict[str, int]
    ) -> None:
        """Logits of the bucket's sequences that sample; computed for all of them, since shapes are fixed."""
        indices: dict[int, int] = {}
        for n, i in enumerate(inputs.members):
            if step.samples[i]:
                indices[n] = logits_index[step.req_ids[i]] = len(logits_index)
        if indices:
            self.sampling.logits_buffer.add(self.graphs.logits(hidden, inputs.logits_indices), indices)
