# SPDX-License-Identifier: Apache-2.0
"""`vllm-gaudi why`: where two prompts part, what the second reuses of the first, and which reason its miss would have.

Owns: reading a prompt, the comparison, and its words. Token ids come from vLLM's own renderer, the kept boundaries and
the reasons from the scheduler's own rules.
Never: an engine; the block size comes from the user or from a dry run.

Ordering rule: what decides is the token ids; texts are shown, and never compared.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_gaudi import compat
from vllm_gaudi.cli import UsageError
from vllm_gaudi.v1.core import retention
from vllm_gaudi.v1.core.sched.cache_stats import REASONS, CacheStats

CONTEXT = 12
"""Tokens shown before and after the place where the prompts part."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as given. ``kind``: text, chat or ids; ``request``: what else a request's body says about it."""

    kind: str
    content: Any
    request: dict[str, Any]

    @property
    def salt(self) -> str | None:
        return self.request.get("cache_salt")

    @property
    def skips_cache(self) -> bool:
        """vLLM computes every token of a prompt whose logprobs are asked for."""
        return self.request.get("prompt_logprobs") is not None


@dataclass(frozen=True)
class Side:
    """One prompt at the place where they part. ``token``: its id there, None where it has ended."""

    kind: str
    num_tokens: int
    token: int | None
    before: str
    at: str
    after: str


@dataclass(frozen=True)
class Reuse:
    """Tokens that B reuses after A in some state of the pool, and the reason that its miss would count."""

    tokens: int
    reason: str | None


@dataclass(frozen=True)
class Why:
    block_size: int
    retention_interval: int | None
    a: Side
    b: Side
    common_tokens: int
    common_blocks: int
    boundaries: tuple[int, ...]  # where A's states are kept under pressure, in tokens
    fresh: Reuse  # A has just run and the pool has room
    pressed: Reuse  # the pool has filled up since, and only what retention keeps is left
    full: Reuse  # A has run in a full pool, which takes that and little else: at least
    together: Reuse  # A and B arrive in one step; at most, where A takes more than one
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        return "\n".join(_lines(self))


def make(options: argparse.Namespace) -> Why:
    """Compare the prompts of ``options``. Raises UsageError for what cannot be read or turned into tokens."""
    prompts = [read(options.a, "A"), read(options.b, "B")]
    if options.model is None:
        if options.block_size is None:
            raise UsageError(
                "the block size is not known; pass --block-size, which the engine's start-up line tells, or --model DIR"
            )
        named = [name for name, prompt in zip("AB", prompts, strict=True) if prompt.kind != "ids"]
        if named:
            raise UsageError(f"{' and '.join(named)}: text and chats need a tokenizer; pass --model DIR, or token ids")
        block_size = options.block_size
        ids = [prompt.content for prompt in prompts]
        text_of = _numbers
    else:
        compat.define_torchvision_schemas()
        from vllm_gaudi.cli.rendering import Renderer

        ids_only = all(prompt.kind == "ids" for prompt in prompts)
        with Renderer(options.model, options.tp, ids_only) as renderer:
            ids = [renderer.ids(prompt) for prompt in prompts]
            block_size = options.block_size or renderer.block_size()
            text_of = renderer.text
    if options.retention and options.retention % block_size:
        raise UsageError(
            f"--prefix-cache-retention-interval {options.retention} is not a multiple of the block size {block_size}"
        )
    return compare(prompts, ids, block_size, options.retention, text_of)


# Prompts


def read(given: str, name: str) -> Prompt:
    """The prompt that ``given`` is, or names the file of. Raises UsageError."""
    text = given
    if os.path.isfile(given):
        try:
            text = Path(given).read_text()
        except (OSError, ValueError) as error:
            raise UsageError(f"{name}: {given} cannot be read: {error}") from error
    elif given.endswith((".json", ".txt")) and not any(letter.isspace() for letter in given):
        raise UsageError(f"{name}: there is no file {given}")
    try:
        value = json.loads(text)
    except ValueError:
        return Prompt("text", text, {})
    return _of_json(value, text, name)


def _of_json(value: Any, text: str, name: str) -> Prompt:
    if isinstance(value, str):
        return Prompt("text", value, {})
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        if min(value) < 0:
            raise UsageError(f"{name}: {min(value)} is not a token id")
        return Prompt("ids", value, {})
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        return Prompt("chat", value, {})
    if isinstance(value, dict):
        for key in ("messages", "prompt_token_ids", "prompt"):
            if key in value:
                inner = _of_json(value[key], "", name)
                return Prompt(inner.kind, inner.content, {k: v for k, v in value.items() if k != key})
        raise UsageError(f"{name}: a JSON object is the body of a request, with messages, prompt or prompt_token_ids")
    if isinstance(value, list):
        raise UsageError(f"{name}: a JSON list is of token ids, or of chat messages with a role")
    return Prompt("text", text, {})  # "17" and "true" are JSON, and text as well


# Comparing


def compare(
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    block_size: int,
    interval: int | None,
    text_of: Callable[[Sequence[int]], str],
) -> Why:
    """``ids``: tokens of both prompts, at least one each; ``text_of``: what is shown of some of them."""
    a, b = ids
    for name, tokens in zip("AB", ids, strict=True):
        if not tokens:
            raise UsageError(f"{name} has no token")
    common = common_prefix(a, b)
    notes = []
    shared = common
    if prompts[0].salt != prompts[1].salt:
        shared = 0
        notes.append("their cache_salt differs: they share nothing, whatever their tokens are")
    if prompts[1].skips_cache:
        notes.append("B asks for prompt_logprobs: vLLM does not look into the cache for it, and no reason is counted")
    if common == len(a) < len(b):
        notes.append("B goes on where A ends: what it has in common with A's answer can be reused as well")
    if shared < block_size < len(b):
        notes.append("no whole block is common: every token of B is computed, and no reason is counted for that")
    elif common % block_size:
        notes.append(f"{common % block_size} common tokens after the last whole block are computed again")
    on_boundary = shared == len(b) and len(b) % block_size == 0
    if on_boundary:
        notes.append("B ends on a boundary: its last block is computed again, since its last token must be")
    kept = boundaries_of(len(a), block_size, interval)
    every = range(1, len(a) // block_size + 1)
    rule = _Rule(b, shared, block_size, prompts[1].skips_cache)
    return Why(
        block_size=block_size,
        retention_interval=interval,
        a=_side(prompts[0], a, common, text_of),
        b=_side(prompts[1], b, common, text_of),
        common_tokens=common,
        common_blocks=common // block_size,
        boundaries=tuple(block_size * k for k in kept),
        fresh=rule.reuse(every, every),
        pressed=rule.reuse(kept, every),
        full=rule.reuse(kept, kept),
        together=rule.reuse(every, every, is_deferred=True),
        notes=tuple(notes),
    )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def boundaries_of(num_prompt: int, block_size: int, interval: int | None) -> list[int]:
    """Boundaries, in blocks, that a prompt leaves a state at which is kept until it is evicted."""
    passed = range(1, num_prompt // block_size + 1)
    return [k for k in passed if retention.is_kept(k, block_size, interval, num_prompt, shared=0)]


class _Rule:
    """What the scheduler would find for B, ``shared`` of whose tokens have A's block hashes."""

    def __init__(self, b: Sequence[int], shared: int, block_size: int, skips_cache: bool):
        self._num_prompt = len(b)
        self._block_size = block_size
        self._skips_cache = skips_cache
        # A hash stands for all tokens up to the end of its block; those of B's own are nobody else's.
        self._hashes = [("A" if k * block_size <= shared else "B", k) for k in range(1, len(b) // block_size + 1)]

    def reuse(self, there: Sequence[int], published: Sequence[int], is_deferred: bool = False) -> Reuse:
        """``there``: boundaries of A, in blocks, whose states are in the pool; ``published``: those that ever were."""
        if self._skips_cache:
            return Reuse(0, None)
        size, reachable = self._block_size, (self._num_prompt - 1) // self._block_size
        common = [k for k in range(1, reachable + 1) if self._hashes[k - 1] == ("A", k)]
        hit = max((k for k in common if k in there), default=0) * size
        stats = CacheStats(size, 0, memory=max(1, len(published)))
        for k in published:
            stats.published(("A", k))
        attention_hit = max(common, default=0) * size
        reason = stats.admitted(
            self._num_prompt, hit, attention_hit if attention_hit > hit else 0, self._hashes, is_deferred
        )
        return Reuse(hit, reason)


def _side(prompt: Prompt, ids: Sequence[int], place: int, text_of: Callable[[Sequence[int]], str]) -> Side:
    has_ended = place >= len(ids)
    return Side(
        kind=prompt.kind,
        num_tokens=len(ids),
        token=None if has_ended else ids[place],
        before=text_of(ids[max(0, place - CONTEXT) : place]),
        at="" if has_ended else text_of(ids[place : place + 1]),
        after=text_of(ids[place + 1 : place + 1 + CONTEXT]),
    )


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


# In words


def _lines(why: Why) -> Iterator[str]:
    yield f"blocks of {why.block_size:,} tokens, retention {why.retention_interval}"
    yield f"A: {why.a.num_tokens:,} tokens of {why.a.kind}; B: {why.b.num_tokens:,} tokens of {why.b.kind}"
    yield ""
    if why.a.token is None and why.b.token is None:
        yield f"the prompts are the same {why.common_tokens:,} tokens"
    else:
        yield f"the first {why.common_tokens:,} tokens are the same; then"
        for name, side in (("A", why.a), ("B", why.b)):
            token = "ends" if side.token is None else f"token {side.token}"
            mark = ">>>end<<<" if side.token is None else f">>>{_escaped(side.at)}<<<"
            yield f"  {name} {token + ':':<14} ...{_escaped(side.before)}{mark}{_escaped(side.after)}"
    yield ""
    yield f"whole blocks in common      {why.common_blocks:,} ({why.common_blocks * why.block_size:,} tokens)"
    kept = ", ".join(f"{boundary:,}" for boundary in why.boundaries) or "none"
    yield f"A's states are kept at      {kept}; others as long as blocks hold nothing else"
    yield ""
    yield "B reuses"
    for words, reuse in (
        ("after A, with room", why.fresh),
        ("after A, pool full since", why.pressed),
        ("after A in a full pool, at least", why.full),
        ("together with A, at most", why.together),
    ):
        reason = "no reason is counted" if reuse.reason is None else f"{reuse.reason}: {REASONS[reuse.reason]}"
        yield f"  {words:<34}{reuse.tokens:>8,} tokens  {reason}"
    if why.notes:
        yield ""
        yield from why.notes


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
