# SPDX-License-Identifier: Apache-2.0
"""The workloads of the benchmark, in units of B, so that results carry over from one block size to another.

Owns: who asks what and when, from a seed. Never: an engine, or a clock: time is counted in engine steps.

A workload is a list of sessions. A session's turns follow one another: each adds tokens to what was said so far (the
model's own answers included) and asks for an answer of a length. Positions inside a session come from its own random
source, so a session is the same whatever runs beside it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.worker import Session, Turn

FIRST_TOKEN = 10
"""Ids below are special in the tiny checkpoints."""
SHORT_ANSWER = 8
"""Tokens, whatever B is: where only the prompt is measured."""


@dataclass(frozen=True)
class Workload:
    """``pool``: share of the blocks that all sessions need together, None for plenty. ``budget``: in units of B.

    ``flags``: what else the engine is given.
    """

    name: str
    says: str
    make: Callable[[Texts, float], list[Session]]
    pool: float | None = None
    budget: float | None = None
    max_num_seqs: int = 16
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Texts:
    """Random tokens whose lengths are given in units of B. ``vocabulary``: ids are below it."""

    block_size: int
    vocabulary: int
    source: random.Random = field(default_factory=random.Random)

    def tokens(self, blocks: float) -> list[int]:
        return [self.source.randrange(FIRST_TOKEN, self.vocabulary) for _ in range(self.count(blocks))]

    def count(self, blocks: float) -> int:
        return max(1, round(blocks * self.block_size))

    def steps(self, mean: float) -> int:
        """A Poisson process's waiting time, in whole steps."""
        return math.floor(self.source.expovariate(1 / mean)) if mean else 0


def in_turn(sessions: list[Session]) -> list[Session]:
    """Each session starts when the one before it has ended."""
    return [Session(session.turns, 0, n - 1 if n else None) for n, session in enumerate(sessions)]


def of_prompts(prompts: Sequence[list[int]], answer: int) -> list[Session]:
    """A session of one turn for each prompt, all of them at once."""
    return [Session([Turn(prompt, answer)]) for prompt in prompts]


def scaled(count: int, scale: float, least: int = 2) -> int:
    return max(least, round(count * scale))


def repeat(texts: Texts, scale: float) -> list[Session]:
    prompts = [texts.tokens(blocks) for blocks in (1.2, 2.5, 8.1)]
    return in_turn([Session([Turn(prompt, SHORT_ANSWER)]) for prompt in prompts for _ in range(2)])


def groups(texts: Texts, scale: float) -> list[Session]:
    count = scaled(8, scale)
    prefixes = [texts.tokens(2.84) for _ in range(count)]
    prompts = [prefix + texts.tokens(1.33) for prefix in prefixes for _ in range(count)]
    texts.source.shuffle(prompts)
    return [Session([Turn(prompt, texts.count(0.25))], arrival=4 * n) for n, prompt in enumerate(prompts)]


def chat(texts: Texts, scale: float) -> list[Session]:
    system = texts.tokens(0.6)
    sessions = []
    arrival = 0
    for _ in range(scaled(12, scale)):
        arrival += texts.steps(6)
        turns = [
            Turn(
                (system if turn == 0 else []) + texts.tokens(texts.source.uniform(0.1, 1.5)),
                texts.count(texts.source.uniform(0.2, 0.6)),
                texts.steps(8),
            )
            for turn in range(scaled(8, scale, 3))
        ]
        sessions.append(Session(turns, arrival))
    return sessions


def alternate(texts: Texts, scale: float, count: int = 2) -> list[Session]:
    """Long sessions that take turns: the gap is long enough for the others' turns."""
    sessions = []
    for n in range(count):
        lengths = [8 * max(scale, 0.3), *[0.5] * 5]
        turns = [Turn(texts.tokens(blocks), texts.count(0.25), 12 * count) for blocks in lengths]
        sessions.append(Session(turns, arrival=12 * n))
    return sessions


def alternate_four(texts: Texts, scale: float) -> list[Session]:
    return alternate(texts, scale, 4)


def agent(texts: Texts, scale: float) -> list[Session]:
    system = texts.tokens(3.2)
    return [
        Session(
            [
                Turn(
                    (system if turn == 0 else []) + texts.tokens(texts.source.lognormvariate(-0.7, 0.9)),
                    texts.count(0.25),
                    texts.steps(10),
                )
                for turn in range(scaled(30, scale, 4))
            ],
            arrival=5 * n,
        )
        for n in range(scaled(6, scale, 3))
    ]


def fork(texts: Texts, scale: float) -> list[Session]:
    document = texts.tokens(4.6)
    answer = texts.count(0.25)
    asked = [Session([Turn(document + texts.tokens(0.7), answer)], arrival=3 * n) for n in range(scaled(16, scale, 4))]
    return [*asked, Session([Turn(document + texts.tokens(0.7), answer, n=4)], arrival=3 * len(asked))]


def short(texts: Texts, scale: float) -> list[Session]:
    return [
        Session([Turn(texts.tokens(texts.source.uniform(0.1, 0.95)), SHORT_ANSWER)], arrival=2 * n)
        for n in range(scaled(64, scale, 8))
    ]


def cold(texts: Texts, scale: float) -> list[Session]:
    return [Session([Turn(texts.tokens(texts.source.uniform(1.5, 6)), 4)]) for _ in range(scaled(8, scale, 3))]


def decode(texts: Texts, scale: float) -> list[Session]:
    return [Session([Turn(texts.tokens(0.5), texts.count(4))])]


def pressure(texts: Texts, scale: float) -> list[Session]:
    """More answers than the pool holds together: about every 20 steps a request is preempted, and resumes."""
    return [
        Session([Turn(texts.tokens(texts.source.uniform(1.2, 2.8)), texts.count(2.5))])
        for _ in range(scaled(16, scale, 5))
    ]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("repeat", "prompts of 1.2, 2.5 and 8.1 B, each twice, one after the other", repeat),
        Workload("groups", "8 prefixes of 2.84 B, 8 prompts of 1.33 B more with each, shuffled", groups),
        Workload("chat", "12 sessions of 8 turns over one system prompt, Poisson arrivals", chat),
        Workload("alternate-2", "2 long sessions in turns, pool 1.3 x what they need", alternate, pool=1.3),
        Workload("alternate-4", "4 long sessions in turns, pool 1.3 x what they need", alternate_four, pool=1.3),
        Workload("agent", "6 agents of 30 turns on a system prompt of 3.2 B, pool for 60 % of them", agent, pool=0.6),
        Workload("fork", "a document of 4.6 B, 16 questions to it, and one with n = 4", fork),
        Workload("short", "64 prompts of less than B", short),
        Workload("cold", "unique prompts, the budget 2 B", cold, budget=2),
        Workload("cold-odd", "unique prompts, the budget 2.3 B", cold, budget=2.3),
        Workload(
            "cold-dense",
            "unique prompts, the budget 2 B, every boundary saved",
            cold,
            budget=2,
            flags={"prefix_cache_retention_interval": None},
        ),
        Workload(
            "decode",
            "one prompt of B / 2 with an answer of 4 B, every boundary saved",
            decode,
            flags={"prefix_cache_retention_interval": None},
        ),
        Workload("pressure", "16 long answers at once in a pool for a third of them", pressure, pool=0.35),
    )
}


def make(name: str, block_size: int, vocabulary: int, seed: int, scale: float) -> list[Session]:
    """The sessions of a workload. ``scale`` shrinks counts, never lengths but those of ``alternate``."""
    texts = Texts(block_size, vocabulary, random.Random(f"{name} {seed}"))
    return WORKLOADS[name].make(texts, scale)


def boundaries(tokens: Sequence[int], most: int, block_size: int) -> list[tuple[int, ...]]:
    """Prefixes of ``tokens`` that end on a block boundary and have at most ``most`` tokens, shortest first."""
    return [tuple(tokens[:end]) for end in range(block_size, most + 1, block_size)]


def conversations(sessions: list[Session]) -> Iterator[list[int]]:
    """All that is said in each, at its end; of a turn with n answers each is the end of one.

    What the model will answer is not known: answers are made of ids that nobody else has.
    """
    unknown = itertools.count(-1, -1)
    for session in sessions:
        said: list[int] = []
        for turn in session.turns:
            said = said + turn.new
            for _ in range(turn.n - 1):
                yield said + list(itertools.islice(unknown, turn.answer))
            said = said + list(itertools.islice(unknown, turn.answer))
        yield said


def needed_blocks(sessions: list[Session], block_size: int, num_gdn_groups: int) -> int:
    """Pool blocks that hold every conversation at its end, each with one checkpoint.

    Of one conversation that is ``blocks_per_request``; whole blocks that several begin with are counted once.
    """
    whole: set[tuple[int, ...]] = set()
    others = 0
    for said in conversations(sessions):
        whole.update(boundaries(said, len(said), block_size))
        others += (len(said) % block_size > 0) + num_gdn_groups
    return len(whole) + others


def longest(sessions: list[Session]) -> int:
    """Tokens of the longest session, answers included."""
    return max(sum(len(turn.new) + turn.answer for turn in session.turns) for session in sessions)
