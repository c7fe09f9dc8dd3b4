# SPDX-License-Identifier: Apache-2.0
"""KV cache events are judged from outside: an index fed by them alone knows, at any moment, what can be hit.

The index sees what a subscriber sees: the events in their order, through vLLM's own encoding. It finds a prompt by its
tokens and its salt, never by a hash of the scheduler's, so the fields of the events are judged too. Random schedules
(shared prefixes, salts, aborts, resets, preemption, a pool too small for all) are interrupted after every step: the
index must say what ``get_computed_blocks`` says, and at rest what a request that really runs reports as cached.

A failure prints the seed, what happened and a line that plays it again, with the seeds before: the pool is theirs too.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec.structs import replace
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.request import Request

from tests.share import share_of
from vllm_gaudi.testing.engine import Engine, engine, greedy

BLOCK = 16
MAX_LEN = 176
SALTS = (None, "one")


class Probe(NamedTuple):
    """A prompt that somebody might send."""

    tokens: tuple[int, ...]
    salt: str | None


@dataclass
class Moment:
    """The events since the moment before; tokens that each probe would reuse now; cached blocks of each group."""

    events: list[Any]
    hits: dict[Probe, int]
    blocks: Counter[int]


class Index:
    """What can be hit, by the events alone; ``num_groups`` KV cache groups is all that it is told beside.

    A prefix is ``(prefix of its parent, tokens of its last block, extra keys of its last block)``. vLLM announces each
    block, so a prefix that two blocks of a group hold is stored twice and removed twice.
    """

    def __init__(self, num_groups: int):
        self.num_groups = num_groups
        self.kinds: dict[int, str] = {}
        self.copies: defaultdict[int, Counter[Any]] = defaultdict(Counter)
        self._prefixes: dict[Any, Any] = {None: ()}  # by hash; a hash keeps its meaning when its block is gone

    def apply(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.copies.clear()
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self.remove(event.group_idx, self._prefixes[block_hash])
            else:
                self._store(event)

    def remove(self, group: int, prefix: Any) -> None:
        assert self.copies[group][prefix] > 0, f"a block of group {group} is removed that is not stored"
        self.copies[group][prefix] -= 1

    def _store(self, event: BlockStored) -> None:
        assert event.block_size == BLOCK and len(event.token_ids) == BLOCK * len(event.block_hashes)
        assert event.parent_block_hash in self._prefixes, f"group {event.group_idx}: the parent was never stored"
        assert self.kinds.setdefault(event.group_idx, event.kv_cache_spec_kind) == event.kv_cache_spec_kind
        prefix = self._prefixes[event.parent_block_hash]
        extra_keys = event.extra_keys or [None] * len(event.block_hashes)
        for n, (block_hash, extra) in enumerate(zip(event.block_hashes, extra_keys, strict=True)):
            prefix = (prefix, tuple(event.token_ids[n * BLOCK : (n + 1) * BLOCK]), extra)
            assert self._prefixes.setdefault(block_hash, prefix) == prefix, "one hash names two prefixes"
            self.copies[event.group_idx][prefix] += 1

    def hit(self, probe: Probe) -> int:
        """Tokens that ``probe`` would reuse: every block in attention groups, the last one in groups of states."""
        if len(self.kinds) < self.num_groups:
            return 0
        attention = [group for group, kind in self.kinds.items() if kind == "full_attention"]
        states = [group for group, kind in self.kinds.items() if kind == "mamba"]
        assert len(attention) + len(states) == self.num_groups, self.kinds
        longest = 0
        prefix: Any = ()
        for k in range((len(probe.tokens) - 1) // BLOCK):
            extra = (probe.salt,) if probe.salt and k == 0 else None
            prefix = (prefix, probe.tokens[k * BLOCK : (k + 1) * BLOCK], extra)
            if not all(self.copies[group][prefix] for group in attention):
                break
            if all(self.copies[group][prefix] for group in states):
                longest = k + 1
        return longest * BLOCK

    def check_hits(self, moment: Moment) -> None:
        for probe, hit in moment.hits.items():
            said = self.hit(probe)
            assert said <= hit, f"too many: the index says {said}, and {hit} of {len(probe.tokens)} tokens are cached"
            assert said >= hit, f"too few: the index says {said}, and {hit} of {len(probe.tokens)} tokens are cached"

    def check_blocks(self, moment: Moment) -> None:
        """Also what no probe has asked for."""
        stored = {group: copies.total() for group, copies in self.copies.items() if copies.total()}
        assert stored == moment.blocks, f"blocks by group: the index says {stored}, and {moment.blocks} are cached"


@dataclass
class Recorder:
    """An engine whose events are kept, moment by moment, and judged by an index; counts show what was reached."""

    serving: Engine
    moments: list[Moment] = field(default_factory=list)
    num_hits: int = 0
    num_evictions: int = 0  # times that a probe would reuse less than when it was asked last, and nothing was reset
    num_runs_hit: int = 0
    counts: Counter[tuple[type, int | None]] = field(default_factory=Counter)  # of events, per kind and group

    def __post_init__(self) -> None:
        self.index = Index(len(self.serving.scheduler.kv_cache_config.kv_cache_groups))
        self._events: list[Any] = []
        self.known: dict[Probe, int] = {}  # what each probe would have reused when it was asked last
        self.serving.scheduler.kv_event_publisher.publish = self._publish

    def _publish(self, batch: KVEventBatch) -> None:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
        self._events += sent.events
        self.counts.update((type(event), getattr(event, "group_idx", None)) for event in sent.events)
        if any(isinstance(event, AllBlocksCleared) for event in sent.events):
            self.known.clear()

    def look(self, probes: Iterable[Probe]) -> dict[Probe, int]:
        """The engine is between two steps: what each probe would reuse, after the index has agreed."""
        manager = self.serving.scheduler.kv_cache_manager
        # What happened since the last step (an abort, a reset) is published with the next one.
        pending = manager.take_events()
        if pending:
            self._publish(KVEventBatch(ts=0.0, events=pending))
        cached = [block.block_hash for block in manager.block_pool.blocks if block.block_hash is not None]
        moment = Moment(
            self._events, {probe: self._reusable(probe) for probe in probes}, Counter(map(get_group_id, cached))
        )
        self._events = []
        self.moments.append(moment)
        self.index.apply(moment.events)
        self.index.check_hits(moment)
        self.index.check_blocks(moment)
        self.num_hits += sum(hit > 0 for hit in moment.hits.values())
        self.num_evictions += sum(hit < self.known.get(probe, 0) for probe, hit in moment.hits.items())
        self.known.update(moment.hits)
        return moment.hits

    def _reusable(self, probe: Probe) -> int:
        core = self.serving.core
        request = Request(
            request_id="probe",
            prompt_token_ids=list(probe.tokens),
            sampling_params=greedy(1),
            pooling_params=None,
            cache_salt=probe.salt,
            block_hasher=core.request_block_hasher,
        )
        return core.scheduler.kv_cache_manager.get_computed_blocks(request)[1]

    def run(self, probe: Probe) -> None:
        """Send ``probe`` to the engine at rest: it reuses what the index has said."""
        said = self.look([probe])[probe]
        (result,) = self.serving.generate([probe.tokens], greedy(1), **salted(probe))
        assert result.cached_tokens == said, f"{result.cached_tokens} tokens were reused, the index said {said}"
        self.num_runs_hit += said > 0

    def rest(self) -> None:
        """Step until the worker, too, has heard that every request ended."""
        while self.serving.scheduler.has_requests() or self.serving.core.batch_queue:
            self.serving.step()


def salted(probe: Probe) -> dict[str, str]:
    return {} if probe.salt is None else {"cache_salt": probe.salt}


def prompts_with_one_stem(source: random.Random) -> list[Probe]:
    stem = [source.randrange(10, 500) for _ in range(112)]
    prompts = [
        (*stem[:shared], *(source.randrange(10, 500) for _ in range(own)))
        for shared in (0, 16, 24, 64, 112)
        for own in (1, 20)
    ]
    return [Probe(tokens, salt) for tokens in prompts for salt in SALTS]


class Schedule:
    """One random schedule on a recorder at rest; ``log`` tells what happened."""

    def __init__(self, recorder: Recorder, draw: random.Random, prompts: list[Probe], turns: deque[Probe]):
        self.recorder, self.serving, self.draw = recorder, recorder.serving, draw
        self.prompts, self.turns = prompts, turns  # turns: what was asked and answered, as the next turn sends it
        self.alive: dict[str, Probe] = {}
        self.log: list[str] = []

    def play(self) -> None:
        draw, left = self.draw, self.draw.randrange(4, 8)
        if draw.random() < 0.5:  # two that fit into the pool and outgrow it
            for salt in SALTS:
                self.add(Probe(self.prompts[-1].tokens, salt), 33)
        while left or self.alive:
            event = draw.choices(("add", "step", "abort", "reset"), (5, 9, 1, 0.6))[0]
            self.log.append(event)
            if event == "add":
                for _ in range(min(left, draw.choice((1, 2, 4)))):
                    self.add(draw.choice([*self.prompts, *self.turns]), draw.choice((1, 9, 20)))
                    left -= 1
            elif event == "abort" and self.alive:
                req_id = draw.choice(list(self.alive))
                del self.alive[req_id]
                self.log.append(req_id)
                self.serving.abort(req_id)
            elif event == "reset":
                self.serving.vllm_engine.reset_prefix_cache(reset_running_requests=draw.random() < 0.3)
            else:
                for _ in range(draw.choice((1, 2, 8))):
                    self.step()
                continue
            self.recorder.look(draw.sample(self.prompts, 3))
        self.recorder.rest()
        hits = self.recorder.look([*self.prompts, *self.turns])
        self.recorder.run(draw.choice([probe for probe, hit in hits.items() if hit] or self.prompts))
        self.recorder.run(draw.choice(self.prompts))
        self.recorder.rest()

    def add(self, prompt: Probe, max_tokens: int) -> None:
        max_tokens = min(max_tokens, MAX_LEN - len(prompt.tokens))
        req_id = self.serving.add(prompt.tokens, greedy(max_tokens), priority=self.draw.randrange(3), **salted(prompt))
        self.log.append(f"{req_id}={len(prompt.tokens)}+{max_tokens}:{prompt.salt}")
        self.alive[req_id] = prompt

    def step(self) -> None:
        for req_id in self.serving.step():
            result = self.serving.take(req_id)
            prompt = self.alive.pop(req_id, None)
            if prompt is not None:
                turn = Probe((*prompt.tokens, *result.tokens, 7), prompt.salt)
                if len(turn.tokens) < MAX_LEN:
                    self.turns.append(turn)
        self.recorder.look(self.draw.sample([*self.prompts, *self.turns], 4))


def play_all(recorder: Recorder, seeds: range, test: str) -> None:
    prompts, turns = prompts_with_one_stem(random.Random(41)), deque[Probe](maxlen=24)
    for seed in seeds:
        schedule = Schedule(recorder, random.Random(seed), prompts, turns)
        try:
            schedule.play()
        except BaseException:
            print(f"seed {seed}, events: {', '.join(schedule.log)}")
            print(f".venv/bin/python -m pytest --soak --seeds {seeds[0]}-{seed} 'tests/e2e/test_kv_events.py::{test}'")
            raise


def flags_of(model: str, is_async: bool, policy: str) -> dict[str, Any]:
    return {
        "block_size": BLOCK,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 19 if model == "q35_dense" else 14,
        "enable_prefix_caching": True,
        "async_scheduling": is_async,
        "scheduling_policy": policy,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    }


MODES = [(is_async, policy) for is_async in (False, True) for policy in ("fcfs", "priority")]
CASES = [(model, *mode) for model in ("q35_dense", "qwen3") for mode in MODES]
SHARE = {("q35_dense", False, "priority"), ("q35_dense", True, "fcfs"), ("qwen3", True, "priority")}


@pytest.mark.random
@pytest.mark.parametrize(("model", "is_async", "policy"), share_of(CASES, lambda *case: case in SHARE))
def test_an_index_of_the_events_says_what_can_be_hit(
    model: str,
    is_async: bool,
    policy: str,
    checkpoint: Callable[..., Path],
    seeds: Callable[[int, int], range],
    preemptions_of: Callable[..., Counter[str]],
    request: pytest.FixtureRequest,
) -> None:
    with engine(checkpoint(model), **flags_of(model, is_async, policy)) as serving:
        recorder, preemptions = Recorder(serving), preemptions_of(serving)
        play_all(recorder, seeds(100 * CASES.index((model, is_async, policy)), 4), request.node.name)
    if request.config.getoption("--seeds"):
        return
    assert recorder.num_hits > 100 and recorder.num_runs_hit > 0, "the prefix cache was hardly ever hit"
    assert recorder.num_evictions > 10, "the pool is too large to evict anybody"
    assert preemptions.total() > 0, "the pool is too large to preempt anybody"
    groups = recorder.index.kinds
    assert len(groups) == recorder.index.num_groups == (4 if model == "q35_dense" else 1)
    for group in groups:
        assert recorder.counts[BlockStored, group] > 10 and recorder.counts[BlockRemoved, group] > 10
    assert recorder.counts[AllBlocksCleared, None] > 0, "the prefix cache was never reset"


def test_what_a_victim_was_to_fill_and_never_will_is_removed_by_an_event(checkpoint: Callable[..., Path]) -> None:
    """Priorities: the urgent request needs a block in the very pass that has just scheduled the other's third chunk."""
    source = random.Random(5)
    patient, urgent = (Probe(tuple(source.randrange(10, 500) for _ in range(n)), None) for n in (152, 16))
    flags = {
        **flags_of("qwen3", False, "priority"),
        "max_model_len": 160,
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 48,
        "num_gpu_blocks_override": 11,
    }
    with engine(checkpoint("qwen3"), **flags) as serving:
        recorder = Recorder(serving)
        taken_back = []
        evict = serving.scheduler.kv_cache_manager.evict_blocks
        serving.scheduler.kv_cache_manager.evict_blocks = lambda blocks: (taken_back.extend(blocks), evict(blocks))
        serving.add(patient.tokens, greedy(4), priority=5)
        serving.step()
        serving.add(urgent.tokens, greedy(20), priority=0)
        hits = []
        while serving.scheduler.has_requests():
            serving.step()
            hits.append(recorder.look([patient])[patient])
    assert taken_back and hits[:2] == [96, 96], "the victim has run 96 tokens and loses its third chunk"


class IndexWithoutCopies(Index):
    """Takes a removal for the end of all blocks with this hash."""

    def remove(self, group: int, prefix: Any) -> None:
        self.copies[group][prefix] = 0


ATTENTION, STATES = (3,), (0, 1, 2)  # the groups of q35_dense


def lose(kind: type, groups: tuple[int | None, ...] = ATTENTION + STATES) -> Callable[[Any], Any]:
    return lambda event: None if isinstance(event, kind) and getattr(event, "group_idx", None) in groups else event


def spoil(groups: tuple[int, ...], **fields: Callable[[BlockStored], Any]) -> Callable[[Any], Any]:
    def changed(event: Any) -> Any:
        if not isinstance(event, BlockStored) or event.group_idx not in groups:
            return event
        return replace(event, **{name: value(event) for name, value in fields.items()})

    return changed


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "no removal": ("too many", lose(BlockRemoved)),
    "no removal of states": ("too many", lose(BlockRemoved, STATES)),
    "no clear": ("too many", lose(AllBlocksCleared, (None,))),
    "no states stored": ("too few|not stored", lose(BlockStored, STATES)),
    "no attention stored": ("too few|parent", lose(BlockStored, ATTENTION)),
    "no parent": ("two prefixes", spoil(STATES, parent_block_hash=lambda event: None)),
    "no salt": ("too few|too many", spoil(ATTENTION + STATES, extra_keys=lambda event: None)),
    "other tokens": ("two prefixes", spoil(STATES, token_ids=lambda event: event.token_ids[::-1])),
    "another group": ("too few|too many|not stored", spoil(STATES[:1], group_idx=lambda event: STATES[1])),
}


@pytest.fixture(scope="module")
def recorded(checkpoint: Callable[..., Path], execution_mode: str) -> Recorder:
    """A hybrid's moments, which an honest index has agreed to."""
    with engine(checkpoint("q35_dense"), **flags_of("q35_dense", False, "fcfs")) as serving:
        recorder = Recorder(serving)
        play_all(recorder, range(7, 10), "")
        assert serving.vllm_engine.reset_prefix_cache()
        recorder.look(list(recorder.known))
    assert recorder.index.kinds == {**dict.fromkeys(ATTENTION, "full_attention"), **dict.fromkeys(STATES, "mamba")}
    return recorder


def replay(recorded: Recorder, index: Index, changed: Callable[[Any], Any], check: Callable[[Moment], None]) -> None:
    for moment in recorded.moments:
        index.apply(event for event in map(changed, moment.events) if event is not None)
        check(moment)


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_every_event_that_is_lost_or_wrong_turns_the_gate_red(fault: str, recorded: Recorder) -> None:
    message, changed = FAULTS[fault]
    index = Index(recorded.index.num_groups)
    with pytest.raises(AssertionError, match=message):
        replay(recorded, index, changed, index.check_hits)


@pytest.mark.parametrize("group", ATTENTION + STATES)
def test_a_block_that_stays_in_one_group_of_the_index_is_found(group: int, recorded: Recorder) -> None:
    index = Index(recorded.index.num_groups)
    with pytest.raises(AssertionError, match="blocks by group"):
        replay(recorded, index, lose(BlockRemoved, (group,)), index.check_blocks)


def test_an_index_must_count_the_blocks_of_a_hash(recorded: Recorder) -> None:
    index = IndexWithoutCopies(recorded.index.num_groups)
    with pytest.raises(AssertionError, match="too few"):
        replay(recorded, index, lambda event: event, index.check_hits)
