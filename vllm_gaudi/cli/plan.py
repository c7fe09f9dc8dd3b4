# SPDX-License-Identifier: Apache-2.0
"""The record of `vllm-gaudi plan`: what a command would start, or why it would not; as JSON and in words.

Owns: which numbers are told, and how. Bytes are one rank's.
Never: how they are found (``plan_builder``).

Ordering rule: refusals stand before the numbers, advice and the command after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from vllm_gaudi.units import format_bytes


@dataclass(frozen=True)
class Refusal:
    name: str  # of the table's row, "start" for what vLLM or the worker raises
    sentence: str


@dataclass(frozen=True)
class Advice:
    """``flags`` to add or, with an empty list, ``drop`` to leave out."""

    flags: tuple[str, ...]
    why: str
    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Flags:
    """As vLLM has resolved them."""

    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    kv_cache_dtype: str
    prefix_caching: bool
    retention_interval: int | None


@dataclass(frozen=True)
class Block:
    """Tokens and, of one rank, bytes."""

    tokens: int  # B
    kernel_block: int
    gdn_chunk: int
    attention_layers: int
    gdn_groups: tuple[int, ...]  # layers of each
    page_bytes: int
    block_bytes: int


@dataclass(frozen=True)
class State:
    """The GDN state: of one layer, and where it stands in its page. None of it for a model without GDN layers."""

    conv_bytes: int
    conv_dtype: str
    ssm_bytes: int
    ssm_dtype: str
    layer_bytes: int
    row_bytes: int  # over all GDN layers: a slot, a staging row, a checkpoint
    page_fill: float
    whole_heads: bool | None  # None where nothing is packed, since caching is off
    segments: tuple[dict[str, Any], ...]
    per_block_layout_factor: float


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    device: int
    is_assumed: bool
    utilization: float
    given: int | None
    budget: int
    weights: int
    parameters: int
    peak: int
    slots: int  # rows
    reserved_rows: int
    staging_rows: int
    states: int
    spare: int
    available: int


@dataclass(frozen=True)
class Pool:
    """With the caching of the command."""

    blocks: int
    bytes: int
    tokens: int


@dataclass(frozen=True)
class Boundary:
    """What one cached boundary takes of the pool, and what a save moves."""

    blocks: int
    gdn_blocks: int
    pool_bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class Fit:
    """``number``, which slots may limit; ``in_pool``: what the pool's ``blocks`` alone would hold."""

    number: float
    in_pool: float
    blocks: int


@dataclass(frozen=True)
class MaxConcurrency:
    """Most requests of ``length`` tokens that run at a time; None where it would not start."""

    length: int
    caching_on: Fit | None
    caching_off: Fit | None


@dataclass(frozen=True)
class Numbers:
    flags: Flags
    block: Block
    state: State | None
    memory: Memory
    pool: Pool | None
    boundary: Boundary | None
    max_concurrency: MaxConcurrency


@dataclass(frozen=True)
class Plan:
    model: str
    architecture: str | None
    refusals: tuple[Refusal, ...]
    numbers: Numbers | None
    advice: tuple[Advice, ...]
    command: str
    placeholder: str | None  # what MODEL in the command is, None where the command names the model
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        return "\n".join(_lines(self))


# In words


def _size(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes ({format_bytes(num_bytes)})"


def _row(name: str, value: str) -> str:
    return f"  {name:<24}{value}"


def _lines(plan: Plan) -> Iterator[str]:
    yield f"{plan.model}: {plan.architecture or 'not a model that can be served'}"
    if plan.numbers is not None:
        flags = plan.numbers.flags
        yield (
            f"{flags.tensor_parallel_size} rank(s), {flags.dtype}, KV cache {flags.kv_cache_dtype}, "
            f"{flags.max_model_len:,} tokens at most, {flags.max_num_seqs:,} requests, "
            f"{flags.max_num_batched_tokens:,} tokens a step; bytes are one rank's"
        )
    if plan.refusals:
        yield ""
        yield "refused"
        for refusal in plan.refusals:
            yield _row(refusal.name, refusal.sentence)
    if plan.numbers is not None:
        yield from _lines_of_numbers(plan.numbers)
    if plan.advice or plan.notes:
        yield ""
        yield "advised"
        for advice in plan.advice:
            yield f"  {' '.join(advice.flags) or 'without ' + ', '.join(advice.drop)}: {advice.why}"
        for note in plan.notes:
            yield f"  {note}"
    yield ""
    yield plan.command
    if plan.placeholder is not None:
        yield plan.placeholder


def _lines_of_numbers(numbers: Numbers) -> Iterator[str]:
    block, state, memory = numbers.block, numbers.state, numbers.memory
    yield ""
    yield "block"
    chunks = f" and GDN chunks of {block.gdn_chunk}" if state is not None else ""
    yield _row("B", f"{block.tokens:,} tokens, in kernel blocks of {block.kernel_block}{chunks}")
    yield _row(
        "layers",
        f"{block.attention_layers} attention"
        + (f", {len(block.gdn_groups)} groups of {'/'.join(map(str, block.gdn_groups))} GDN" if state else ""),
    )
    yield _row("page", f"{_size(block.page_bytes)}: K and V of a block in one layer")
    yield _row("block", f"{_size(block.block_bytes)} over all attention layers")
    if state is not None:
        yield ""
        yield "GDN state"
        yield _row(
            "one layer",
            f"{state.layer_bytes:,} bytes: SSM {state.ssm_bytes:,} in {state.ssm_dtype}, "
            f"conv {state.conv_bytes:,} in {state.conv_dtype}",
        )
        yield _row("all layers", f"{_size(state.row_bytes)}: a slot, a staging row, a checkpoint")
        if state.whole_heads is not None:
            how = "whole heads" if state.whole_heads else "SSM cut at the end of K"
            yield _row("packing", f"{how}; the page is {100 * state.page_fill:.1f} % full")
            for part in state.segments:
                where = f"{part['half'].upper()} half, word {part['page_word']:,}"
                yield _row("", f"{where}: {part['num_words']:,} words of {part['state']}")
        yield _row(
            "per-block layout",
            f"would keep {state.per_block_layout_factor:.4f} of the blocks (a second tensor per block); here it is 1",
        )
    yield ""
    yield "memory"
    if memory.given is not None:
        yield _row("budget", f"{_size(memory.budget)}, as given; weights and peak are not taken off")
    else:
        assumed = ", assumed: pass --memory" if memory.is_assumed else ""
        yield _row("device", f"{_size(memory.device)}{assumed}")
        yield _row("budget", f"{_size(memory.budget)}: {memory.utilization} of it")
    yield _row("weights", f"{_size(memory.weights)}, an estimate: {memory.parameters:,} parameters")
    yield _row(
        "profile peak", f"{_size(memory.peak)}" + ("" if memory.peak else ": not known before a start, see --peak")
    )
    yield _row(
        "state rows",
        f"{_size(memory.states)}: {memory.slots:,} slots, {memory.reserved_rows} reserved, "
        f"{memory.staging_rows} staging",
    )
    yield _row("padding kernel block", _size(memory.spare))
    left = _size(memory.available) if memory.available > 0 else f"nothing: {_size(-memory.available)} are missing"
    yield _row("left for the pool", left)
    yield ""
    yield "pool"
    if numbers.pool is None:
        yield _row("blocks", "none: it would not start")
    else:
        yield _row("blocks", f"{numbers.pool.blocks:,}, one of them the null block; {_size(numbers.pool.bytes)}")
        yield _row("tokens", f"{numbers.pool.tokens:,}")
    if numbers.boundary is not None:
        boundary = numbers.boundary
        yield _row(
            "a cached boundary",
            f"{boundary.blocks} blocks, {boundary.gdn_blocks} of them for GDN states; {_size(boundary.pool_bytes)}",
        )
        yield _row("a save moves", _size(boundary.moved_bytes))
    fits = numbers.max_concurrency
    yield ""
    yield f"maximum concurrency for {fits.length:,} tokens per request"
    for words, fit in (("caching on", fits.caching_on), ("caching off", fits.caching_off)):
        if fit is None:
            yield _row(words, "would not start")
        else:
            slots = f"; {fit.in_pool:,.2f}x with more slots" if fit.in_pool > fit.number else ""
            yield _row(words, f"{fit.number:,.2f}x in {fit.blocks:,} blocks{slots}")
