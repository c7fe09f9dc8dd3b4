# SPDX-License-Identifier: Apache-2.0
"""The counters of prefix caching: what the store really did, why a request missed, and what Prometheus is told.

Owns: scheduler counts against a count of the store's own calls, each miss reason driven on purpose, the stat logger.
Never: the HTTP endpoint (``test_cache_serve``).

Ordering rule: counts are read after the engine has drained, when the worker has run every scheduled step.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from vllm_gaudi.testing.engine import Engine, engine, greedy
from vllm_gaudi.v1.core.sched.cache_stats import (
    BYTES,
    DEFERRED,
    EVICTED,
    MISSES,
    NO_CHECKPOINT,
    REACHABLE,
    REASONS,
    RESTORED,
    SAVED,
    SHORT,
)
from vllm_gaudi.v1.metrics import GaudiStatLogger


class Watched:
    """An engine that logs stats: what its scheduler counted and what its store was called for."""

    def __init__(self, serving: Engine):
        self.engine = serving
        self.counts: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.prefix_hits = self.prefix_queries = 0
        make_stats = serving.scheduler.make_stats

        def kept(*args: Any, **kwargs: Any) -> Any:
            stats = make_stats(*args, **kwargs)
            self.counts.update(stats.waiting_lora_adapters)
            self.prefix_hits += stats.prefix_cache_stats.hits
            self.prefix_queries += stats.prefix_cache_stats.queries
            return stats

        serving.scheduler.make_stats = kept
        store = serving.runner.step.store
        for name, metric in (("save", SAVED), ("restore", RESTORED)):
            setattr(store, name, self._counted(metric, getattr(store, name)))

    def _counted(self, metric: str, move: Callable[[Any], None]) -> Callable[[Any], None]:
        def counted(copies: Any) -> None:
            self.moved[metric] += copies.num_copies
            move(copies)

        return counted

    @property
    def size(self) -> int:
        return self.engine.block_size

    def misses(self) -> dict[str, int]:
        """Misses by reason since the last call."""
        found = {}
        for reason in REASONS:
            count = self.counts.pop(f"{MISSES}:{reason}", 0)
            if count:
                found[reason] = count
        return found

    def settle(self) -> None:
        self.engine.drain()
        while self.engine.scheduler.has_requests():
            self.engine.step()


@contextlib.contextmanager
def watched(path: Path, **flags: Any) -> Iterator[Watched]:
    flags = {"enable_prefix_caching": True, "disable_log_stats": False, "max_num_batched_tokens": 80, **flags}
    with engine(path, **flags) as serving:
        yield Watched(serving)


SHAPES = [("q35_dense", 16, False), ("q35_moe", 48, True)]


@pytest.mark.parametrize(("model", "block_size", "is_async"), SHAPES)
def test_the_counts_are_what_the_store_did(
    model: str,
    block_size: int,
    is_async: bool,
    checkpoint: Callable[..., Path],
    prompt: Callable[[int], list[int]],
    preemptions_of: Callable[[Any], Counter[str]],
) -> None:
    """Hits, misses, aborts and preemptions in a pool of twenty blocks."""
    flags = {"block_size": block_size, "async_scheduling": is_async, "max_model_len": 16 * block_size}
    with watched(checkpoint(model), num_gpu_blocks_override=21, **flags) as it:
        preempted = preemptions_of(it.engine)
        shared = prompt(2 * block_size)
        cached_tokens = 0
        for round_ in range(6):
            texts = [shared + prompt(3), prompt(block_size - 2), shared + prompt(block_size), prompt(2 * block_size)]
            names = [it.engine.add(text, greedy(3 + 9 * n)) for n, text in enumerate(texts)]
            for _ in range(round_):
                it.engine.step()
            aborted = names.pop(round_ % len(names))
            if it.engine._results[aborted].finish_reason is None:
                it.engine.abort(aborted)
            it.engine.run(names)
            results = it.engine.generate([shared + prompt(5)] * 2 + [shared[:block_size] + prompt(2)], greedy(20))
            cached_tokens += sum(result.cached_tokens or 0 for result in results)
        for _ in range(2):  # more than the pool can run at once
            it.engine.generate([prompt(block_size - n - 1) for n in range(8)], greedy(block_size + 9))
        it.settle()
        assert preempted and cached_tokens > 0
        moved = it.moved[SAVED] + it.moved[RESTORED]
        assert it.moved[SAVED] > 20 and it.moved[RESTORED] > 5
        assert it.counts[SAVED] == it.moved[SAVED]
        assert it.counts[RESTORED] == it.moved[RESTORED]
        assert it.counts[BYTES] == moved * it.engine.runner.step.store.layout.checkpoint_bytes


@pytest.mark.parametrize(("model", "block_size", "is_async"), SHAPES)
def test_vllm_s_hits_are_the_sum_of_cached_tokens(
    model: str,
    block_size: int,
    is_async: bool,
    checkpoint: Callable[..., Path],
    prompt: Callable[[int], list[int]],
) -> None:
    flags = {"block_size": block_size, "async_scheduling": is_async, "max_model_len": 16 * block_size}
    with watched(checkpoint(model), **flags) as it:
        shared = prompt(3 * block_size)
        texts = [shared + prompt(1 + n * block_size // 3) for n in range(6)] + [prompt(5), shared]
        cached = queried = 0
        for _ in range(3):
            for result in it.engine.generate(texts, greedy(4)):
                cached += result.cached_tokens or 0
            queried += sum(len(text) for text in texts)
        it.settle()
        assert it.prefix_hits == cached > 0
        assert it.prefix_queries == queried


@pytest.mark.parametrize(("model", "block_size", "is_async"), SHAPES)
def test_each_reason_of_a_miss_comes_once_when_it_is_driven(
    model: str,
    block_size: int,
    is_async: bool,
    checkpoint: Callable[..., Path],
    prompt: Callable[[int], list[int]],
) -> None:
    flags = {"block_size": block_size, "async_scheduling": is_async, "max_model_len": 16 * block_size}
    with watched(checkpoint(model), num_gpu_blocks_override=60, max_num_batched_tokens=256, **flags) as it:
        size = it.size
        totals: Counter[str] = Counter()

        def misses_of(*prompts: list[int]) -> tuple[list[int | None], dict[str, int]]:
            results = it.engine.generate(prompts, greedy(1))
            it.settle()
            found = it.misses()
            totals.update(found)
            return [result.cached_tokens for result in results], found

        first = prompt(3 * size + 2)
        assert misses_of(first) == ([0], {}), "a prompt that nobody has sent before could not have hit"
        assert misses_of(first) == ([3 * size], {}), "a hit is no miss"

        assert misses_of(prompt(size)) == ([0], {SHORT: 1})
        assert misses_of(prompt(size + 1)) == ([0], {}), "one token more and it could hit"

        twin = prompt(2 * size + 3)
        assert misses_of(twin, twin) == ([0, 2 * size], {DEFERRED: 1})

        before = dict(totals)
        for _ in range(6):
            it.engine.generate([prompt(6 * size)], greedy(1))  # 48 blocks and more: the pool turns over
        it.settle()
        assert it.misses() == {}
        assert misses_of(first) == ([0], {EVICTED: 1})

        assert misses_of(first) == ([3 * size], {})

        # In a full pool a prompt leaves its attention blocks and the checkpoint of its third boundary, its last.
        for _ in range(6):
            it.engine.generate([prompt(6 * size)], greedy(1))
        it.settle()
        assert it.misses() == {}
        other = prompt(3 * size + 2)
        assert misses_of(other) == ([0], {})
        (hit,), reasons = misses_of(other[: 2 * size] + prompt(9))
        assert hit is not None and hit < 2 * size and reasons == {NO_CHECKPOINT: 1}
        assert before == {SHORT: 1, DEFERRED: 1}
        assert totals == dict.fromkeys(REASONS, 1)


def test_a_reset_cache_and_a_foreign_salt_are_told_apart(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    with watched(checkpoint("q35_dense")) as it:
        text = prompt(2 * it.size + 3)
        it.engine.generate([text], greedy(1))
        assert it.engine.generate([text], greedy(1), cache_salt="other")[0].cached_tokens == 0
        it.settle()
        assert it.misses() == {}, "what another salt has cached could not have been hit"
        assert it.engine.vllm_engine.reset_prefix_cache()
        assert it.engine.generate([text], greedy(1))[0].cached_tokens == 0
        it.settle()
        assert it.misses() == {EVICTED: 1}


def sample(metric: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"{metric}_total", {"model_name": "counted", "engine": "0", **labels})


def test_an_engine_s_counts_reach_prometheus_whole(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    with watched(checkpoint("q35_dense")) as it:
        served = SimpleNamespace(served_model_name="counted")  # no other test's
        scheduled = SimpleNamespace(max_num_seqs=8)
        logger = GaudiStatLogger(SimpleNamespace(model_config=served, scheduler_config=scheduled))
        make_stats = it.engine.scheduler.make_stats

        def logged(*args: Any, **kwargs: Any) -> Any:
            stats = make_stats(*args, **kwargs)
            logger.record(stats, None)
            return stats

        it.engine.scheduler.make_stats = logged
        text = prompt(3 * it.size + 1)
        for _ in range(2):
            it.engine.generate([text, prompt(3)], greedy(it.size))
        it.settle()
        assert (sample(SAVED), sample(RESTORED)) == (it.moved[SAVED], it.moved[RESTORED])
        assert it.moved[RESTORED] == 1 and sample(MISSES, reason=SHORT) == 2
        assert sample(REACHABLE) == it.prefix_hits == 3 * it.size
