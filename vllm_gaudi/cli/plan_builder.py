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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

MORE_RANKS = (2, 4, 8, 16)


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


def build(options: argparse.Namespace, rest: list[str]) -> Plan:
    """The plan of ``vllm serve`` with these flags, ``rest`` among them. Raises UsageError where there is no model."""
    from vllm_gaudi.cli import dry_run

    flags = _flags(options, rest)
    with dry_run.model_directory(options.model) as directory:
        return _PlanBuilder(options, flags, directory).plan()


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


class _PlanBuilder:
    def __init__(self, options: argparse.Namespace, flags: list[str], directory: Path):
        from vllm_gaudi.cli import dry_run

        self._dry_run = dry_run
        self._given = options.model
        self._flags = flags
        self._directory = directory
        self._is_assumed = options.memory is None
        self._device_bytes = CARD_BYTES if options.memory is None else int(options.memory * GIB)
        self._peak = int(options.peak * GIB)
        self._args = dry_run.engine_args(directory, flags)
        self._refusals: list[Refusal] = []
        self._advice: list[Advice] = []
        self._notes: list[str] = []

    def plan(self) -> Plan:
        config = self._configured()
        engine = None if config is None else self._engine(config)
        numbers = None if engine is None else self._numbers(engine)
        if engine is not None and numbers is not None:
            self._advise(engine, numbers)
        return Plan(
            model=self._given,
            architecture=None if config is None else config.model_config.architecture,
            refusals=tuple(self._refusals),
            numbers=numbers,
            advice=tuple(self._advice),
            command=self._command(),
            notes=tuple(self._notes),
        )

    def _configured(self) -> Any:
        """vLLM's configuration, repaired where the table refuses it and knows how; None where it does not."""
        try:
            return self._dry_run.configuration(self._args)
        except capabilities.Refused as refused:
            self._refusals += [Refusal(name, sentence) for name, sentence in refused.sentences.items()]
            if not set(refused.sentences) <= set(REPAIRS):
                return None
            for name in refused.sentences:
                repair = REPAIRS[name]
                self._args = dataclasses.replace(self._args, **repair.changes)
                self._advice.append(Advice(repair.add, f"else it is refused ({name})", repair.drop))
            try:
                return self._dry_run.configuration(self._args)
            except Exception as error:  # noqa: BLE001
                self._refuse(error)
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
        return None

    def _engine(self, config: Any) -> Any:
        """A dry run; None where a start would not get as far as its caches."""
        try:
            engine = self._dry_run.DryRun(config, self._device_bytes, self._peak)
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
            return None
        if engine.problem is not None:
            self._refuse(engine.problem)
        return engine

    def _refuse(self, error: Exception) -> None:
        """Whatever stops a dry run would stop a start: it runs the start's own code."""
        from vllm_gaudi.cli import UsageError

        if isinstance(error, UsageError):
            raise error
        sentence = self._dry_run.message_of(error, self._directory, self._given)
        if not isinstance(error, RuntimeError | ValueError):
            sentence = f"{type(error).__name__}: {sentence}"
        self._refusals.append(Refusal("start", sentence))

    def _other(self, **changes: Any) -> Any:
        """A dry run with other arguments, with its problem; None where there is not even that."""
        try:
            config = self._dry_run.configuration(dataclasses.replace(self._args, **changes))
            return self._dry_run.DryRun(config, self._device_bytes, self._peak)
        except Exception:  # noqa: BLE001
            return None

    def _starts(self, **changes: Any) -> bool:
        engine = self._other(**changes)
        return engine is not None and engine.problem is None

    def _numbers(self, engine: Any) -> Numbers:
        config, runner, memory = engine.config, engine.runner, engine.worker.memory
        geometry, is_cached = runner.step.caches.geometry, config.cache_config.enable_prefix_caching
        scheduler, model = config.scheduler_config, config.model_config
        length = model.max_model_len
        flags = Flags(
            tensor_parallel_size=config.parallel_config.tensor_parallel_size,
            max_model_len=length,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            dtype=_name(model.dtype),
            kv_cache_dtype=config.cache_config.cache_dtype,
            prefix_caching=is_cached,
            retention_interval=config.cache_config.prefix_cache_retention_interval,
        )
        block = Block(
            tokens=geometry.block_size,
            kernel_block=geometry.kernel_block,
            gdn_chunk=geometry.gdn_chunk,
            attention_layers=len(geometry.attention_layers),
            gdn_groups=tuple(len(names) for names in geometry.gdn_layers),
            page_bytes=geometry.page_bytes,
            block_bytes=geometry.page_bytes * len(geometry.attention_layers),
        )
        state = _state(engine) if geometry.gdn_groups else None
        layout = getattr(runner.step.store, "layout", None)
        boundary = None
        if layout is not None:
            boundary = Boundary(
                blocks=layout.blocks_per_boundary,
                gdn_blocks=len(layout.group_ids),
                pool_bytes=layout.blocks_per_boundary * block.block_bytes,
                moved_bytes=layout.checkpoint_bytes,
            )
        pool = None
        if engine.num_blocks is not None:
            pool = Pool(engine.num_blocks, geometry.pool_bytes, (engine.num_blocks - 1) * geometry.block_size)
        other = self._other(enable_prefix_caching=not is_cached)
        mine, theirs = _fits(engine, length), _fits(other, length)
        on, off = (mine, theirs) if is_cached else (theirs, mine)
        return Numbers(
            flags=flags,
            block=block,
            state=state,
            memory=Memory(
                device=memory.total,
                is_assumed=self._is_assumed and memory.kv_cache_memory_bytes is None,
                utilization=memory.gpu_memory_utilization,
                given=memory.kv_cache_memory_bytes,
                budget=memory.budget,
                weights=memory.non_kv_cache_memory,
                parameters=engine.num_parameters,
                peak=memory.peak,
                slots=runner.max_num_seqs,
                reserved_rows=NUM_RESERVED_ROWS,
                staging_rows=runner.step.grid.num_staging,
                states=memory.states,
                spare=memory.padding_block,
                available=memory.available,
            ),
            pool=pool,
            boundary=boundary,
            max_concurrency=MaxConcurrency(length, on, off),
        )

    def _advise(self, engine: Any, numbers: Numbers) -> None:
        flags, block, state, memory = numbers.flags, numbers.block, numbers.state, numbers.memory
        changes: dict[str, Any] = {}
        if state is not None and state.ssm_dtype != "float32":
            changes["mamba_ssm_cache_dtype"] = "float32"
            other = self._other(**changes)
            grown = (
                "B grows with it" if other is None else f"B is {other.runner.step.caches.geometry.block_size:,} with it"
            )
            self._advice.append(
                Advice(
                    ("--mamba-ssm-cache-dtype", "float32"),
                    f"the model's config does not ask for it, so the state would be kept in {state.ssm_dtype}; {grown}",
                    drop=("--mamba-ssm-cache-dtype",),
                )
            )
        if state is not None and flags.max_num_batched_tokens - flags.max_num_seqs < block.gdn_chunk:
            self._advice.append(
                Advice(
                    ("--max-num-batched-tokens", str(block.gdn_chunk + flags.max_num_seqs)),
                    "at least: else prefills may wait for decodes",
                    drop=("--max-num-batched-tokens",),
                )
            )
        if state is not None and flags.prefix_caching:
            self._advice.append(
                Advice(("--enable-prompt-tokens-details",), "answers tell how many tokens were reused (cached_tokens)")
            )
            if flags.max_model_len <= block.tokens:
                self._notes.append(
                    f"no prompt can hit: --max-model-len {flags.max_model_len} is not longer than a block of "
                    f"{block.tokens} tokens"
                )
        if memory.available <= 0 or numbers.pool is None:
            for ranks in MORE_RANKS:
                if ranks > flags.tensor_parallel_size and self._starts(tensor_parallel_size=ranks, **changes):
                    self._advice.append(
                        Advice(
                            ("--tensor-parallel-size", str(ranks)),
                            "the fewest ranks of 2, 4, 8 and 16 that leave room for one conversation of full length",
                            drop=("--tensor-parallel-size",),
                        )
                    )
                    break
        fit = numbers.max_concurrency.caching_on if flags.prefix_caching else numbers.max_concurrency.caching_off
        if state is not None and flags.max_num_seqs > 1 and (fit is None or flags.max_num_seqs > 2 * fit.in_pool):
            holds = "" if fit is None else f", and the pool holds {fit.in_pool:,.1f} requests of full length"
            self._notes.append(
                f"a slot takes {format_bytes(state.row_bytes)}, used or not: --max-num-seqs {flags.max_num_seqs} takes "
                f"{format_bytes(state.row_bytes * flags.max_num_seqs)}{holds}"
            )
        asked = self._args.block_size or 0
        if asked % MAX_KERNEL_BLOCK:
            self._notes.append(
                f"on a Gaudi a block is a multiple of {MAX_KERNEL_BLOCK} tokens; there --block-size {asked} is refused"
            )

    def _command(self) -> str:
        flags = list(self._flags)
        for advice in self._advice:
            for name in advice.drop:
                flags = list(_without(flags, name))
            if advice.flags and advice.flags[0] not in flags:
                flags += advice.flags
        path = Path(self._given)
        model = str(path.parent) if path.name == "config.json" else self._given
        return shlex.join(["vllm", "serve", model, *flags])


def _without(flags: list[str], name: str) -> Iterator[str]:
    """``flags`` without ``name`` and its value or values."""
    is_dropping = False
    for flag in flags:
        if flag.startswith("-"):
            is_dropping = flag == name or flag.startswith(name + "=")
        if not is_dropping:
            yield flag


def _fits(engine: Any, length: int) -> Fit | None:
    """MaxConcurrency of ``length`` tokens; None where it would not start."""
    if engine is None or engine.num_blocks is None:
        return None
    runner = engine.runner
    sizes = engine.num_blocks, runner.step.caches.geometry.block_size, len(runner.step.cached_groups), length
    return Fit(
        max_concurrency(*sizes, runner.max_num_seqs), max_concurrency(*sizes, engine.num_blocks), engine.num_blocks
    )


def _state(engine: Any) -> State:
    caches, layout = engine.runner.step.caches, getattr(engine.runner.step.store, "layout", None)
    shape, page_bytes = caches.state_shape, caches.geometry.page_bytes
    num_layers = len(caches.ssm_states)
    segments = () if layout is None else layout.segments
    return State(
        conv_bytes=shape.conv_words * WORD_BYTES,
        conv_dtype=_name(caches.conv_states[0].dtype),
        ssm_bytes=shape.ssm_words * WORD_BYTES,
        ssm_dtype=_name(caches.ssm_states[0].dtype),
        layer_bytes=shape.num_bytes,
        row_bytes=shape.num_bytes * num_layers,
        page_fill=shape.num_bytes / page_bytes,
        whole_heads=None if layout is None else layout.whole_heads,
        segments=tuple(asdict(segment) for segment in segments),
        per_block_layout_factor=per_block_layout_factor(page_bytes, shape.num_bytes),
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
