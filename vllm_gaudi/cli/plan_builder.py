# SPDX-License-Identifier: Apache-2.0
"""Making the plan of a command: dry runs with the flags as given and, where those are refused, repaired.

Owns: what a refused command is planned with instead, and what is advised.
Never: a number that a dry run has not given (``dry_run``) or the shared arithmetic does not follow from one.

Ordering rule: the flags as given come first, and every refusal of them is told; then repairs, numbers, advice.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_gaudi import capabilities
from vllm_gaudi.cli.plan import (
    Advice,
    Block,
    Boundary,
    Fit,
    Flags,
    MaxConcurrency,
    Memory,
    Numbers,
    Plan,
    Pool,
    Refusal,
    State,
)
from vllm_gaudi.units import GIB, format_bytes
from vllm_gaudi.v1.core.sched.block_size import MAX_KERNEL_BLOCK
from vllm_gaudi.v1.worker.gdn_checkpoint.layout import WORD_BYTES
from vllm_gaudi.v1.worker.memory import CARD_BYTES, max_concurrency, per_block_layout_factor
from vllm_gaudi.v1.worker.state_slots import NUM_RESERVED_ROWS

if TYPE_CHECKING:
    from vllm_gaudi.cli.dry_run import Attempt, DryRun
    from vllm_gaudi.v1.worker.gdn_checkpoint.layout import CheckpointLayout
    from vllm_gaudi.v1.worker.kv_cache import KVCaches

MORE_RANKS = (2, 4, 8, 16)
PLACEHOLDER = "MODEL"


@dataclass(frozen=True)
class Repair:
    """What a refused row is planned with: fields of vLLM's arguments, and flags to add and to drop."""

    changes: dict[str, Any]
    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


REPAIRS = {
    "multimodal-inputs": Repair({"language_model_only": True}, add=("--language-model-only",)),
    "dtype": Repair({"dtype": "bfloat16"}, add=("--dtype", "bfloat16"), drop=("--dtype",)),
    "kv-cache-dtype": Repair(
        {"kv_cache_dtype": "auto", "kv_cache_dtype_skip_layers": []},
        drop=("--kv-cache-dtype", "--kv-cache-dtype-skip-layers"),
    ),
    "speculative-decoding": Repair({"speculative_config": None}, drop=("--speculative-config",)),
    "expert-parallel": Repair({"enable_expert_parallel": False}, drop=("--enable-expert-parallel",)),
}
"""Rows whose repair leaves the model what it is."""


@dataclass(frozen=True)
class Repaired:
    """``args`` of vLLM, those given or repaired ones; what a start with them comes to; all that stopped a start."""

    args: Any
    attempt: Attempt
    errors: tuple[Exception, ...]
    advice: tuple[Advice, ...]


@dataclass(frozen=True)
class Outcome:
    """What other flags would come to. ``num_blocks`` of the pool: None where the engine would not start."""

    block_size: int
    num_cached_groups: int
    max_num_seqs: int
    num_blocks: int | None

    def fit(self, length: int) -> Fit | None:
        """Requests of ``length`` tokens at a time; None where it would not start."""
        if self.num_blocks is None:
            return None
        sizes = self.num_blocks, self.block_size, self.num_cached_groups, length
        return Fit(
            max_concurrency(*sizes, self.max_num_seqs), max_concurrency(*sizes, self.num_blocks), self.num_blocks
        )


class WhatIf(Protocol):
    def __call__(self, **changes: Any) -> Outcome | None:
        """With other values of vLLM's arguments; None where a start would not get as far as its caches."""


def build(options: argparse.Namespace, rest: list[str]) -> Plan:
    """The plan of ``vllm serve`` with these flags, ``rest`` among them. Raises UsageError where there is no model."""
    from vllm_gaudi.cli import dry_run

    flags = _flags(options, rest)
    device_bytes = CARD_BYTES if options.memory is None else int(options.memory * GIB)

    def start(args: Any) -> Attempt:
        return dry_run.attempt(args, device_bytes, int(options.peak * GIB))

    def what_if(**changes: Any) -> Outcome | None:
        engine = start(dataclasses.replace(repaired.args, **changes)).engine
        return None if engine is None else outcome_of(engine)

    with dry_run.model_directory(options.model) as directory:
        repaired = repair(dry_run.engine_args(directory, flags), start)
        config, engine = repaired.attempt.config, repaired.attempt.engine
        numbers: Numbers | None = None
        advice = repaired.advice
        notes: tuple[str, ...] = ()
        if engine is not None:
            numbers = measure(engine, options.memory is None, what_if)
            advice += advise(numbers, what_if)
            notes = notes_on(numbers, repaired.args.block_size)
        refusals = [
            refusal
            for error in repaired.errors
            for refusal in refusals_of(error, dry_run.message_of(error, directory, options.model))
        ]
    model = model_named(options.model)
    return Plan(
        model=options.model,
        architecture=None if config is None else config.model_config.architecture,
        refusals=tuple(refusals),
        numbers=numbers,
        advice=advice,
        command=serve_command(model, flags, advice),
        placeholder=None if model else f"{PLACEHOLDER}: directory or name of the model whose config {options.model} is",
        notes=notes,
    )


def _flags(options: argparse.Namespace, rest: list[str]) -> list[str]:
    """Of `vllm serve`."""
    flags = ["--tensor-parallel-size", str(options.tp)] if options.tp > 1 else []
    for name in (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
    ):
        if getattr(options, name) is not None:
            flags += ["--" + name.replace("_", "-"), getattr(options, name)]
    return flags + rest


# Refusals


def repair(args: Any, start: Callable[[Any], Attempt]) -> Repaired:
    """Start with ``args`` of vLLM and, where the table refuses them and knows a repair for every row, once more."""
    given = start(args)
    if not isinstance(given.error, capabilities.Refused) or not set(given.error.sentences) <= set(REPAIRS):
        return Repaired(args, given, () if given.error is None else (given.error,), ())
    advice = []
    for name in given.error.sentences:
        row = REPAIRS[name]
        args = dataclasses.replace(args, **row.changes)
        advice.append(Advice(row.add, f"else it is refused ({name})", row.drop))
    again = start(args)
    errors = (given.error,) if again.error is None else (given.error, again.error)
    return Repaired(args, again, errors, tuple(advice))


def refusals_of(error: Exception, message: str) -> tuple[Refusal, ...]:
    """The table's rows, or whatever else stops a start; ``message`` is the error's."""
    if isinstance(error, capabilities.Refused):
        return tuple(Refusal(name, sentence) for name, sentence in error.sentences.items())
    if not isinstance(error, RuntimeError | ValueError):
        message = f"{type(error).__name__}: {message}"
    return (Refusal("start", message),)


# Numbers


def outcome_of(engine: DryRun) -> Outcome:
    step = engine.runner.step
    return Outcome(
        block_size=step.caches.geometry.block_size,
        num_cached_groups=len(step.cached_groups),
        max_num_seqs=engine.runner.max_num_seqs,
        num_blocks=engine.num_blocks,
    )


def measure(engine: DryRun, is_assumed: bool, what_if: WhatIf) -> Numbers:
    """All numbers of a plan; ``is_assumed``: nobody has said how much memory the device has."""
    config, runner, memory = engine.config, engine.runner, engine.worker.memory
    assert memory is not None  # counted before the caches are built
    step = runner.step
    geometry, is_cached = step.caches.geometry, config.cache_config.enable_prefix_caching
    scheduler, model = config.scheduler_config, config.model_config
    layout = getattr(step.store, "layout", None)
    block_bytes = geometry.page_bytes * len(geometry.attention_layers)
    boundary = pool = None
    if layout is not None:
        boundary = Boundary(
            blocks=layout.blocks_per_boundary,
            gdn_blocks=len(layout.group_ids),
            pool_bytes=layout.blocks_per_boundary * block_bytes,
            moved_bytes=layout.checkpoint_bytes,
        )
    if engine.num_blocks is not None:
        pool = Pool(engine.num_blocks, geometry.pool_bytes, (engine.num_blocks - 1) * geometry.block_size)
    length, other = model.max_model_len, what_if(enable_prefix_caching=not is_cached)
    mine, theirs = outcome_of(engine).fit(length), None if other is None else other.fit(length)
    on, off = (mine, theirs) if is_cached else (theirs, mine)
    return Numbers(
        flags=Flags(
            tensor_parallel_size=config.parallel_config.tensor_parallel_size,
            max_model_len=length,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            dtype=_name(model.dtype),
            kv_cache_dtype=config.cache_config.cache_dtype,
            prefix_caching=is_cached,
            retention_interval=config.cache_config.prefix_cache_retention_interval,
        ),
        block=Block(
            tokens=geometry.block_size,
            kernel_block=geometry.kernel_block,
            gdn_chunk=geometry.gdn_chunk,
            attention_layers=len(geometry.attention_layers),
            gdn_groups=tuple(len(names) for names in geometry.gdn_layers),
            page_bytes=geometry.page_bytes,
            block_bytes=block_bytes,
        ),
        state=_state(step.caches, layout) if geometry.gdn_groups else None,
        memory=Memory(
            device=memory.total,
            is_assumed=is_assumed and memory.kv_cache_memory_bytes is None,
            utilization=memory.gpu_memory_utilization,
            given=memory.kv_cache_memory_bytes,
            budget=memory.budget,
            weights=memory.non_kv_cache_memory,
            parameters=engine.num_parameters,
            peak=memory.peak,
            slots=runner.max_num_seqs,
            reserved_rows=NUM_RESERVED_ROWS,
            staging_rows=step.grid.num_staging,
            states=memory.states,
            spare=memory.padding_block,
            available=memory.available,
        ),
        pool=pool,
        boundary=boundary,
        max_concurrency=MaxConcurrency(length, on, off),
    )


def _state(caches: KVCaches, layout: CheckpointLayout | None) -> State:
    shape, page_bytes = caches.state_shape, caches.geometry.page_bytes
    segments = () if layout is None else layout.segments
    return State(
        conv_bytes=shape.conv_words * WORD_BYTES,
        conv_dtype=_name(caches.conv_states[0].dtype),
        ssm_bytes=shape.ssm_words * WORD_BYTES,
        ssm_dtype=_name(caches.ssm_states[0].dtype),
        layer_bytes=shape.num_bytes,
        row_bytes=shape.num_bytes * len(caches.ssm_states),
        page_fill=shape.num_bytes / page_bytes,
        whole_heads=None if layout is None else layout.whole_heads,
        segments=tuple(asdict(segment) for segment in segments),
        per_block_layout_factor=per_block_layout_factor(page_bytes, shape.num_bytes),
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# Advice


def advise(numbers: Numbers, what_if: WhatIf) -> tuple[Advice, ...]:
    """Flags that the command would do better with."""
    flags, block, state = numbers.flags, numbers.block, numbers.state
    advice, changes = [], {}
    if state is not None and state.ssm_dtype != "float32":
        changes["mamba_ssm_cache_dtype"] = "float32"
        other = what_if(**changes)
        grown = "B grows with it" if other is None else f"B is {other.block_size:,} with it"
        advice.append(
            Advice(
                ("--mamba-ssm-cache-dtype", "float32"),
                f"the model's config does not ask for it, so the state would be kept in {state.ssm_dtype}; {grown}",
                drop=("--mamba-ssm-cache-dtype",),
            )
        )
    if state is not None and flags.max_num_batched_tokens - flags.max_num_seqs < block.gdn_chunk:
        advice.append(
            Advice(
                ("--max-num-batched-tokens", str(block.gdn_chunk + flags.max_num_seqs)),
                "at least: else prefills may wait for decodes",
                drop=("--max-num-batched-tokens",),
            )
        )
    if state is not None and flags.prefix_caching:
        advice.append(
            Advice(("--enable-prompt-tokens-details",), "answers tell how many tokens were reused (cached_tokens)")
        )
    if numbers.pool is None:
        for ranks in MORE_RANKS:
            if ranks <= flags.tensor_parallel_size:
                continue
            other = what_if(tensor_parallel_size=ranks, **changes)
            if other is not None and other.num_blocks is not None:
                advice.append(
                    Advice(
                        ("--tensor-parallel-size", str(ranks)),
                        "the fewest ranks of 2, 4, 8 and 16 that leave room for one request of full length",
                        drop=("--tensor-parallel-size",),
                    )
                )
                break
    return tuple(advice)


def notes_on(numbers: Numbers, block_size: int | None) -> tuple[str, ...]:
    """What no flag mends by itself; ``block_size`` as given, None where vLLM chooses it."""
    flags, block, state = numbers.flags, numbers.block, numbers.state
    notes = []
    if state is not None and flags.prefix_caching and flags.max_model_len <= block.tokens:
        notes.append(
            f"no prompt can hit: --max-model-len {flags.max_model_len} is not longer than a block of "
            f"{block.tokens} tokens"
        )
    fit = numbers.max_concurrency.caching_on if flags.prefix_caching else numbers.max_concurrency.caching_off
    if state is not None and flags.max_num_seqs > 1 and (fit is None or flags.max_num_seqs > 2 * fit.in_pool):
        holds = "" if fit is None else f", and the pool holds {fit.in_pool:,.1f} requests of full length"
        notes.append(
            f"a slot takes {format_bytes(state.row_bytes)}, used or not: --max-num-seqs {flags.max_num_seqs} takes "
            f"{format_bytes(state.row_bytes * flags.max_num_seqs)}{holds}"
        )
    if block_size and block_size % MAX_KERNEL_BLOCK:
        notes.append(
            f"on a Gaudi a block is a multiple of {MAX_KERNEL_BLOCK} tokens; there --block-size {block_size} is refused"
        )
    return tuple(notes)


def model_named(given: str) -> str | None:
    """What `vllm serve` can be given for ``given``: its directory; None for a lone file, which is no model."""
    path = Path(given)
    if path.name == "config.json":
        return str(path.parent)
    return None if path.is_file() else given


def serve_command(model: str | None, flags: Sequence[str], advice: Sequence[Advice]) -> str:
    """`vllm serve` with the flags as given, and what is advised; without ``model`` a placeholder."""
    mended = list(flags)
    for one in advice:
        for name in one.drop:
            mended = list(_without(mended, name))
        if one.flags and one.flags[0] not in mended:
            mended += one.flags
    return shlex.join(["vllm", "serve", model or PLACEHOLDER, *mended])


def _without(flags: Sequence[str], name: str) -> Iterator[str]:
    """``flags`` without ``name`` and its value or values."""
    is_dropping = False
    for flag in flags:
        if flag.startswith("-"):
            is_dropping = flag == name or flag.startswith(name + "=")
        if not is_dropping:
            yield flag
