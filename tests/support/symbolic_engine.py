# SPDX-License-Identifier: Apache-2.0
"""The real engine with the symbolic model, and what must hold in it after every step.

Owns: the bookkeeping that says which state each slot and each cached block must have, and which must be there.
Never: drives the engine by itself.

Ordering rule: ``check`` runs between steps, after every scheduled step has run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from tests.support import symbolic
from tests.support.checkpoint_witness import CheckpointWitness
from vllm_gaudi.testing.engine import Engine, greedy


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


class SymbolicEngine:
    """``flags`` are ``EngineArgs`` fields over the test engine's defaults, prefix caching on."""

    def __init__(self, checkpoint: Path, **flags: Any):
        self.engine = Engine(checkpoint, enable_prefix_caching=True, **flags)
        self.graphs = symbolic.SymbolicGraphs.install(self.engine.runner)
        self.pool = self.engine.scheduler.kv_cache_manager.block_pool
        self.live: dict[str, Live] = {}
        self.claims: dict[Any, int] = {}
        self.num_restores = 0
        self.witness = CheckpointWitness(self.engine.scheduler)
        apply = self.engine.runner.step.requests.apply

        def applied(output: Any) -> Any:
            step = apply(output)
            for req_id, end, start, admitted in zip(
                step.req_ids, step.end, step.num_computed_tokens, step.admitted, strict=True
            ):
                self.live[self._name(req_id)].end = int(end)
                self.num_restores += bool(admitted and start)
            return step

        self.engine.runner.step.requests.apply = applied

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
        for internal, state in runner.step.requests._requests.items():
            if state.state_slot is not None:
                taken += 1
                live = self.live[self._name(internal)]
                self.graphs.check_slot(state.state_slot, live.tokens(live.end))
        assert runner.step.state_slots.num_taken == taken <= runner.step.state_slots.num_slots
        block_size = self.engine.block_size
        for live in self.live.values():
            for i, block_hash in enumerate(live.request.block_hashes):
                self.claims.setdefault(block_hash, live.state((i + 1) * block_size))
        geometry = runner.step.caches.geometry
        by_group: dict[int, dict[int, int]] = {g: {} for g in range(geometry.num_groups)}
        for key, cached in self.pool.cached_block_hash_to_block._cache.items():
            for block in cached.values() if isinstance(cached, dict) else [cached]:
                by_group[get_group_id(key)][block.block_id] = self.claims[get_block_hash(key)]
        for n, group in enumerate(geometry.gdn_groups):
            self.graphs.check_checkpoints(runner.step.store, n, by_group[group])
        self.graphs.check_attention_blocks(block_size, by_group[geometry.attention_group])
        self.witness.check()

    def settle(self) -> None:
        """One more request lets the worker see who has ended; then everything must be back."""
        name = self.add([11, 12, 13], 1)
        while self.engine._results[name].finish_reason is None:
            self.step()
        self.engine.take(name)
        assert self.engine.runner.step.state_slots.num_taken <= 1
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1  # all but the null block
        self.live = {name: self.live[name]}
        self.claims = {
            get_block_hash(key): self.claims[get_block_hash(key)] for key in self.pool.cached_block_hash_to_block._cache
        }
