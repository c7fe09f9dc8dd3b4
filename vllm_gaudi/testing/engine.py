# SPDX-License-Identifier: Apache-2.0
"""An in-process engine for tests: the real vLLM engine, one step at a time, with the raw logits of every sampled token.

Owns: starting and stopping an engine in this process, and what a request gave (tokens, logits, cached tokens).
Never: a stand-in for a part of the engine; the only thing added is a tap on our own sampling.

Ordering rule: one engine at a time per process; ``close`` tears vLLM's process groups down so that the next may differ.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 400,
    "block_size": 16,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}


@dataclass
class Result:
    """What one request gave. ``logits`` [n, V]: the rows its tokens were chosen from, before any processing."""

    tokens: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    prompt_logprobs: Any = None
    logprobs: Any = None


class Engine:
    """``flags`` are ``EngineArgs`` fields over ``DEFAULTS``."""

    def __init__(self, checkpoint: str | Path, **flags: Any):
        # An engine collects garbage four times, most of a second in a process of this size; with everything that is
        # there already out of the collector's sight until ``close`` it takes a tenth of that.
        gc.freeze()
        self._engine = LLMEngine.from_engine_args(EngineArgs(model=str(checkpoint), **{**DEFAULTS, **flags}))
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._results: dict[str, Result] = {}
        self._count = 0
        self._tap()

    # Parts of the engine that tests look at

    @property
    def core(self) -> Any:
        return self._engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def block_size(self) -> int:
        return self.runner.step.caches.geometry.block_size

    @property
    def chunk(self) -> int:
        return self.runner.step.caches.geometry.gdn_chunk

    @property
    def vllm_engine(self) -> LLMEngine:
        return self._engine

    # Requests

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, **kwargs: Any) -> str:
        """Queue a request of token ids; greedy and 16 tokens unless ``params`` says otherwise. Returns its id."""
        req_id = f"r{self._count}"
        self._count += 1
        params = params or greedy(16)
        inputs: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if "cache_salt" in kwargs:
            inputs["cache_salt"] = kwargs.pop("cache_salt")
        self._results[req_id] = Result()
        self._engine.add_request(req_id, inputs, params, **kwargs)
        return req_id

    def step(self) -> list[str]:
        """One engine step; returns the ids of the requests that finished."""
        finished = []
        for output in self._engine.step():
            result = self._results.get(output.request_id)
            if result is None:
                continue
            completion = output.outputs[0]
            result.tokens = list(completion.token_ids)
            result.cached_tokens = output.num_cached_tokens
            result.logprobs = completion.logprobs
            if output.prompt_logprobs is not None:
                result.prompt_logprobs = output.prompt_logprobs
            if output.finished:
                result.finish_reason = completion.finish_reason
                rows = self._rows.pop(self._internal_id(output.request_id), [])[: len(result.tokens)]
                result.logits = torch.stack(rows) if rows else None
                finished.append(output.request_id)
        return finished

    def run(self, req_ids: Iterable[str] | None = None) -> None:
        """Step until ``req_ids`` (default: all requests) have finished."""
        waiting = set(self._results if req_ids is None else req_ids)
        waiting = {r for r in waiting if self._results[r].finish_reason is None}
        while waiting and self._engine.has_unfinished_requests():
            waiting -= set(self.step())

    def drain(self) -> None:
        """Step until the engine has nothing left, so that the worker has seen every finished request."""
        while self._engine.has_unfinished_requests():
            self.step()

    def abort(self, req_id: str) -> None:
        self._engine.abort_request([req_id])
        self._results[req_id].finish_reason = "abort"

    def take(self, req_id: str) -> Result:
        return self._results.pop(req_id)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **kwargs: Any,
    ) -> list[Result]:
        """Run ``prompts`` together to the end."""
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        req_ids = [self.add(prompt, p, **kwargs) for prompt, p in zip(prompts, each, strict=True)]
        self.run(req_ids)
        return [self.take(req_id) for req_id in req_ids]

    def close(self) -> None:
        """Shut the engine down; vLLM's own shutdown takes the process groups along and unfreezes the collector."""
        self._engine.engine_core.shutdown()

    def _internal_id(self, req_id: str) -> str:
        """vLLM may run a request under a name of its own; the tap sees that one."""
        for internal in self._rows:
            if internal == req_id or internal.rsplit("-", 1)[0] == req_id:
                return internal
        return req_id

    def _tap(self) -> None:
        sampling = self.runner.sampling
        sample = sampling.sample

        def tapped(step: Any, table: Any, logits_index: Mapping[str, int], *rest: Any) -> Any:
            places = list(logits_index.values())
            rows = sampling.logits_buffer.take(places, sampling.num_rows(len(places)))
            for req_id, row in zip(logits_index, rows[: len(places)], strict=True):
                self._rows.setdefault(req_id, []).append(row)
            return sample(step, table, logits_index, *rest)

        sampling.sample = tapped


def close_sockets() -> None:
    """Close every ZeroMQ socket of this process; to be called when an engine of several ranks has shut down.

    vLLM leaves the sockets of its message queues to the garbage collector, which may reach their context first; that
    one then waits for them for ever, in the middle of the next engine's start.
    """
    for it in gc.get_objects():
        if issubclass(type(it), zmq.Socket) and not it.closed:
            it.close(linger=0)


def greedy(max_tokens: int, **kwargs: Any) -> SamplingParams:
    """Greedy, to the full length, no text."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **kwargs)


@contextlib.contextmanager
def engine(checkpoint: str | Path, **flags: Any) -> Iterator[Engine]:
    """An ``Engine`` that is closed at the end, also after a failure."""
    opened = Engine(checkpoint, **flags)
    try:
        yield opened
    finally:
        opened.close()
