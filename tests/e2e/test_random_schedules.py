# SPDX-License-Identifier: Apache-2.0
"""Random schedules on the real engine: whatever came, went, was preempted or aborted, each answer is the solo answer.

A schedule is a list of events (add, abort, step, stand idle, reset the prefix cache) drawn from one seed. One engine
plays many, drained in between. After every step the slots in use are exactly those of running requests (plus those
whose end the worker hears of with the next step), and all that is free and not cached (blocks, slots, TRASH) is filled
with NaN, so that whoever reads what it did not write is found out.

A failure prints the seed, the events and a line that plays it again: ``--seeds 17`` plays one seed, ``--seeds 100-180``
many.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.share import share_of

BLOCK = 16
MAX_SEQS = 4
MAX_NEW = 32
MAX_LEN = 176
LENGTHS = (1, 2, 15, 16, 17, 30, 31, 32, 33, 45, 47, 48, 49, 63, 64, 65, 101, 128)
TOLERANCE = 1e-4
MANY_STEPS = 3000


@dataclass(frozen=True)
class Kind:
    """How a request samples. ``is_seeded``: by its own generator, which a dropped token moves on."""

    name: str
    params: dict[str, Any]
    is_seeded: bool = False


KINDS = (
    Kind("greedy", {"temperature": 0}),
    Kind("penalised", {"temperature": 0, "repetition_penalty": 1.4, "presence_penalty": 0.5}),
    Kind("seeded", {"temperature": 1.0, "seed": 11, "top_p": 0.95}, is_seeded=True),
    Kind("scored", {"temperature": 0, "prompt_logprobs": 1}),
)


@dataclass
class Solo:
    """What a prompt gives alone on an idle engine, to the full length."""

    tokens: list[int]
    logits: torch.Tensor
    prompt_logprobs: list[float]


@dataclass
class WatchedEngine:
    """One engine under watch. Request ids are vLLM's internal ones unless they come from the harness."""

    engine: Any
    is_priority: bool
    is_async: bool
    is_hybrid: bool
    is_caching: bool
    prompts: list[list[int]]
    solos: dict[int, Solo]
    # Prompts, and limits of tokens, of requests that come together: the first ends, the second takes all tokens of the
    # next step, and the third, which runs already, is passed over.
    crowd: tuple[tuple[int, int | None], ...] = ()
    rows: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    num_preemptions: int = 0
    num_hits: int = 0
    num_idle: int = 0  # times that a running request was passed over by a step
    num_steps: int = 0

    def __post_init__(self):
        runner = self.engine.runner
        sample, apply = runner.sampling.sample, runner.step.requests.apply

        def watched_sample(step: Any, table: Any, logits_index: Any, *rest: Any) -> Any:
            logits = runner.sampling.logits_buffer.take(list(logits_index.values()), len(logits_index))
            assert torch.isfinite(logits).all(), f"logits of {list(logits_index)} are not finite"
            end = dict(zip(step.req_ids, step.end.tolist(), strict=True))
            for req_id, row in zip(logits_index, logits, strict=True):
                self.rows.setdefault(req_id, {})[end[req_id]] = row
            return sample(step, table, logits_index, *rest)

        def watched_apply(output: Any) -> Any:
            self.preempted |= output.preempted_req_ids or set()
            self.num_preemptions += len(output.preempted_req_ids or ())
            step = apply(output)
            running = {request.request_id for request in self.engine.scheduler.running}
            self.num_idle += len(running - set(step.req_ids))
            return step

        runner.sampling.sample, runner.step.requests.apply = watched_sample, watched_apply

    # Stepping

    def step(self) -> list[str]:
        self.num_steps += 1
        finished = self.engine.step()
        self.check_slots()
        if self.is_hybrid:
            self.poison_what_is_free()
        return finished

    def drain(self) -> None:
        """Step until the worker, too, has heard that every request ended."""
        core = self.engine.core
        for _ in range(MANY_STEPS):
            if not core.scheduler.has_requests() and not core.batch_queue:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def check_slots(self) -> None:
        scheduler, runner = self.engine.scheduler, self.engine.runner
        held = {r: s.state_slot for r, s in runner.step.requests._requests.items() if s.state_slot is not None}
        running = {request.request_id for request in scheduler.running}
        not_yet_told = scheduler.finished_req_ids | scheduler.reset_preempted_req_ids
        assert running <= set(held), f"running without a slot: {running - set(held)}"
        assert set(held) <= running | not_yet_told, f"a slot without running: {set(held) - running - not_yet_told}"
        assert len(set(held.values())) == len(held) == runner.step.state_slots.num_taken <= MAX_SEQS, f"slots {held}"

    def poison_what_is_free(self) -> None:
        caches, runner = self.engine.runner.step.caches, self.engine.runner
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        size = caches.geometry.block_size
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks() if block.block_hash is None]
        blocks = torch.tensor([0, *free])
        tokens = (blocks[:, None] * size + torch.arange(size)).reshape(-1)
        held = {s.state_slot for s in runner.step.requests._requests.values()}
        slots = torch.tensor([row for row in range(MAX_SEQS) if row not in held] + [caches.trash_row])
        for tensors, rows in ((caches.k + caches.v, tokens), (caches.conv_states + caches.ssm_states, slots)):
            for tensor in tensors:
                tensor.index_fill_(0, rows, float("nan"))

    def check_rest(self) -> None:
        """At rest all slots and blocks are back, nothing is remembered, and nobody wrote into ZERO."""
        scheduler, runner = self.engine.scheduler, self.engine.runner
        assert runner.step.state_slots.num_taken == 0
        assert len(runner.step.requests) == 0
        assert not runner.sampling._states
        assert not runner.step.prompt_logprobs._in_flight
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        for tensor in runner.step.caches.conv_states + runner.step.caches.ssm_states:
            assert not tensor[runner.step.caches.zero_row].any()

    # Solo runs

    def kind(self, prompt: int) -> Kind:
        """One kind per prompt, so that there are few solo runs."""
        return KINDS[prompt % len(KINDS)]

    def params(self, prompt: int, max_tokens: int, stop: int | None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            **self.kind(prompt).params,
            max_tokens=max_tokens,
            stop_token_ids=None if stop is None else [stop],
            ignore_eos=True,
            detokenize=False,
        )

    def solo(self, prompt: int) -> Solo:
        """The answer of the request alone, cold (its own cache salt), made on first use with the engine at rest.

        ``solos`` is shared by engines of all budgets and schedulers: a prompt's bits do not depend on them.
        """
        if prompt not in self.solos:
            salt = {"cache_salt": f"solo {prompt}"} if self.is_caching else {}
            req_id = self.engine.add(self.prompts[prompt], self.params(prompt, MAX_NEW, None), **salt)
            self.drain()
            result = self.engine.take(req_id)
            internal = self.internal(req_id)
            assert internal not in self.preempted
            start = len(self.prompts[prompt])
            self.solos[prompt] = Solo(
                result.tokens,
                torch.stack([self.rows[internal][start + n] for n in range(MAX_NEW)]),
                scores(result.prompt_logprobs),
            )
        return self.solos[prompt]

    def internal(self, req_id: str) -> str:
        (found,) = [name for name in self.rows if outer_id(name) == req_id]
        return found


@dataclass
class Wish:
    """One request of a schedule, and what it must give."""

    prompt: int
    tokens: list[int]
    max_tokens: int
    stop: int | None
    priority: int


@dataclass
class Schedule:
    """One schedule on a watched at rest; ``log`` tells what happened, for the report of a failure."""

    watched: WatchedEngine
    draw: random.Random
    log: list[str]
    asked: dict[str, Wish] = field(default_factory=dict)
    alive: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)  # a token in flight of these may have been thrown away

    def play(self) -> None:
        watched, draw = self.watched, self.draw
        wishes = [self.draw_wish() for _ in range(draw.randrange(4, 9))]
        crowd = [self.draw_wish(prompt, limit) for prompt, limit in watched.crowd] if draw.random() < 0.3 else []
        watched.rows.clear()
        watched.preempted.clear()
        for wish in crowd:
            self.add(wish)
        while wishes or self.alive:
            event = draw.choices(("add", "step", "run", "abort", "reset", "idle"), (6, 6, 4, 1, 0.5, 0.3))[0]
            self.log.append(event)
            if event == "add" and wishes:
                for _ in range(min(len(wishes), draw.choice((1, 3, 4, 5)))):
                    self.add(wishes.pop())
            elif event == "abort" and self.alive:
                self.abort()
            elif event == "reset":
                self.reset()
            elif event == "idle":
                self.come_to_rest()
                self.step(draw.randrange(4))
            else:
                self.step(1 if event != "run" else draw.randrange(2, 12))
        watched.drain()
        watched.check_rest()
        for req_id in self.finished:
            self.compare(req_id)

    def draw_wish(self, prompt: int | None = None, limit: int | None = None) -> Wish:
        prompt = self.draw.randrange(len(self.watched.prompts)) if prompt is None else prompt
        solo = self.watched.solo(prompt)
        max_tokens = limit or self.draw.choice((1, 9, 20, MAX_NEW, MAX_NEW, MAX_NEW))
        stop = self.draw.choice(solo.tokens) if self.draw.random() < 0.2 else None
        tokens = solo.tokens[:max_tokens]
        if stop in tokens:
            tokens = tokens[: tokens.index(stop) + 1]
        return Wish(prompt, tokens, max_tokens, stop, self.draw.randrange(3) if self.watched.is_priority else 0)

    def add(self, wish: Wish) -> None:
        watched = self.watched
        params = watched.params(wish.prompt, wish.max_tokens, wish.stop)
        req_id = watched.engine.add(watched.prompts[wish.prompt], params, priority=wish.priority)
        kind, length = watched.kind(wish.prompt).name, len(watched.prompts[wish.prompt])
        self.log.append(f"{req_id}={kind}:{length}+{len(wish.tokens)}:{wish.priority}")
        self.asked[req_id] = wish
        self.alive.append(req_id)

    def abort(self) -> None:
        req_id = self.alive.pop(self.draw.randrange(len(self.alive)))
        self.log.append(req_id)
        self.watched.engine.abort(req_id)

    def reset(self) -> None:
        """Of the prefix cache, half the time with all running requests preempted and resumed in one step."""
        running_too = self.draw.random() < 0.5
        self.log.append(str(running_too))
        if running_too:
            self.dropped |= {outer_id(request.request_id) for request in self.watched.engine.scheduler.running}
        self.watched.engine.vllm_engine.reset_prefix_cache(reset_running_requests=running_too)

    def step(self, times: int) -> None:
        for _ in range(times):
            for req_id in self.watched.step():
                if req_id in self.alive:
                    self.alive.remove(req_id)
                    self.finished.append(req_id)

    def come_to_rest(self) -> None:
        for _ in range(MANY_STEPS):
            if not self.alive:
                return
            self.step(1)
        raise AssertionError(f"{self.alive} never finish")

    def compare(self, req_id: str) -> None:
        watched, wish = self.watched, self.asked[req_id]
        result, solo = watched.engine.take(req_id), watched.solo(wish.prompt)
        watched.num_hits += bool(result.cached_tokens)
        if req_id in self.dropped and watched.is_async and watched.kind(wish.prompt).is_seeded:
            return  # the token that was thrown away has moved the generator on
        assert result.tokens == wish.tokens, f"tokens of {req_id}"
        internal = watched.internal(req_id)
        start = len(watched.prompts[wish.prompt])
        logits = torch.stack([watched.rows[internal][start + n] for n in range(len(result.tokens))])
        expected = solo.logits[: len(logits)]
        difference = (logits - expected).abs().max().item()
        assert difference <= TOLERANCE, f"logits of {req_id} differ by {difference}"
        if internal not in watched.preempted:
            assert torch.equal(logits, expected), f"{req_id} was never preempted, but its logits differ by {difference}"
        scored = scores(result.prompt_logprobs)
        assert scored == pytest.approx(solo.prompt_logprobs, abs=TOLERANCE), f"prompt logprobs of {req_id}"


def outer_id(internal: str) -> str:
    """The harness's id of a request that vLLM runs as ``id-random``."""
    return internal.rsplit("-", 1)[0]


def scores(prompt_logprobs: Any) -> list[float]:
    """The logprob of each prompt token but the first, in the prompt's order (``{token: logprob}``: own token first)."""
    return [next(iter(entry.values())).logprob for entry in (prompt_logprobs or [])[1:]]


def play_all(watched: WatchedEngine, seeds: Iterable[int], test: str) -> None:
    for seed in seeds:
        log: list[str] = []
        try:
            Schedule(watched, random.Random(seed), log).play()
        except BaseException:
            print(f"seed {seed}, events: {', '.join(log)}")
            print(f".venv/bin/python -m pytest --soak --seeds {seed} 'tests/e2e/test_random_schedules.py::{test}'")
            raise


HYBRID_SOLOS: dict[int, Solo] = {}
CACHING_SOLOS: dict[int, Solo] = {}
ATTENTION_SOLOS: dict[int, Solo] = {}
MODES = [(is_async, policy) for is_async in (False, True) for policy in ("fcfs", "priority")]


SHARE = {(False, "fcfs", 64), (True, "fcfs", 33), (False, "priority", 48), (True, "priority", 64)}


@pytest.mark.random
@pytest.mark.parametrize(
    ("is_async", "policy", "budget"),
    share_of([(*mode, budget) for mode in MODES for budget in (64, 48, 33)], lambda *case: case in SHARE),
)
def test_hybrid(checkpoint, request, seeds, is_async, policy, budget):
    """Gated DeltaNet with a pool that two long requests fill: every answer is the solo answer."""
    from vllm_gaudi.testing.engine import engine

    source = random.Random(35)
    prompts = [[source.randrange(10, 500) for _ in range(length)] for length in LENGTHS]
    with engine(
        checkpoint("q35_dense"),
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=15,
        enable_prefix_caching=False,
        async_scheduling=is_async,
        scheduling_policy=policy,
    ) as opened:
        assert opened.block_size == BLOCK
        crowd = ((LENGTHS.index(1), 1), (LENGTHS.index(128), None), (LENGTHS.index(15), None))
        watched = WatchedEngine(opened, policy == "priority", is_async, True, False, prompts, HYBRID_SOLOS, crowd)
        first = 1000 * MODES.index((is_async, policy)) + 10 * budget
        play_all(watched, seeds(first, 10), request.node.name)
    if not request.config.getoption("--seeds"):
        assert watched.num_preemptions >= 3, "the pool is too large to preempt anybody"
        assert watched.num_idle >= 1 or budget == 33, "no running request was ever passed over"


def prompts_with_one_stem(seed: int) -> list[list[int]]:
    """Prompts that share none, half, one, one and a half ... blocks of tokens."""
    source = random.Random(seed)
    stem = [source.randrange(10, 500) for _ in range(112)]
    return [
        stem[:shared] + [source.randrange(10, 500) for _ in range(own)]
        for shared in (0, 8, 16, 24, 32, 64, 112)
        for own in (1, 13, 28)
    ]


@pytest.mark.random
@pytest.mark.parametrize(
    ("is_async", "policy"), share_of(MODES, lambda is_async, policy: is_async == (policy != "fcfs"))
)
def test_hybrid_with_prefix_caching(checkpoint, request, seeds, is_async, policy):
    """Gated DeltaNet that starts from checkpoints of others; what is free and not cached is poisoned."""
    from vllm_gaudi.testing.engine import engine

    prompts = prompts_with_one_stem(36)
    with engine(
        checkpoint("q35_dense"),
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=15,
        enable_prefix_caching=True,
        async_scheduling=is_async,
        scheduling_policy=policy,
    ) as opened:
        watched = WatchedEngine(opened, policy == "priority", is_async, True, True, prompts, CACHING_SOLOS)
        play_all(watched, seeds(100 * MODES.index((is_async, policy)), 8), request.node.name)
    if not request.config.getoption("--seeds"):
        assert watched.num_preemptions >= 3, "the pool is too large to preempt anybody"
        assert watched.num_hits >= 2, "the prefix cache was never hit"


@pytest.mark.random
@pytest.mark.parametrize(
    ("is_async", "policy"), share_of(MODES, lambda is_async, policy: is_async == (policy != "fcfs"))
)
def test_attention_only(checkpoint, request, seeds, is_async, policy):
    """Plain attention with prefix caching."""
    from vllm_gaudi.testing.engine import engine

    prompts = prompts_with_one_stem(3)
    with engine(
        checkpoint("qwen3"),
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=13,
        enable_prefix_caching=True,
        async_scheduling=is_async,
        scheduling_policy=policy,
    ) as opened:
        watched = WatchedEngine(opened, policy == "priority", is_async, False, True, prompts, ATTENTION_SOLOS)
        play_all(watched, seeds(100 * MODES.index((is_async, policy)), 10), request.node.name)
    if not request.config.getoption("--seeds"):
        assert watched.num_preemptions >= 3, "the pool is too large to preempt anybody"
        assert watched.num_hits >= 10, "the prefix cache was never hit"


def test_a_hit_on_a_block_that_a_decoding_request_fills_in_the_same_step(checkpoint):
    """The decode must run before the prefill that reads what it writes."""
    from vllm_gaudi.testing.engine import engine, greedy

    source = random.Random(8)
    first, rest = ([source.randrange(10, 500) for _ in range(length)] for length in (BLOCK - 1, 5))
    with engine(
        checkpoint("qwen3"), block_size=BLOCK, enable_prefix_caching=True, max_num_seqs=MAX_SEQS, async_scheduling=False
    ) as opened:
        (answer,) = opened.generate([first], greedy(1), cache_salt="solo")
        second = [*first, *answer.tokens, *rest]
        (solo,) = opened.generate([second], greedy(6), cache_salt="solo")
        opened.add(first, greedy(4))
        opened.step()
        follower = opened.add(second, greedy(6))
        opened.run()
        result = opened.take(follower)
    assert result.cached_tokens == BLOCK, "the follower came too early or too late for the hit"
    assert result.tokens == solo.tokens
    assert (result.logits - solo.logits).abs().max() <= TOLERANCE


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_victim_of_the_pass_that_has_scheduled_it_resumes_from_what_has_run(checkpoint, is_async):
    """Priorities: the urgent request needs a block in the very pass that has just scheduled the other's third chunk.

    The victim has run 96 tokens. Whoever hits beyond them reads pages that nobody has written for these tokens.
    """
    from vllm_gaudi.testing.engine import engine, greedy

    source = random.Random(5)
    patient, urgent = ([source.randrange(10, 500) for _ in range(length)] for length in (152, 16))
    with engine(
        checkpoint("qwen3"),
        max_model_len=160,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=48,
        num_gpu_blocks_override=11,
        enable_prefix_caching=True,
        async_scheduling=is_async,
        scheduling_policy="priority",
    ) as opened:
        (solo,) = opened.generate([patient], greedy(4), cache_salt="solo")
        admitted = []
        apply = opened.runner.step.requests.apply

        def watched_apply(output: Any) -> Any:
            step = apply(output)
            admitted.extend(step.num_computed_tokens[step.admitted].tolist())
            return step

        opened.runner.step.requests.apply = watched_apply
        victim = opened.add(patient, greedy(4), priority=5)
        opened.step()
        opened.add(urgent, greedy(20), priority=0)
        opened.run()
        assert len(admitted) == 3, "the victim was not preempted"
        assert admitted[2] <= 96, f"the victim ran 96 tokens and resumes at {admitted[2]}"
        assert opened.take(victim).tokens == solo.tokens
