# SPDX-License-Identifier: Apache-2.0
"""Random schedules on the real engine with a symbolic model: after every step, everything is where it claims to be.

Each schedule adds requests with shared prefixes, steps, aborts, resets the cache and runs out of blocks. After each
step every live slot must hold the state of exactly the tokens its request has computed, and every block that the pool
would serve as a hit, GDN or attention, the state of the prefix that its hash claims, in every layer. Every boundary
that retention keeps of what was computed must be hittable in all GDN groups unless the pool has handed its blocks out;
no request may hold a GDN block; and the pool's free count must be exact.

Hypothesis draws the schedules, the same in every run but a soak's, and prints the smallest one that fails. Replay one
configuration: ``make e2e PYTEST_ARGS="-k 'symbolic and async-priority-larger'"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import faults, symbolic
from tests.support.symbolic_engine import SymbolicEngine

MAX_SEQS = 4
GEOMETRIES = {
    # B equal to the GDN chunk, two layers a group; B three times the chunk, one layer a group
    "equal": {"model": "q35_dense", "block_size": 16, "budget": 48, "retention": None, "blocks": 18},
    "larger": {"model": "q35_moe", "block_size": 48, "budget": 80, "retention": 0, "blocks": 13},
}
SCHEDULES = 40  # per configuration; eight configurations


@dataclass(frozen=True)
class Add:
    """A request: the first ``cut`` tokens of a shared text, then ``tail`` own ones; ``copies`` of it at once."""

    text: int
    cut: int  # eighths of a block
    tail: int  # tokens
    answer: int  # tokens
    priority: int
    copies: int


@dataclass(frozen=True)
class Step:
    times: int


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class Reset:
    running: bool


@dataclass(frozen=True)
class Continue:
    """The next turn: a finished request's prompt and answer, and ``tail`` new tokens."""

    which: int
    tail: int
    answer: int


ACTIONS = st.one_of(
    st.builds(
        Add,
        text=st.integers(0, 2),
        cut=st.integers(0, 24),
        tail=st.integers(1, 20),
        answer=st.integers(1, 24),
        priority=st.integers(0, 2),
        copies=st.sampled_from([1, 1, 1, 2, 3]),
    ),
    st.builds(Step, times=st.integers(1, 6)),
    st.builds(Step, times=st.integers(1, 6)),
    st.builds(Continue, which=st.integers(0, 7), tail=st.integers(1, 8), answer=st.integers(1, 12)),
    st.builds(Abort, which=st.integers(0, 7)),
    st.builds(Reset, running=st.booleans()),
)


def play(bench: SymbolicEngine, unit: int, actions: list[Any], texts: list[list[int]]) -> None:
    done: list[tuple[list[int], list[int]]] = []
    names: list[str] = []
    for action in actions:
        if isinstance(action, Add):
            prompt = texts[action.text][: action.cut * unit // 8]
            prompt = prompt + [100 + (action.tail * 7 + i) % 300 for i in range(action.tail)]
            names += [bench.add(prompt, action.answer, action.priority) for _ in range(action.copies)]
        elif isinstance(action, Continue) and done:
            prompt, answer = done[action.which % len(done)]
            prompt = (prompt + answer)[: 6 * unit] + [200 + i for i in range(action.tail)]
            names.append(bench.add(prompt, action.answer))
        elif isinstance(action, Step):
            for _ in range(action.times):
                _collect(bench, bench.step(), done)
        elif isinstance(action, Abort) and names:
            name = names[action.which % len(names)]
            if name in bench.engine._results and bench.engine._results[name].finish_reason is None:
                bench.engine.abort(name)
                bench.engine.take(name)
        elif isinstance(action, Reset):
            bench.engine.vllm_engine.reset_prefix_cache(reset_running_requests=action.running)
    while bench.engine.vllm_engine.has_unfinished_requests():
        _collect(bench, bench.step(), done)
    bench.settle()


def _collect(bench: SymbolicEngine, finished: list[str], done: list[tuple[list[int], list[int]]]) -> None:
    for name in finished:
        result = bench.engine.take(name)
        live = bench.live[name]
        assert result.tokens == symbolic.answer(live.prompt, live.wanted)
        done.append((live.prompt, result.tokens))


CONFIGURATIONS = [
    pytest.param(is_async, policy, geometry, id=f"{'async' if is_async else 'sync'}-{policy}-{geometry}")
    for geometry in GEOMETRIES
    for policy in ("fcfs", "priority")
    for is_async in (False, True)
]


@pytest.fixture
def texts() -> list[list[int]]:
    return [[10 + (n * 131 + i * (n + 3)) % 480 for i in range(400)] for n in range(3)]


@pytest.fixture
def make_bench(checkpoint: Callable[..., Path]) -> Iterator[Callable[..., SymbolicEngine]]:
    opened: list[SymbolicEngine] = []

    def make(is_async: bool, policy: str, geometry: str) -> SymbolicEngine:
        for bench in opened:
            bench.engine.close()
        shape = GEOMETRIES[geometry]
        opened[:] = [
            SymbolicEngine(
                checkpoint(shape["model"]),
                block_size=shape["block_size"],
                max_num_batched_tokens=shape["budget"],
                max_num_seqs=MAX_SEQS,
                max_model_len=8 * shape["block_size"],
                num_gpu_blocks_override=shape["blocks"],
                async_scheduling=is_async,
                scheduling_policy=policy,
                prefix_cache_retention_interval=shape["retention"],
            )
        ]
        return opened[0]

    yield make
    for bench in opened:
        bench.engine.close()


@pytest.mark.random
@pytest.mark.parametrize(("is_async", "policy", "geometry"), CONFIGURATIONS)
def test_symbolic_schedules_keep_every_slot_and_checkpoint_right(
    is_async: bool,
    policy: str,
    geometry: str,
    make_bench: Callable[..., SymbolicEngine],
    texts: list[list[int]],
    share: Callable[[int], int],
) -> None:
    bench = make_bench(is_async, policy, geometry)
    broken = False

    @settings(max_examples=share(SCHEDULES), suppress_health_check=list(HealthCheck))
    @given(st.lists(ACTIONS, min_size=4, max_size=14))
    def schedule(actions: list[Any]) -> None:
        nonlocal bench, broken
        if broken:  # an engine that has failed is not reused: hypothesis is shrinking
            bench = make_bench(is_async, policy, geometry)
            broken = False
        try:
            play(bench, GEOMETRIES[geometry]["block_size"], actions, texts)
        except BaseException:
            broken = True
            raise

    schedule()
    assert bench.num_restores > SCHEDULES // 2, "hardly any request resumed from a checkpoint"
    assert bench.witness.num_intermediate > SCHEDULES // 2, "hardly any boundary was to be kept"
    assert bench.witness.num_skipped > 0, "the pool was never so full that a checkpoint had to be skipped"


@pytest.mark.parametrize("fault", sorted(faults.FAULTS))
def test_every_fault_turns_the_symbolic_gate_red(
    fault: str, make_bench: Callable[..., SymbolicEngine], texts: list[list[int]]
) -> None:
    bench = make_bench(False, "fcfs", "equal")
    faults.put_in(bench.engine.runner, fault)
    actions = [Add(0, 20, 5, 20, 0, 1), Step(6), Add(0, 20, 9, 4, 0, 1), Step(4), Add(0, 20, 5, 4, 0, 2), Step(9)]
    with pytest.raises(AssertionError):
        for _ in range(3):
            play(bench, GEOMETRIES["equal"]["block_size"], list(actions), texts)


@pytest.mark.parametrize("fault", sorted(faults.SCHEDULER_FAULTS))
def test_every_fault_of_the_scheduler_turns_the_symbolic_gate_red(
    fault: str, make_bench: Callable[..., SymbolicEngine], texts: list[list[int]]
) -> None:
    bench = make_bench(False, "fcfs", "equal")
    faults.put_in_scheduler(bench.engine.scheduler, fault)
    actions = [Add(0, 20, 5, 20, 0, 1), Step(6), Add(0, 20, 9, 4, 0, 1), Step(4), Add(1, 40, 5, 4, 0, 2), Step(9)]
    with pytest.raises((AssertionError, RuntimeError)):
        for n in range(6):
            play(bench, GEOMETRIES["equal"]["block_size"], [*actions, Add(n % 3, 23 + n, n, 9, 0, 3)], texts)
