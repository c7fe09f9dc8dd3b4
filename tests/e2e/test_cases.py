# SPDX-License-Identifier: Apache-2.0
"""What has gone wrong on other engines that cache recurrent state, event by event, on B = C and on B = 3 C.

Owns: the scenarios of the case list that neither the parity, the symbolic nor the priority tests drive.
Never: refused features, tensor parallelism, the served engine.

Ordering rule: reach first (``cached_tokens``, restores), then bits; a cold run is the same prompt under a salt of its
own. Every test starts on an empty cache with all blocks and slots free, which proves that the one before gave all back.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from tests.support import symbolic
from tests.support.symbolic_engine import SymbolicEngine
from vllm_gaudi.testing.engine import Engine, Result, greedy

TOLERANCE = 1e-4
MAX_SEQS = 8
GEOMETRIES = {
    # B equal to the GDN chunk, two layers a group; B three times the chunk, one layer a group. No budget is a multiple.
    "equal": {"model": "q35_dense", "block_size": 16, "max_num_batched_tokens": 56},
    "larger": {"model": "q35_moe", "block_size": 48, "max_num_batched_tokens": 112},
}
SHORT = greedy(5)


@dataclass
class Moves:
    """What the worker's store was really asked to do, step by step."""

    plans: list[Any] = field(default_factory=list)

    def watch(self, runner: Any) -> None:
        before = runner.step.store.before_forward
        usable = range(1, runner.step.caches.geometry.num_blocks)
        slots = range(runner.step.state_slots.num_slots)

        def watched(plan: Any) -> None:
            for copies in (plan.restore, plan.save):
                assert all(block in usable for block in copies.blocks.ravel().tolist())
                assert all(slot in slots for slot in copies.rows.tolist())
            self.plans.append(plan)
            before(plan)

        runner.step.store.before_forward = watched

    @property
    def restored(self) -> int:
        return sum(plan.restore.num_copies for plan in self.plans)


@dataclass
class CachingEngine:
    """An engine and what a test asks of it."""

    engine: Engine
    moves: Moves = field(default_factory=Moves)
    _salts: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    @property
    def size(self) -> int:
        return self.engine.block_size

    def reach(self, prompt: Sequence[int]) -> int:
        return (len(prompt) - 1) // self.size * self.size

    def run(self, prompt: Sequence[int], params: SamplingParams = SHORT, **kwargs: Any) -> Result:
        return self.engine.generate([prompt], params, **kwargs)[0]

    def cold(self, prompt: Sequence[int], params: SamplingParams = SHORT, **kwargs: Any) -> Result:
        result = self.run(prompt, params, cache_salt=f"cold-{next(self._salts)}", **kwargs)
        assert result.cached_tokens == 0
        return result

    def check_hit(self, prompt: Sequence[int], params: SamplingParams = SHORT) -> None:
        """A repeat reuses all it can and equals cold in every bit."""
        hit = self.run(prompt, params)
        assert hit.cached_tokens == self.reach(prompt)
        check_same(hit, self.cold(prompt, params))

    def request(self, name: str) -> Any:
        """The scheduler's own record of a request that it still has."""
        requests = self.engine.scheduler.requests.items()
        return next(request for internal, request in requests if internal.rsplit("-", 1)[0] == name)

    def settle(self) -> None:
        """All given back: one more step lets the worker hear who has ended."""
        self.engine.drain()
        while self.engine.scheduler.has_requests():
            self.engine.step()
        self.run([11, 12, 13], greedy(1))
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
        assert self.engine.runner.step.state_slots.num_taken <= 1
        assert self.engine.vllm_engine.reset_prefix_cache()
        self.moves.plans.clear()


def check_same(result: Result, reference: Result) -> None:
    assert result.tokens == reference.tokens
    assert result.logits is not None and torch.isfinite(result.logits).all()
    assert torch.equal(result.logits, reference.logits)


def check_near(result: Result, reference: Result) -> None:
    assert result.tokens == reference.tokens
    assert (result.logits - reference.logits).abs().max() < TOLERANCE


@dataclass
class Holder:
    """The one engine of this process: kept while tests ask for the same flags, closed when one asks for others."""

    flags: dict[str, Any] = field(default_factory=dict)
    bench: Any = None

    def get(self, path: Path, symbolic: bool = False, fresh: bool = False, **flags: Any) -> Any:
        wanted = {"path": path, "symbolic": symbolic, "enable_prefix_caching": True, **flags}
        if self.bench is None or wanted != self.flags or fresh:
            self.close()
            wanted_flags = {k: v for k, v in wanted.items() if k not in ("path", "symbolic") and v != "unset"}
            wanted_flags.setdefault("max_num_seqs", MAX_SEQS)
            if symbolic:
                wanted_flags.pop("enable_prefix_caching")
                self.bench = SymbolicEngine(path, **wanted_flags)
            else:
                self.bench = CachingEngine(Engine(path, **wanted_flags))
                self.bench.moves.watch(self.bench.engine.runner)
            self.flags = {} if fresh else wanted
        return self.bench

    def close(self) -> None:
        if self.bench is not None:
            self.bench.engine.close()
        self.bench, self.flags = None, {}


@pytest.fixture(scope="module")
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.close()


@pytest.fixture(
    scope="module",
    params=[
        "equal-async",
        "larger-sync",
        pytest.param("equal-sync", marks=pytest.mark.soak),
        pytest.param("larger-async", marks=pytest.mark.soak),
    ],
)
def setting(request: pytest.FixtureRequest) -> str:
    """A geometry and a scheduler: in ``make test`` each once, in ``make soak`` each with each."""
    return request.param


@pytest.fixture(scope="module")
def geometry(setting: str) -> dict[str, Any]:
    return GEOMETRIES[setting.partition("-")[0]]


@pytest.fixture(scope="module")
def is_async(setting: str) -> bool:
    return setting.endswith("-async")


@pytest.fixture
def open_bench(
    holder: Holder, geometry: dict[str, Any], is_async: bool, checkpoint: Callable[..., Path]
) -> Callable[..., Any]:
    """``open_bench(**flags)``: an engine of this geometry and scheduler with other flags."""

    def opened(**flags: Any) -> Any:
        shape = {"max_model_len": 12 * geometry["block_size"], **geometry, "async_scheduling": is_async, **flags}
        return holder.get(checkpoint(shape.pop("model")), **shape)

    return opened


@pytest.fixture
def bench(open_bench: Callable[..., CachingEngine], holder: Holder) -> Iterator[CachingEngine]:
    """The geometry's own engine, empty; one that fails a test is not used again."""
    opened = open_bench()
    try:
        opened.settle()
        yield opened
        opened.settle()
    except BaseException:
        holder.close()
        raise


@pytest.fixture(autouse=True)
def closed_after_a_failure(request: pytest.FixtureRequest, holder: Holder) -> Iterator[None]:
    failures = request.session.testsfailed
    yield
    if request.session.testsfailed != failures:
        holder.close()


# Publishing a checkpoint before it exists


@pytest.mark.parametrize("blocks", [0.5, 1, 1.5, 2, 2.5])
@pytest.mark.parametrize("count", [2, 3])
def test_new_requests_that_share_a_prefix_in_one_step_are_right(
    count: int, blocks: float, bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    shared = prompt(int(blocks * bench.size))
    prompts = [shared + prompt(3 + 5 * n) for n in range(count)]
    references = [bench.cold(text) for text in prompts]
    results = bench.engine.generate(prompts, SHORT)
    for result, reference in zip(results, references, strict=True):
        assert result.cached_tokens is not None and result.cached_tokens <= len(shared) // bench.size * bench.size
        check_same(result, reference)
    for text in prompts:
        bench.check_hit(text)


@pytest.mark.parametrize("blocks", [0.5, 1, 1.5, 2, 2.5])
def test_the_same_prompt_three_times_in_one_step_is_right(
    blocks: float, bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    text = prompt(int(blocks * bench.size))
    reference = bench.cold(text)
    for result in bench.engine.generate([text] * 3, SHORT):
        assert result.cached_tokens in (0, bench.reach(text))
        check_same(result, reference)
    bench.check_hit(text)


def test_three_samples_of_one_prompt_equal_three_requests_with_their_seeds(
    bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    text = prompt(3 * bench.size + 5)

    def sampled(n: int, seed: int) -> SamplingParams:
        return SamplingParams(n=n, seed=seed, temperature=1.0, max_tokens=6, ignore_eos=True, detokenize=False)

    references = [bench.cold(text, sampled(1, 40 + n)) for n in range(3)]
    bench.moves.plans.clear()
    for wanted_restores in (0, 3):  # the second time each sample resumes
        name = bench.engine.add(text, sampled(3, 40))
        bench.engine.drain()
        bench.engine.take(name)
        rows = bench.engine._rows
        samples = {key: rows.pop(key) for key in list(rows) if f"_{name}" in key}
        assert len(samples) == 3 and bench.moves.restored >= wanted_restores
        for key, logits in samples.items():
            assert torch.equal(torch.stack(logits[:6]), references[int(key.split("_")[0])].logits)


@pytest.mark.parametrize("lengths", [(1.4, 2.7, 0.6, 3.3), (3.9, 3.9, 3.9), (0.2, 4.1, 0.9, 1.0, 2.0, 1.1, 0.3)])
def test_prompts_that_cut_one_another_s_chunks_leave_right_checkpoints(
    lengths: tuple[float, ...], bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    prompts = [prompt(int(length * bench.size)) for length in lengths]
    references = [bench.cold(text) for text in prompts]
    for result, reference in zip(bench.engine.generate(prompts, SHORT), references, strict=True):
        assert result.cached_tokens == 0
        check_same(result, reference)
    for result, text, reference in zip(bench.engine.generate(prompts, SHORT), prompts, references, strict=True):
        assert result.cached_tokens == bench.reach(text)
        check_same(result, reference)


@pytest.mark.parametrize("threshold", [1.6, 0.3])
def test_a_long_prefill_threshold_off_the_grid_is_right_and_still_hits(
    threshold: float, open_bench: Callable[..., CachingEngine], prompt: Callable[[int], list[int]]
) -> None:
    """The cold runs are those of an engine without a threshold: on the grid every split gives the same bits.

    The small threshold is below a chunk: rounding it to the grid would leave nothing and nobody would move.
    """
    tokens = int(threshold * GEOMETRIES["equal"]["block_size"])
    bench = open_bench()
    prompts = [prompt(int(length * bench.size)) for length in (3.4, 2.0, 0.7)]
    references = [bench.cold(text) for text in prompts]
    bench = open_bench(long_prefill_token_threshold=tokens)
    check = check_same if tokens >= bench.engine.chunk else check_near
    for wanted in ([0, 0, 0], [bench.reach(text) for text in prompts]):
        results = bench.engine.generate(prompts, SHORT)
        assert [result.cached_tokens for result in results] == wanted
        for result, reference in zip(results, references, strict=True):
            check(result, reference)


def test_with_a_budget_of_1_3_blocks_each_boundary_holds_its_own_state(
    open_bench: Callable[..., SymbolicEngine], geometry: dict[str, Any], prompt: Callable[[int], list[int]]
) -> None:
    size = geometry["block_size"]
    budget = int(1.3 * size)
    bench = open_bench(symbolic=True, max_num_batched_tokens=budget, prefix_cache_retention_interval=None)
    text = prompt(5 * size + 3)
    name = bench.add(text, 1)
    while bench.engine._results[name].finish_reason is None:
        bench.step()  # reads every published boundary back
    hashes = bench.live[name].request.block_hashes
    published = {(get_group_id(key), get_block_hash(key)) for key in bench.pool.cached_block_hash_to_block._cache}
    groups = bench.engine.runner.step.caches.geometry.num_groups
    assert len(hashes) == 5 and published == {(g, h) for g in range(groups) for h in hashes}
    bench.engine.take(name)


@pytest.mark.parametrize("short_of", [0, 1, 2])
def test_an_answer_that_ends_on_a_boundary_serves_the_next_turn(
    short_of: int, bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    """``short_of`` tokens before the boundary: the last sampled token was never read, so it makes no checkpoint."""
    size = bench.size
    history = prompt(2 * size + size // 2)
    turn = bench.run(history, greedy(size // 2 + 1 - short_of))
    read = len(history) + len(turn.tokens) - 1
    assert read == 3 * size - short_of
    bench.run(prompt(7))  # the slot has held another state meanwhile
    following = history + turn.tokens + prompt(5)
    hit = bench.run(following)
    assert hit.cached_tokens == (3 * size if short_of == 0 else 2 * size)
    check_near(hit, bench.cold(following))


def test_an_answer_that_is_stopped_on_a_boundary_serves_the_next_turn(
    bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    size = bench.size
    for attempt in range(20):  # until the token at the place has not been said before
        history = prompt(2 * size - 4 - attempt % 3)
        answer = bench.cold(history, greedy(8)).tokens
        last = 2 * size - len(history)  # index of the token that is sampled when 2 B have been read
        if answer.index(answer[last]) == last:
            break
    params = greedy(40, stop_token_ids=[answer[last]])
    turn = bench.run(history, params)
    assert turn.finish_reason == "stop" and turn.tokens == answer[: last + 1]
    bench.run(prompt(7))  # the slot has held another state meanwhile
    following = history + turn.tokens + prompt(3)
    hit = bench.run(following)
    assert hit.cached_tokens == 2 * size
    check_near(hit, bench.cold(following))


def test_traffic_of_single_tokens_hits_and_is_right(bench: CachingEngine, prompt: Callable[[int], list[int]]) -> None:
    size = bench.size
    stems = [prompt(2 * size), prompt(3 * size + 1)]
    prompts = [stem[:cut] + prompt(1 + n) for n, cut in enumerate((size, 2 * size, 9)) for stem in stems] + stems
    references = [bench.cold(text, greedy(1)) for text in prompts]
    for _ in range(2):
        results = bench.engine.generate(prompts, greedy(1))
        for result, reference in zip(results, references, strict=True):
            check_same(result, reference)
    assert [result.cached_tokens for result in results] == [bench.reach(text) for text in prompts]


def test_a_hit_that_leaves_few_tokens_beside_decodes_is_no_decode(
    bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    decodes = [prompt(7), prompt(bench.size + 2)]
    texts = [prompt(2 * bench.size + left) for left in (1, 2, 3)]
    references = [bench.cold(text) for text in texts]
    decoded = [bench.cold(text, greedy(30)) for text in decodes]
    for text in texts:
        bench.run(text)
    running = [bench.engine.add(text, greedy(30)) for text in decodes]
    for _ in range(5):
        bench.engine.step()
    results = [bench.run(text) for text in texts] + bench.engine.generate(texts, SHORT)
    for result, text, reference in zip(results, texts * 2, references * 2, strict=True):
        assert result.cached_tokens == bench.reach(text)
        check_same(result, reference)
    bench.engine.run(running)
    for name, reference in zip(running, decoded, strict=True):
        check_same(bench.engine.take(name), reference)


def test_one_step_restores_one_saves_another_does_both_for_a_third_and_neither_for_a_fourth(
    bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    size = bench.size
    decoding, hit, both, fresh = prompt(size - 2), prompt(size + 3), prompt(size + 1), prompt(5)
    bench.run(hit, greedy(1))
    bench.run(both, greedy(1))
    both = both[:size] + prompt(size)  # resumes at B and ends its chunk on 2 B
    prompts = [decoding, hit, both, fresh]
    references = [bench.cold(text) for text in prompts]
    bench.moves.plans.clear()
    names = [bench.engine.add(decoding, SHORT)]
    while bench.request(names[0]).num_computed_tokens < size - 1:  # its next step ends on B
        bench.engine.step()
    names += [bench.engine.add(text, SHORT) for text in prompts[1:]]
    bench.engine.run(names)
    results = [bench.engine.take(name) for name in names]
    assert [result.cached_tokens for result in results] == [0, size, size, 0]
    for result, reference in zip(results, references, strict=True):
        check_same(result, reference)
    restored, saved, zeroed = next(
        (set(plan.restore.rows.tolist()), set(plan.save.rows.tolist()), set(plan.zero_state_slots.tolist()))
        for plan in bench.moves.plans
        if plan.restore.num_copies == 2
    )
    assert len(saved) == 2 and len(restored & saved) == 1 and len(zeroed) == 1
    assert not zeroed & (restored | saved)


# Slots and blocks


def test_one_to_all_live_requests_never_touch_one_another(
    bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    texts = [prompt(length) for length in (bench.size + 2, 5, 2 * bench.size, 19, 3 * bench.size + 1, 2, 33, 17)]
    references = [bench.cold(text) for text in texts]
    assert len(texts) == MAX_SEQS
    for live in range(1, MAX_SEQS + 1):
        order = texts[live - 1 :: -1]
        for result, text in zip(bench.engine.generate(order, SHORT), order, strict=True):
            check_same(result, references[texts.index(text)])
    for text in texts:
        bench.check_hit(text)


def test_nan_in_every_free_block_and_slot_is_never_seen(
    bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    texts = [prompt(length) for length in (bench.size + 2, 2 * bench.size + 5, 5)]
    references = [bench.cold(text) for text in texts]
    bench.settle()
    caches = bench.engine.runner.step.caches
    blocks = slice(caches.geometry.block_size, caches.geometry.num_tokens)
    with torch.inference_mode():
        for page in (*caches.k, *caches.v):
            page[blocks].fill_(float("nan"))
        for state in (*caches.conv_states, *caches.ssm_states):
            state[: caches.zero_row].fill_(float("nan"))
    for wanted in ([0] * 3, [bench.reach(text) for text in texts]):
        results = bench.engine.generate(texts, SHORT)
        assert [result.cached_tokens for result in results] == wanted
        for result, reference in zip(results, references, strict=True):
            check_same(result, reference)


def test_requests_that_idle_for_want_of_budget_keep_their_slots(
    open_bench: Callable[..., CachingEngine], prompt: Callable[[int], list[int]]
) -> None:
    """While the first one decodes, the long one behind it gets one chunk a step and leaves some tokens to those behind
    it; once the first one is done, the long one takes the whole budget and they idle."""
    bench = open_bench(fresh=True, max_num_batched_tokens=32)
    texts = [prompt(length) for length in (3, 160, 4, 2, 3)]
    params = [greedy(4), SHORT, greedy(12), greedy(12), greedy(12)]
    references = [bench.cold(text, each) for text, each in zip(texts, params, strict=True)]
    bench.settle()
    seen: dict[str, set[int]] = {}
    idled = 0
    table = bench.engine.runner.step.requests
    apply = table.apply

    def applied(output: Any) -> Any:
        nonlocal idled
        step = apply(output)
        slots = {name: state.state_slot for name, state in table._requests.items() if state.state_slot is not None}
        idled += len(set(slots) - set(step.req_ids))
        for name, slot in slots.items():
            seen.setdefault(name, set()).add(slot)
        return step

    table.apply = applied
    for result, reference in zip(bench.engine.generate(texts, params), references, strict=True):
        check_same(result, reference)
    assert idled > 3, "every running request was in every step"
    assert all(len(slots) == 1 for slots in seen.values()) and len(seen) == len(texts)
    bench.check_hit(texts[1])


PHASES = ["waiting", "just scheduled", "mid-prefill", "decoding", "on a boundary", "about to finish"]


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_gives_all_back_and_its_prefix_stays_right(
    phase: str, bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    size = bench.size
    text, neighbour = prompt(4 * size + 3), prompt(size + 5)
    reference = bench.cold(text)
    beside = bench.cold(neighbour, greedy(40))
    other = bench.engine.add(neighbour, greedy(40))
    for _ in range(3):
        bench.engine.step()
    name = bench.engine.add(text, greedy(size + 4))
    request = bench.request(name)

    def reached() -> bool:
        computed, decoded = request.num_computed_tokens, request.num_computed_tokens - len(text)
        return {
            "waiting": True,
            "just scheduled": computed > 0,
            "mid-prefill": computed >= 2 * size,
            "decoding": decoded > 2,
            "on a boundary": decoded == size - 3,
            "about to finish": decoded >= size + 2,
        }[phase]

    while not reached():
        bench.engine.step()
    bench.engine.abort(name)
    bench.engine.take(name)
    again = bench.run(text)
    assert again.cached_tokens is not None and again.cached_tokens % size == 0
    if phase in PHASES[3:]:
        assert again.cached_tokens == 4 * size
    check_same(again, reference)
    bench.engine.run([other])
    check_same(bench.engine.take(other), beside)
    bench.check_hit(text)


def test_batches_of_equal_shape_with_other_slots_are_right(
    bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    texts = [prompt(bench.size + 3) for _ in range(6)]
    references = [bench.cold(text, greedy(12)) for text in texts]
    names = [bench.engine.add(text, greedy(12)) for text in texts[:3]]
    for newcomer in texts[3:]:  # one leaves from the front, one comes: three rows as before, in other slots
        for _ in range(3):
            bench.engine.step()
        gone = names.pop(0)
        bench.engine.abort(gone)
        bench.engine.take(gone)
        names.append(bench.engine.add(newcomer, greedy(12)))
    bench.engine.run(names)
    for name, reference in zip(names, references[3:], strict=True):
        check_same(bench.engine.take(name), reference)
    for text in texts[3:]:
        bench.check_hit(text)


def test_a_preempted_request_resumes_to_the_undisturbed_answer(
    open_bench: Callable[..., CachingEngine],
    geometry: dict[str, Any],
    prompt: Callable[[int], list[int]],
    preemptions_of: Callable[[Any], Counter[str]],
) -> None:
    size = geometry["block_size"]
    bench = open_bench(num_gpu_blocks_override=15, max_num_batched_tokens=4 * size, max_model_len=8 * size)
    texts = [prompt(2 * size - 3 - n) for n in range(6)]
    params = greedy(size + 7)
    references = [bench.cold(text, params) for text in texts]
    preempted = preemptions_of(bench.engine)
    results = bench.engine.generate(texts, params)
    assert len(preempted) >= 2
    for result, reference in zip(results, references, strict=True):
        assert len(result.tokens) == size + 7
        check_near(result, reference)


def test_slots_never_run_dry_over_hundreds_of_preemptions(
    open_bench: Callable[..., SymbolicEngine],
    geometry: dict[str, Any],
    prompt: Callable[[int], list[int]],
    preemptions_of: Callable[[Any], Counter[str]],
) -> None:
    size = geometry["block_size"]
    bench = open_bench(
        symbolic=True, fresh=True, num_gpu_blocks_override=11, max_num_batched_tokens=4 * size, max_model_len=5 * size
    )
    preempted = preemptions_of(bench.engine)
    wanted = {}
    rounds = steps = 0
    while sum(preempted.values()) < 200:
        assert rounds < 60, f"only {sum(preempted.values())} preemptions"
        rounds += 1
        for n in range(8):
            text = prompt(size // 2 + (n * 7 + rounds) % size)
            wanted[bench.add(text, 2 * size + n)] = text
        while bench.engine.vllm_engine.has_unfinished_requests():
            steps += 1  # every fourth checks all slots, blocks and checkpoints, and slots taken = running requests
            for name in bench.step() if steps % 4 == 0 else bench.engine.step():
                result = bench.engine.take(name)
                length = bench.live[name].wanted
                assert result.tokens == symbolic.answer(wanted[name], length) and len(result.tokens) == length
        bench.settle()
    assert max(preempted.values()) >= 2, "no request was preempted twice"


# Positions and geometry


@pytest.mark.parametrize("block_size", [16, 128])
def test_a_block_size_changed_on_the_live_config_changes_nothing(
    block_size: int, open_bench: Callable[..., CachingEngine], prompt: Callable[[int], list[int]]
) -> None:
    bench = open_bench(fresh=True)
    size = bench.size
    texts = [prompt(length) for length in (2 * size, 3 * size + 5, 2 * size + size // 2)]
    references = [bench.cold(text) for text in texts]
    config = bench.engine.vllm_engine.vllm_config
    for live in (config, bench.engine.core.vllm_config, bench.engine.runner.vllm_config):
        live.cache_config.block_size = block_size
        current_platform.check_and_update_config(live)
        live.cache_config.block_size = block_size
    for wanted in ([0] * 3, [bench.reach(text) for text in texts]):
        for text, reference, cached in zip(texts, references, wanted, strict=True):
            result = bench.run(text)
            assert result.cached_tokens == cached
            check_same(result, reference)
    assert bench.size == size


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_checkpoint_missing_in_one_group_shrinks_the_hit_to_a_whole_boundary(
    group: int, bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    size = bench.size
    text = prompt(4 * size + 3)
    reference = bench.cold(text)
    name = bench.engine.add(text, SHORT)
    hashes = bench.request(name).block_hashes
    bench.engine.run([name])
    pool = bench.engine.scheduler.kv_cache_manager.block_pool
    for boundary in (4, 3, 2, 1):
        bench.check_hit(text)
        for lost in range(boundary, 5):
            evicted = {
                block.block_id
                for key, cached in pool.cached_block_hash_to_block._cache.items()
                if get_group_id(key) == bench.engine.runner.step.caches.geometry.gdn_groups[group]
                and get_block_hash(key) == hashes[lost - 1]
                for block in (cached.values() if isinstance(cached, dict) else [cached])
            }
            assert evicted
            pool.evict_blocks(evicted)
        shrunk = bench.run(text)
        assert shrunk.cached_tokens == (boundary - 1) * size
        check_same(shrunk, reference)


def test_eight_groups_of_eight_prompts_all_hit_but_the_first_of_each(
    open_bench: Callable[..., CachingEngine], prompt: Callable[[int], list[int]]
) -> None:
    bench = open_bench(fresh=True)
    size = bench.size
    num_groups = 8 if size == 16 else 2  # the large geometry costs three times as much
    for _ in range(num_groups):
        shared = prompt(int(2.84 * size))
        members = [shared + prompt(int(1.33 * size)) for _ in range(8)]
        reused = [bench.run(text, greedy(2)).cached_tokens for text in members]
        assert reused == [0] + [2 * size] * 7, reused
        check_same(bench.run(members[0], greedy(2)), bench.cold(members[0], greedy(2)))
        check_same(bench.run(members[7], greedy(2)), bench.cold(members[7], greedy(2)))


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_model_length_below_a_block_is_right_never_hits_and_is_said_once(
    open_bench: Callable[..., CachingEngine], geometry: dict[str, Any], prompt: Callable[[int], list[int]]
) -> None:
    lines = Lines()
    logger = logging.getLogger("vllm.vllm_gaudi.scheduler")
    logger.addHandler(lines)
    try:
        bench = open_bench(fresh=True, max_model_len=geometry["block_size"] - 1)
        text = prompt(8)
        reference = bench.cold(text)
        for _ in range(3):
            result = bench.run(text)
            assert result.cached_tokens == 0
            check_same(result, reference)
    finally:
        logger.removeHandler(lines)
    assert [f"not longer than a block ({bench.size} tokens)" in line for line in lines.lines].count(True) == 1


# Numbers


def test_a_long_greedy_answer_after_a_long_cached_prefix_equals_cold_in_every_logprob(
    bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    text = prompt(6 * bench.size + 5)
    params = greedy(64, logprobs=5)
    reference = bench.cold(text, params)
    bench.run(text, greedy(1))
    hit = bench.run(text, params)
    assert hit.cached_tokens == 6 * bench.size and len(hit.tokens) == 64
    check_same(hit, reference)
    for mine, other in zip(hit.logprobs, reference.logprobs, strict=True):
        assert {t: p.logprob for t, p in mine.items()} == {t: p.logprob for t, p in other.items()}


def test_32_requests_that_share_three_blocks_in_random_arrival_are_right(
    bench: CachingEngine, prompt: Callable[[int], list[int]]
) -> None:
    size = bench.size
    source = random.Random(7)
    shared = prompt(3 * size)
    prompts = [shared + prompt(1 + source.randrange(size)) for _ in range(32)]
    references = [bench.cold(text, greedy(3)) for text in prompts]
    waiting = list(enumerate(prompts))
    live: dict[str, int] = {}
    hits = 0
    while waiting or live:
        if waiting and len(live) < 4 and source.random() < 0.6:
            number, text = waiting.pop(0)
            live[bench.engine.add(text, greedy(3))] = number
        for name in bench.engine.step():
            result = bench.engine.take(name)
            check_same(result, references[live.pop(name)])
            assert result.cached_tokens in (0, 3 * size)
            hits += result.cached_tokens > 0
    assert hits >= 24


# Features that cross it


def test_a_salt_shares_within_and_not_across(bench: CachingEngine, prompt: Callable[[int], list[int]]) -> None:
    text = prompt(3 * bench.size + 2)
    reference = bench.cold(text)
    for salt in ({}, {"cache_salt": "one"}, {"cache_salt": "other"}):
        for wanted in (0, 3 * bench.size):
            result = bench.run(text, **salt)
            assert result.cached_tokens == wanted
            check_same(result, reference)


def test_a_structured_answer_after_its_plain_twin_equals_the_cold_one(
    open_bench: Callable[..., CachingEngine], prompt: Callable[[int], list[int]]
) -> None:
    bench = open_bench(
        fresh=True,
        skip_tokenizer_init=False,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    text = prompt(3 * bench.size + 2)
    structured = SamplingParams(
        temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex=r"[a-f]{3}-[0-9]{2,4}")
    )
    reference = bench.cold(text, structured)
    plain = bench.cold(text)
    check_same(bench.run(text), plain)
    hit = bench.run(text, structured)
    assert hit.cached_tokens == 3 * bench.size and hit.tokens != plain.tokens[: len(hit.tokens)]
    check_same(hit, reference)
    check_same(bench.run(text), plain)


def test_with_no_cache_flag_at_all_a_hybrid_caches_and_is_right(
    open_bench: Callable[..., CachingEngine], prompt: Callable[[int], list[int]]
) -> None:
    bench = open_bench(fresh=True, enable_prefix_caching="unset")
    assert bench.engine.vllm_engine.vllm_config.cache_config.enable_prefix_caching
    assert hasattr(bench.engine.runner.step.store, "layout")
    for length in (2 * bench.size, 3 * bench.size + 4):
        text = prompt(length)
        bench.run(text)
        bench.check_hit(text)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_stored_events_name_what_can_be_restored_and_nothing_else(
    policy: str,
    open_bench: Callable[..., SymbolicEngine],
    geometry: dict[str, Any],
    prompt: Callable[[int], list[int]],
) -> None:
    """Whoever follows the events knows only keys that are in the pool, and ``step`` reads what stands under each.

    vLLM announces a removal also when one of two blocks of the same hash goes; such a key is there and not listed.
    """
    size = geometry["block_size"]
    bench = open_bench(
        symbolic=True,
        fresh=True,
        num_gpu_blocks_override=36,
        scheduling_policy=policy,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    listed: set[tuple[int | None, Any]] = set()
    withdrawn: set[tuple[int | None, Any]] = set()
    stored = 0

    def follow(batch: Any) -> None:
        nonlocal stored
        for event in batch.events:
            if isinstance(event, BlockStored):
                stored += 1
                listed.update((event.group_idx, block_hash) for block_hash in event.block_hashes)
            elif isinstance(event, BlockRemoved):
                gone = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
                listed.difference_update(gone)
                withdrawn.update(gone)
            else:
                listed.clear()

    bench.engine.scheduler.kv_event_publisher.publish = follow
    shared = prompt(2 * size)
    for round_ in range(6):
        for n in range(4):
            text = shared + prompt(1 + n * size // 2) if n % 2 else prompt(size + n * size // 3)
            bench.add(text, size, priority=(n * 3 + round_) % 4)
            bench.step()
        while bench.engine.vllm_engine.has_unfinished_requests():
            bench.step()
        bench.settle()
        bench.engine.drain()
        while bench.engine.scheduler.has_requests():
            bench.engine.step()
        pool = bench.pool.cached_block_hash_to_block._cache
        there = {(get_group_id(key), maybe_convert_block_hash(get_block_hash(key))) for key in pool}
        assert listed <= there and there - listed <= withdrawn
    assert stored > 20 and len(withdrawn) > 20 and bench.num_restores > 0
