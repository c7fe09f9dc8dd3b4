# SPDX-License-Identifier: Apache-2.0
"""Prefix caching over two ranks on gloo: a hit equals cold in every bit, and both ranks move the same checkpoints.

Owns: the workers as real processes. Never: two ranks against one, whose sums round differently.

Ordering rule: ranks are shown to be processes that hash differently before their moves are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_gaudi.testing.engine import DEFAULTS, close_sockets

TOLERANCE = 1e-4
Answer = tuple[int, list[int], torch.Tensor]  # cached tokens, tokens, logprobs [tokens, vocabulary]


def watch(worker: Any) -> tuple[int, int, int]:
    """Start to write down what this rank's store moves; returns process, hash of a name and ``num_blocks``."""
    runner = worker.model_runner
    runner.moved = []
    for name in ("save", "restore"):
        move = getattr(runner.step.store, name)

        def noted(copies: Any, name: str = name, move: Any = move) -> None:
            if copies.num_copies:
                runner.moved.append((name, copies.rows.tolist(), copies.blocks.tolist()))
            move(copies)

        setattr(runner.step.store, name, noted)
    return os.getpid(), hash("a request id"), runner.step.caches.geometry.num_blocks


def moved(worker: Any) -> list[tuple[str, list[int], list[list[int]]]]:
    return worker.model_runner.moved


class Ranks:
    def __init__(self, path: Path, **flags: Any):
        parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "max_logprobs": -1}
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(model=str(path), **{**DEFAULTS, **parallel, "enable_prefix_caching": True, **flags})
        )
        self._count = 0

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        close_sockets()

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, salted: bool = False) -> list[Answer]:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=-1, flat_logprobs=True
        )
        names = []
        for prompt in prompts:
            name = f"r{self._count}"
            self._count += 1
            salt = {"cache_salt": name} if salted else {}
            self.engine.add_request(name, {"prompt_token_ids": list(prompt), **salt}, params)  # type: ignore[arg-type]
            names.append(name)
        answers: dict[str, Answer] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    completion = output.outputs[0]
                    flat = completion.logprobs
                    ids = torch.tensor(flat.token_ids).view(len(completion.token_ids), -1)
                    found = torch.full((ids.shape[0], ids.shape[1] - 1), float("nan"))
                    found.scatter_(1, ids, torch.tensor(flat.logprobs).view_as(ids))
                    answers[output.request_id] = (output.num_cached_tokens, list(completion.token_ids), found)
        return [answers[name] for name in names]


def check_same(answer: Answer, reference: Answer) -> None:
    assert answer[1] == reference[1]
    assert torch.isfinite(answer[2]).all() and torch.equal(answer[2], reference[2])


@pytest.mark.parametrize(
    ("model", "block_size", "start", "is_async"), [("q35_dense", 16, "spawn", True), ("next_moe", 48, "fork", False)]
)
def test_a_hit_on_two_ranks_equals_cold_and_both_ranks_move_the_same(
    model: str,
    block_size: int,
    start: str,
    is_async: bool,
    checkpoint: Callable[..., Path],
    prompt: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spawned workers start Python anew, each with a hash seed of its own; forked ones are cheaper and share it."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", start)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    two = Ranks(
        checkpoint(model),
        block_size=block_size,
        max_num_batched_tokens=int(3.5 * block_size),
        max_model_len=12 * block_size,
        async_scheduling=is_async,
    )
    try:
        (pid, one_hash, blocks), (other_pid, other_hash, other_blocks) = two.engine.collective_rpc(watch)
        assert len({os.getpid(), pid, other_pid}) == 3 and blocks == other_blocks
        assert (one_hash != other_hash) == (start == "spawn")
        texts = [prompt(int(length * block_size)) for length in (2.0, 2.4, 0.8, 4.1)]
        references = [two.generate([text], salted=True)[0] for text in texts]
        assert [reference[0] for reference in references] == [0] * 4
        for text, reference in zip(texts, references, strict=True):
            check_same(two.generate([text])[0], reference)
        for order in (texts, texts[::-1]):
            new = prompt(block_size + 5)  # a cold row among the hits
            *hits, beside = two.generate([*order, new])
            for text, hit in zip(order, hits, strict=True):
                assert hit[0] == (len(text) - 1) // block_size * block_size
                check_same(hit, references[texts.index(text)])
            assert beside[0] == 0
            check_same(beside, two.generate([new], salted=True)[0])
        # The next turn, from a checkpoint that decode made.
        history = texts[1]
        history = history + two.generate([history], max_tokens=block_size)[0][1] + prompt(3)
        (hit,), (reference,) = two.generate([history]), two.generate([history], salted=True)
        assert hit[0] == 3 * block_size and hit[1] == reference[1]
        assert (hit[2] - reference[2]).abs().max() < TOLERANCE
        first, second = two.engine.collective_rpc(moved)
        assert first == second and sum(name == "restore" for name, *_ in first) >= 3
    finally:
        two.close()
