# SPDX-License-Identifier: Apache-2.0
"""A scheduler without a model: vLLM's scheduling of thousands of turns in seconds, tokens made up.

Owns: driving a scheduler of an engine's configuration, with a pool and a retention interval of the caller's choice.
Never: states; what is measured here is which boundaries are there when a request asks for them.

Ordering rule: ``run`` returns when every request that was added has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_gaudi.testing.engine import Engine, greedy
from vllm_gaudi.v1.core.sched.hpu_scheduler import HPUScheduler


@dataclasses.dataclass
class Turn:
    """``prompt``, ``answer``, and the tokens that it has reused once it is admitted."""

    prompt: list[int]
    answer: list[int]
    hit: int | None = None


class ModelFree:
    """``serving``: an engine whose configuration is taken over; ``num_blocks`` of the pool, the null block included."""

    def __init__(self, serving: Engine, num_blocks: int, retention_interval: int | None):
        config = serving.core.vllm_config
        self.block_size = serving.block_size
        kv_cache_config = dataclasses.replace(
            serving.scheduler.kv_cache_config,
            num_blocks=num_blocks,
            prefix_cache_retention_interval=retention_interval,
        )
        self.scheduler = HPUScheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=self.block_size,
            hash_block_size=self.block_size,
        )
        self._hasher = serving.core.request_block_hasher
        self._turns: dict[str, Turn] = {}
        self._num_added = 0

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> Turn:
        """Queue a request that will be answered with ``answer``."""
        name = f"turn-{self._num_added}"
        self._num_added += 1
        turn = self._turns[name] = Turn(list(prompt), list(answer))
        self.scheduler.add_request(Request(name, turn.prompt, greedy(len(answer)), None, block_hasher=self._hasher))
        return turn

    def step(self) -> None:
        """One scheduling step, as if its step had run."""
        output = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self._turns[new.req_id].hit = new.num_computed_tokens
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request, turn = self.scheduler.requests[name], self._turns[name]
            reaches_end = request.num_computed_tokens >= request.num_tokens
            sampled.append([turn.answer[request.num_output_tokens]] if reaches_end else [])
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        )

    def run(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()
