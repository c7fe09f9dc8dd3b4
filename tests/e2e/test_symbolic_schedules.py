# SPDX-License-Identifier: Apache-2.0
"""Random schedules on the real engine with a symbolic model: after every step, everything is where it claims to be.

Each schedule adds requests with shared prefixes, steps, aborts, resets the cache and runs out of blocks. After each
step every live slot must hold the state of exactly the tokens its request has computed, and every block that the pool
would serve as a hit, GDN or attention, the state of the prefix that its hash claims, in every layer.

Hypothesis draws the schedules, the same in every run, and prints the smallest one that fails. Replay one configuration:
``make e2e PYTEST_ARGS="-k 'symbolic and async-priority-larger'"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from vllm_gaudi.testing import faults, symbolic
from vllm_gaudi.testing.engine import Engine, greedy

MAX_SEQS = 4
NUM_BLOCKS = 44
GEOMETRIES = {
    # B equal to the GDN chunk, two layers a group; B three times the chunk, one layer a group
    "equal": {"model": "q35_dense", "block_size": 16, "budget": 48, "unit": 16},
    "larger": {"model": "q35_moe", "block_size": 48, "budget": 80, "unit": 48},
}
SCHEDULES = 260  # per configuration; eight configurations


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


@dataclass
class Live:
    prompt: list[int]
    wanted: int
    request: Any = None  # the scheduler's own record, kept beyond its end for its block hashes
    end: int = 0
    states: list[int] = field(default_factory=list)

    def state(self, num_tokens: int) -> int:
        if not self.states:
            whole = self.prompt + symbolic.answer(self.prompt, self.wanted + 2)
            self.states = symbolic.hashes_of(whole)
        return self.states[num_tokens]

    def tokens(self, num_tokens: int) -> list[int]:
        return (self.prompt + symbolic.answer(self.prompt, self.wanted + 2))[:num_tokens]


class Bench:
    """An engine with the symbolic model, and what must hold in it."""

    def __init__(self, checkpoint: Path, geometry: dict[str, Any], is_async: bool, policy: str):
        self.unit = geometry["unit"]
        self.engine = Engine(
            checkpoint,
            block_size=geometry["block_size"],
            max_num_batched_tokens=geometry["budget"],
            max_num_seqs=MAX_SEQS,
            max_model_len=8 * self.unit,
            num_gpu_blocks_override=NUM_BLOCKS,
            async_scheduling=is_async,
            scheduling_policy=policy,
            enable_prefix_caching=True,
        )
        self.graphs = symbolic.SymbolicGraphs.install(self.engine.runner)
        self.pool = self.engine.scheduler.kv_cache_manager.block_pool
        self.live: dict[str, Live] = {}
        self.claims: dict[Any, int] = {}
        self.num_restores = 0
        apply = self.engine.runner.requests.apply

        def applied(output: Any) -> Any:
            step = apply(output)
            for req_id, end, start, admitted in zip(
                step.req_ids, step.end, step.num_computed, step.admitted, strict=True
            ):
                self.live[self._name(req_id)].end = int(end)
                self.num_restores += bool(admitted and start)
            return step

        self.engine.runner.requests.apply = applied

    @staticmethod
    def _name(internal: str) -> str:
        return internal.split("-", 1)[0]

    def add(self, prompt: list[int], wanted: int, priority: int = 0) -> str:
        name = self.engine.add(prompt, greedy(wanted), priority=priority)
        self.live[name] = Live(prompt, wanted)
        for internal, request in self.engine.scheduler.requests.items():
            if self._name(internal) == name:
                self.live[name].request = request
        return name

    def step(self) -> list[str]:
        finished = self.engine.step()
        self.check()
        return finished

    def check(self) -> None:
        runner = self.engine.runner
        taken = 0
        for internal, state in runner.requests._requests.items():
            if state.slot is not None:
                taken += 1
                live = self.live[self._name(internal)]
                self.graphs.check_slot(state.slot, live.tokens(live.end))
        assert runner.slots.num_taken == taken <= MAX_SEQS
        block_size = self.engine.block_size
        for live in self.live.values():
            for i, block_hash in enumerate(live.request.block_hashes):
                self.claims.setdefault(block_hash, live.state((i + 1) * block_size))
        geometry = runner.caches.geometry
        by_group: dict[int, dict[int, int]] = {g: {} for g in range(geometry.num_groups)}
        for key, cached in self.pool.cached_block_hash_to_block._cache.items():
            for block in cached.values() if isinstance(cached, dict) else [cached]:
                by_group[get_group_id(key)][block.block_id] = self.claims[get_block_hash(key)]
        for n, group in enumerate(geometry.gdn_groups):
            self.graphs.check_checkpoints(runner.store, n, by_group[group])
        self.graphs.check_attention_blocks(block_size, by_group[geometry.attention_group])

    def play(self, actions: list[Any], texts: list[list[int]]) -> None:
        done: list[tuple[list[int], list[int]]] = []
        names: list[str] = []
        for action in actions:
            if isinstance(action, Add):
                prompt = texts[action.text][: action.cut * self.unit // 8]
                prompt = prompt + [100 + (action.tail * 7 + i) % 300 for i in range(action.tail)]
                names += [self.add(prompt, action.answer, action.priority) for _ in range(action.copies)]
            elif isinstance(action, Continue) and done:
                prompt, answer = done[action.which % len(done)]
                prompt = (prompt + answer)[: 6 * self.unit] + [200 + i for i in range(action.tail)]
                names.append(self.add(prompt, action.answer))
            elif isinstance(action, Step):
                for _ in range(action.times):
                    self._collect(self.step(), done)
            elif isinstance(action, Abort) and names:
                name = names[action.which % len(names)]
                if name in self.engine._results and self.engine._results[name].finish_reason is None:
                    self.engine.abort(name)
                    self.engine.take(name)
            elif isinstance(action, Reset):
                self.engine.vllm_engine.reset_prefix_cache(reset_running_requests=action.running)
        while self.engine.vllm_engine.has_unfinished_requests():
            self._collect(self.step(), done)
        self._settle()

    def _collect(self, finished: list[str], done: list[tuple[list[int], list[int]]]) -> None:
        for name in finished:
            result = self.engine.take(name)
            live = self.live[name]
            assert result.tokens == symbolic.answer(live.prompt, live.wanted)
            done.append((live.prompt, result.tokens))

    def _settle(self) -> None:
        """One more request lets the worker see who has ended; then everything must be back."""
        name = self.add([11, 12, 13], 1)
        while self.engine._results[name].finish_reason is None:
            self.step()
        self.engine.take(name)
        assert self.engine.runner.slots.num_taken <= 1
        assert self.pool.get_num_free_blocks() == NUM_BLOCKS - 1  # all but the null block
        self.live = {name: self.live[name]}
        self.claims = {
            get_block_hash(key): self.claims[get_block_hash(key)] for key in self.pool.cached_block_hash_to_block._cache
        }


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
def make_bench(checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Bench]]:
    opened: list[Bench] = []

    def make(is_async: bool, policy: str, geometry: str) -> Bench:
        for bench in opened:
            bench.engine.close()
        opened[:] = [Bench(checkpoint(GEOMETRIES[geometry]["model"]), GEOMETRIES[geometry], is_async, policy)]
        return opened[0]

    yield make
    for bench in opened:
        bench.engine.close()


@pytest.mark.parametrize(("is_async", "policy", "geometry"), CONFIGURATIONS)
def test_symbolic_schedules_keep_every_slot_and_checkpoint_right(
    is_async: bool, policy: str, geometry: str, make_bench: Callable[..., Bench], texts: list[list[int]]
) -> None:
    bench = make_bench(is_async, policy, geometry)
    broken = False
    restores = 0

    @settings(
        max_examples=SCHEDULES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(ACTIONS, min_size=4, max_size=14))
    def schedule(actions: list[Any]) -> None:
        nonlocal bench, broken, restores
        if broken:  # an engine that has failed is not reused: hypothesis is shrinking
            bench = make_bench(is_async, policy, geometry)
            broken = False
        try:
            bench.play(actions, texts)
        except BaseException:
            broken = True
            raise

    schedule()
    assert bench.num_restores > SCHEDULES, "hardly any request resumed from a checkpoint: the schedules prove nothing"


@pytest.mark.parametrize("fault", sorted(faults.FAULTS))
def test_every_fault_turns_the_symbolic_gate_red(
    fault: str, make_bench: Callable[..., Bench], texts: list[list[int]]
) -> None:
    bench = make_bench(False, "fcfs", "equal")
    faults.put_in(bench.engine.runner, fault)
    actions = [Add(0, 20, 5, 20, 0, 1), Step(6), Add(0, 20, 9, 4, 0, 1), Step(4), Add(0, 20, 5, 4, 0, 2), Step(9)]
    with pytest.raises(AssertionError):
        for _ in range(3):
            bench.play(list(actions), texts)
