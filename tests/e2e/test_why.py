# SPDX-License-Identifier: Apache-2.0
"""`vllm-gaudi why` against a running engine: the tokens that B really reuses after A, and the reason that is counted.

Owns: the comparison, for prompts of token ids, texts and chats.
Never: a hit that nobody sees: each case says what it expects beside what the command says.

Ordering rule: A has run to its end before B arrives, unless they come together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi import cli
from vllm_gaudi.testing.engine import Engine, engine, greedy
from vllm_gaudi.v1.core.sched.cache_stats import DEFERRED, EVICTED, MISSES, NO_CHECKPOINT, SHORT

B = 16
MESSAGES = [
    {"role": "system", "content": "A block of the cache holds the keys and the values of a fixed number of tokens."},
    {"role": "user", "content": "Question: how many apples are in the basket when there were seven?"},
]
OTHER = [MESSAGES[0], {"role": "user", "content": "Question: how many apples are in the river?"}]


@pytest.fixture
def why(capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """``why(a, b, *flags)``: the JSON; what the command sets in the environment goes again."""

    def call(a: Any, b: Any, *flags: object) -> dict[str, Any]:
        capfd.readouterr()
        before = set(os.environ)
        given = [prompt if isinstance(prompt, str) else json.dumps(prompt) for prompt in (a, b)]
        assert cli.main(["why", *given, "--json", *map(str, flags)]) == 0
        for name in set(os.environ) - before:
            del os.environ[name]
        return json.loads(capfd.readouterr().out)

    return call


class Served:
    """An engine; each pair of prompts has a salt of its own, so that it finds nothing of the pairs before it."""

    def __init__(self, opened: Engine):
        self.engine = opened
        self._num_pairs = 0

    def new_pair(self) -> None:
        self._num_pairs += 1

    def run(self, *prompts: Sequence[int]) -> list[tuple[int | None, str | None]]:
        """Cached tokens of prompts that arrive together, and the reason that was counted, if any."""
        stats = self.engine.scheduler._cache_stats
        stats.drain()
        results = self.engine.generate(prompts, greedy(1), cache_salt=f"pair {self._num_pairs}")
        self.engine.drain()
        reasons = [name.removeprefix(MISSES + ":") for name in stats.drain() if name.startswith(MISSES)]
        assert len(reasons) <= 1
        return [(result.cached_tokens, reasons[0] if reasons else None) for result in results]

    def pair(self, a: Sequence[int], b: Sequence[int]) -> tuple[int | None, str | None]:
        """What B gets after A in an empty cache with room."""
        self.new_pair()
        self.run(a)
        return self.run(b)[0]


@pytest.fixture(scope="module")
def served(checkpoint: Callable[..., Path]) -> Iterator[Served]:
    with engine(checkpoint("q35_dense"), block_size=B, num_gpu_blocks_override=400) as opened:
        assert opened.block_size == B
        yield Served(opened)


def changed_at(prompt: Sequence[int], place: int) -> list[int]:
    return [*prompt[:place], prompt[place] ^ 1, *prompt[place + 1 :]]


def pairs(prompt: Callable[[int], list[int]]) -> dict[str, tuple[list[int], list[int], int, str | None]]:
    """A, B, the tokens that B is to reuse, and the reason of its miss."""
    a, long, tail = prompt(6 * B + 5), prompt(21 * B + 1), prompt(40)
    return {
        "identical": (a, a, 6 * B, None),
        "extended": (a, [*a, *tail], 6 * B, None),
        "extended from a boundary": (a[: 4 * B], [*a[: 4 * B], *tail], 4 * B, None),
        "differing in the middle": (a, changed_at(a, 50), 3 * B, None),
        "differing at the start": (a, changed_at(a, 0), 0, None),
        "differing in the first block": (a, changed_at(a, B - 1), 0, None),
        "differing right after a boundary": (a, changed_at(a, 2 * B), 2 * B, None),
        "differing right before a boundary": (a, changed_at(a, 2 * B - 1), B, None),
        "differing only after the last boundary": (a, changed_at(a, 6 * B), 6 * B, None),
        "shorter than a block": (a, a[: B - 3], 0, SHORT),
        "a block": (a, a[:B], 0, SHORT),
        "a block and a token": (a, a[: B + 1], B, None),
        "shortened to a boundary": (a, a[: 3 * B], 2 * B, None),
        "identical, on a boundary": (a[: 4 * B], a[: 4 * B], 3 * B, None),
        "over several steps": (long, changed_at(long, 18 * B + 3), 18 * B, None),
        "A shorter than a block": (a[:9], a, 0, None),
    }


def test_a_fresh_engine_reuses_what_is_told(served, prompt, why):
    for name, (a, b, tokens, reason) in pairs(prompt).items():
        found = why(a, b, "--block-size", B)
        assert served.pair(a, b) == (tokens, reason), name
        assert found["fresh"] == {"tokens": tokens, "reason": reason}, name


def test_twins_that_arrive_together(served, prompt, why):
    a = prompt(6 * B + 5)
    for b in (a, changed_at(a, 50), [*a, *prompt(30)]):
        served.new_pair()
        (first, _), (second, reason) = served.run(a, b)
        assert (first, reason) == (0, DEFERRED)
        assert why(a, b, "--block-size", B)["together"] == {"tokens": second, "reason": reason}


def test_a_salt_of_another_shares_nothing(served, prompt, why):
    a = prompt(3 * B + 5)
    served.new_pair()
    served.run(a)
    (result,) = served.engine.generate([a], greedy(1), cache_salt="x")
    found = why(a, {"prompt_token_ids": a, "cache_salt": "x"}, "--block-size", B)
    assert found["fresh"]["tokens"] == result.cached_tokens == 0


@pytest.mark.parametrize("interval", [0, 2 * B, None])
def test_a_full_pool_keeps_what_is_told(interval, checkpoint, prompt, why):
    """A runs in a pool that is full of other prompts: what is told is kept, and little else."""
    flags = {"block_size": B, "num_gpu_blocks_override": 60, "prefix_cache_retention_interval": interval}
    with engine(checkpoint("q35_dense"), **flags) as opened:
        served = Served(opened)
        exact = set()
        for place in (5 * B + 2, 4 * B + 2, 3 * B + 2, 2 * B + 2, 6 * B):
            a = prompt(6 * B + 5)
            b = changed_at(a, place)
            found = why(a, b, "--block-size", B, "--prefix-cache-retention-interval", interval)
            for _ in range(6):
                served.new_pair()
                served.run(prompt(6 * B))
            served.run(a)
            ((tokens, reason),) = served.run(b)
            assert tokens >= found["full"]["tokens"], place
            if tokens == found["full"]["tokens"]:
                assert reason == found["full"]["reason"], place
                exact.add(reason)
        assert exact == ({None} if interval is None else {None, NO_CHECKPOINT})


def test_what_is_evicted_since_is_told(checkpoint, prompt, why):
    """Other prompts push out the boundaries that were extra, and not yet A's last one."""
    with engine(checkpoint("q35_dense"), block_size=B, num_gpu_blocks_override=41) as opened:
        served = Served(opened)
        a = prompt(6 * B + 5)
        b = changed_at(a, 3 * B + 2)
        found = why(a, b, "--block-size", B)
        assert found["pressed"] == {"tokens": 0, "reason": EVICTED}
        assert why(a, a, "--block-size", B)["pressed"] == {"tokens": 6 * B, "reason": None}
        for blocks in range(8, 31):
            states = []
            for last in (b, a):
                assert opened.vllm_engine.reset_prefix_cache()
                served.new_pair()
                served.run(a)
                served.run(prompt(blocks * B + 1))
                states.append(served.run(last)[0])
            if states == [(0, EVICTED), (6 * B, None)]:
                return
        pytest.fail("no prompt has pushed out the one and left the other")


# Text and chats


def tokens_of(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("name", ["q35_dense", "q35_vl"])
def test_texts_and_chats_become_the_tokens_of_the_server(name, checkpoint, why):
    path = checkpoint(name)
    tokenizer = tokens_of(path)
    text, other = "A cache holds what was computed once, so that it need not be.", "A cache holds what was read."
    bodies = {"messages": MESSAGES, "chat_template_kwargs": {}}
    for a, b, ids in (
        (text, other, [tokenizer(one).input_ids for one in (text, other)]),
        (
            bodies,
            OTHER,
            [tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"] for m in (MESSAGES, OTHER)],
        ),
    ):
        found = why(a, b, "--model", path, "--block-size", B)
        common = next(n for n, (x, y) in enumerate(zip(*ids, strict=False)) if x != y)
        assert [found[side]["num_tokens"] for side in "ab"] == [len(one) for one in ids]
        assert [found[side]["token"] for side in "ab"] == [one[common] for one in ids]
        assert found["common_tokens"] == common >= 5
        assert found["a"]["at"] == tokenizer.decode([ids[0][common]])
        assert tokenizer.decode(ids[0][:common]).endswith(found["a"]["before"])


def test_a_chat_hits_as_told(checkpoint, why):
    path = checkpoint("q35_dense")
    tokenizer = tokens_of(path)
    ids = [tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"] for m in (MESSAGES, OTHER)]
    found = why(MESSAGES, OTHER, "--model", path, "--block-size", B)
    with engine(path, block_size=B) as opened:
        tokens, reason = Served(opened).pair(*ids)
    assert tokens >= B and found["fresh"] == {"tokens": tokens, "reason": reason}


def test_the_block_size_follows_from_the_model(checkpoint, why):
    path = checkpoint("q35_dense")
    found = why([1, 2, 3], [1, 2, 4], "--model", path)
    with engine(path, block_size=None, dtype="auto") as opened:
        assert found["block_size"] == opened.block_size == 128
    assert (found["a"]["token"], found["b"]["token"]) == (3, 4)
