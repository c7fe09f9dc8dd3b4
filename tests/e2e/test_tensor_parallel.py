# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel 2 over gloo against one rank: same tokens, near logprobs, same slots on both ranks.

Owns: the workers as real processes, compared with an engine of one rank.
Never: bits across rank counts: a sum over ranks rounds differently.

Ordering rule: ranks are shown to hash differently before their slots are compared.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_gaudi.testing.engine import DEFAULTS, close_sockets

TOKENS = 16
NEAR = 1e-4


def prompt_of(length: int) -> list[int]:
    source = random.Random(20000 + length)
    return [source.randrange(10, 500) for _ in range(length)]


@dataclass
class Answer:
    tokens: list[int]
    logprobs: torch.Tensor  # [tokens, vocabulary]


@dataclass
class Ranks:
    """An engine whose workers may be other processes; only what every executor offers is used."""

    engine: LLMEngine
    preempted: set[str] = field(default_factory=set)

    def ask(self, function: Callable[[Any], Any]) -> list[Any]:
        """``function`` of each rank's worker."""
        return self.engine.collective_rpc(function)

    def run(self, prompts: dict[str, list[int]], after_step: Callable[[], None] = lambda: None) -> dict[str, Answer]:
        params = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=-1, flat_logprobs=True
        )
        for req_id, prompt in prompts.items():
            self.engine.add_request(req_id, {"prompt_token_ids": prompt}, params)
        answers = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    answers[output.request_id] = self._answer(output.outputs[0])
            after_step()
        return answers

    @staticmethod
    def _answer(completion: Any) -> Answer:
        flat = completion.logprobs
        ids = torch.tensor(flat.token_ids).view(len(completion.token_ids), -1)
        found = torch.full((ids.shape[0], ids.shape[1] - 1), float("nan"))
        return Answer(list(completion.token_ids), found.scatter_(1, ids, torch.tensor(flat.logprobs).view_as(ids)))


@contextlib.contextmanager
def ranks(path: Any, num_ranks: int, **flags: Any) -> Iterator[Ranks]:
    backend = "mp" if num_ranks > 1 else "uni"
    parallel = {"tensor_parallel_size": num_ranks, "distributed_executor_backend": backend, "max_logprobs": -1}
    opened = LLMEngine.from_engine_args(EngineArgs(model=str(path), **{**DEFAULTS, **parallel, **flags}))
    made = Ranks(opened)
    scheduler = opened.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        made.preempted.update(output.preempted_req_ids or ())
        return output

    scheduler.schedule = watched
    try:
        yield made
    finally:
        try:
            opened.engine_core.shutdown()
        finally:
            close_sockets()


def assert_near(answers: dict[str, Answer], wanted: dict[str, Answer]) -> None:
    assert answers.keys() == wanted.keys()
    for req_id, answer in answers.items():
        assert answer.tokens == wanted[req_id].tokens and len(answer.tokens) == TOKENS
        assert (answer.logprobs - wanted[req_id].logprobs).abs().max() <= NEAR


def facts(worker: Any) -> tuple[Any, ...]:
    """What both ranks must agree on, and the process."""
    runner = worker.model_runner
    geometry = runner.step.caches.geometry
    return os.getpid(), geometry.num_blocks, geometry.block_size, tuple(runner.step.caches.k[0].shape)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("q35_dense", {"max_num_batched_tokens": 100, "block_size": 128}),
        ("next_moe", {"async_scheduling": False, "block_size": 128}),
        ("qwen3", {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 4 * 2**20}),
    ],
)
def test_two_ranks_answer_as_one(name, flags, checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    path = checkpoint(name)
    prompts = {f"r{length}": prompt_of(length) for length in (129, 1, 65, 322, 17)}
    with ranks(path, 1, **flags) as one:
        wanted = one.run(prompts)
        ((pid, blocks, block_size, page),) = one.ask(facts)
    assert pid == os.getpid()
    with ranks(path, 2, **flags) as two:
        assert_near(two.run(prompts), wanted)
        found = two.ask(facts)
    assert len({pid, *(rank[0] for rank in found)}) == 3, "the ranks are not processes of their own"
    assert found[0][1:] == found[1][1:]
    heads = page[1] // 2
    assert found[0][2] == block_size and found[0][3][1] == heads
    if "kv_cache_memory_bytes" in flags:
        assert found[0][1] in (2 * blocks, 2 * blocks + 1), "half the heads, twice the blocks"
    else:
        assert found[0][1] == blocks


def graphs_of(worker: Any) -> tuple[str | None, int, int, dict[str, int]]:
    from torch._dynamo.utils import counters

    graphs = worker.model_runner.graphs
    return graphs.backend, counters["stats"]["unique_graphs"], graphs.num_late_graphs, dict(counters["graph_break"])


def test_two_ranks_answer_as_one_with_compiled_layers(checkpoint, monkeypatch):
    """The reduction over ranks is inside each layer's graph."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    path = checkpoint("q35_moe")
    flags = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "enable_prefix_caching": True}
    prompts = {f"r{length}": prompt_of(length) for length in (41, 17, 46)}
    with ranks(path, 1, **flags) as one:
        wanted = one.run(prompts)
    monkeypatch.setenv("VLLM_GAUDI_COMPILE", "aot_eager")
    monkeypatch.setenv("VLLM_SKIP_WARMUP", "0")
    with ranks(path, 2, **flags) as two:
        assert_near(two.run(prompts), wanted)
        for backend, made, late, breaks in two.ask(graphs_of):
            assert backend == "aot_eager" and made > 10
            assert (late, breaks) == (0, {})


def test_two_ranks_shut_down_where_no_worker_ever_ran_in_the_engines_process(checkpoint, monkeypatch):
    """As in a fresh process: what an engine of one rank has done to ``torch.accelerator`` here is taken back."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    for name in ("empty_cache", "empty_host_cache"):
        monkeypatch.setattr(torch.accelerator, name, getattr(torch.accelerator.memory, name))
    with ranks(checkpoint("llama"), 2) as two:
        assert len(two.ask(facts)) == 2


def slots_and_hash(worker: Any) -> tuple[dict[str, int | None], int]:
    table = worker.model_runner.step.requests
    return {req_id: state.state_slot for req_id, state in table._requests.items()}, hash("a request id")


def test_ranks_that_hash_differently_hand_out_the_same_slots_through_preemptions(checkpoint, monkeypatch):
    """Spawned workers start Python anew, each with its own hash seed: any order taken from a set would differ."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    path = checkpoint("q35_dense")
    flags = {"max_model_len": 128, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 14, "max_num_seqs": 6}
    prompts = {f"r{n}": prompt_of(length) for n, length in enumerate((75, 76, 77, 60, 61, 62, 40, 90, 30, 20))}
    seen: list[dict[str, int | None]] = []
    with ranks(path, 2, **flags) as two:

        def compare() -> None:
            (first, one_hash), (second, other_hash) = two.ask(slots_and_hash)
            assert one_hash != other_hash
            assert first == second
            taken = [slot for slot in first.values() if slot is not None]
            assert len(set(taken)) == len(taken)
            seen.append(first)

        answers = two.run(prompts, after_step=compare)
        assert len(two.preempted) >= 2
    assert any(None in slots.values() for slots in seen), "no preempted request was looked at"
    with ranks(path, 1, **flags) as one:
        wanted = one.run(prompts)
        assert len(one.preempted) == len(two.preempted)
    assert_near(answers, wanted)
