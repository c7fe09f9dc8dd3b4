# SPDX-License-Identifier: Apache-2.0
"""Priority scheduling: a victim preempted in the step that had scheduled it leaves no hash of a block it never filled.

Stock vLLM 0.30 publishes a block's hash when it schedules the step that fills it and keeps the hash when that row is
dropped again. ``SymbolicEngine.check`` compares every published block with the prefix that its hash claims, so a stale
hash fails the step in which it appears.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support import symbolic
from tests.support.symbolic_engine import SymbolicEngine
from vllm_gaudi.v1.core.sched.hpu_scheduler import GDNSchedulerMixin

Watch = Callable[..., Counter[str]]  # the fixture preemptions_of

B = 16
ROUNDS = 50
POOLS = (17, 18)  # blocks: preemption in most rounds
URGENT, PATIENT = 0, 5  # vLLM's priorities: the smaller one goes first


def open_engine(checkpoint: Callable[..., Path], policy: str, is_async: bool, num_blocks: int) -> SymbolicEngine:
    return SymbolicEngine(
        checkpoint("q35_moe"),
        max_num_batched_tokens=4 * B,
        long_prefill_token_threshold=2 * B,
        max_num_seqs=8,
        max_model_len=13 * B,
        num_gpu_blocks_override=num_blocks,
        scheduling_policy=policy,
        async_scheduling=is_async,
    )


def drive(bench: SymbolicEngine, preemptions_of: Watch) -> dict[str, int]:
    """A patient request prefills two blocks a step while urgent ones grow by decode, out of step with each other.

    In each pass the patient one is scheduled first and publishes two blocks; then an urgent one needs a block, none is
    free, and the patient one is dropped from the step. One of its two blocks is given on at once, the other is not.
    """
    counts = {"in the step that scheduled it": 0, "reused tokens": 0, "answers": 0}

    def look(request: Any) -> None:
        ends = [
            (i + 1) * B
            for manager in bench.engine.scheduler.kv_cache_manager.coordinator.single_type_managers
            for i, block in enumerate(manager.req_to_blocks.get(request.request_id, ()))
            if block.block_hash is not None
        ]
        counts["in the step that scheduled it"] += max(ends, default=0) > request.num_computed_tokens

    preempted = preemptions_of(bench.engine, look)
    wanted: dict[str, tuple[list[int], int]] = {}

    def add(prompt: list[int], length: int, priority: int) -> None:
        wanted[bench.add(prompt, length, priority)] = (prompt, length)

    def step() -> None:
        for name in bench.step():
            result = bench.engine.take(name)
            assert result.tokens == symbolic.answer(*wanted[name])
            counts["answers"] += 1
            counts["reused tokens"] += result.cached_tokens or 0

    for number in range(ROUNDS):
        add([200 + i % 83 for i in range(10 * B + number % (2 * B))], 2 + number % 7, PATIENT)
        for _ in range(number % 3):
            step()
        for urgent in range(6):
            length = 1 + (number * 5 + urgent * 3) % B
            add([50 + urgent * 40 + (number * 7 + i) % 31 for i in range(length)], 2 * B, URGENT)
        while bench.engine.vllm_engine.has_unfinished_requests():
            step()
    bench.settle()
    return {**counts, "preempted": preempted.total()}


def driven(
    checkpoint: Callable[..., Path], preemptions_of: Watch, policy: str, is_async: bool, num_blocks: int
) -> dict[str, int]:
    bench = open_engine(checkpoint, policy, is_async, num_blocks)
    try:
        return drive(bench, preemptions_of)
    finally:
        bench.engine.close()


@pytest.mark.parametrize(
    "is_async", [pytest.param(False, id="sync", marks=pytest.mark.soak), pytest.param(True, id="async")]
)
def test_no_hash_outlives_a_row_that_was_dropped(
    is_async: bool, checkpoint: Callable[..., Path], preemptions_of: Watch
) -> None:
    """``drive`` checks every answer, so those of both policies are equal."""
    totals: dict[str, int] = {}
    for num_blocks in POOLS:
        for name, count in driven(checkpoint, preemptions_of, "priority", is_async, num_blocks).items():
            totals[name] = totals.get(name, 0) + count
    assert totals["preempted"] >= 80 and totals["in the step that scheduled it"] >= 3, totals
    assert totals["reused tokens"] > 0 and totals["answers"] == len(POOLS) * 7 * ROUNDS
    first_come = driven(checkpoint, preemptions_of, "fcfs", is_async, POOLS[0])
    assert first_come["answers"] == 7 * ROUNDS and first_come["in the step that scheduled it"] == 0


def test_without_the_guard_the_gate_turns_red(
    checkpoint: Callable[..., Path], preemptions_of: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GDNSchedulerMixin, "_preempt_request", Scheduler._preempt_request)
    with pytest.raises(AssertionError, match="hash claims|K/V"):
        for num_blocks in POOLS:
            driven(checkpoint, preemptions_of, "priority", False, num_blocks)
