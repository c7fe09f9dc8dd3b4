# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve`` and a multi-turn chat against ``vllm serve``, caching on beside caching off.

    python -m benchmarks serve

Owns: the loads, in units of B; the table, in the words of vLLM's own benchmark, so that its numbers can be set beside
others'. Two servers run through the whole benchmark, one with caching and one without, and one of them is asked at a
time, in turns. A load has prompts of its own at every repeat, so it finds nothing that an earlier one has left. Needs
no network. Never asserts a number.

Ordering rule: whatever happens after the servers were started, their process groups are gone before this ends.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import workloads
from benchmarks.engines import CHECKPOINTS, SIZES, Size, environment, flags_for, use_environment_here
from benchmarks.report import OUT, machine, percentile, relative, shown, spread
from benchmarks.worker import Session, Turn
from tools import demo

CACHING = {"off": "--no-enable-prefix-caching", "on": "--enable-prefix-caching"}
CONCURRENCY = 8
"""Requests in flight at most, and the server's --max-num-seqs."""


@dataclass(frozen=True)
class PrefixRepetition:
    """vLLM's dataset of that name: ``num_prompts`` in random order, as many with each prefix. Lengths in tokens."""

    prefix_len: int
    suffix_len: int
    output_len: int
    num_prefixes: int
    num_prompts: int

    @classmethod
    def of(cls, block_size: int) -> PrefixRepetition:
        return cls(8 * block_size, 2 * block_size, block_size // 2, num_prefixes=5, num_prompts=40)

    def options(self) -> list[str]:
        """Of ``vllm bench serve``, but for the server, the model and the seed."""
        return [
            *("--dataset-name", "prefix_repetition", "--num-prompts", str(self.num_prompts)),
            *("--prefix-repetition-prefix-len", str(self.prefix_len)),
            *("--prefix-repetition-suffix-len", str(self.suffix_len)),
            *("--prefix-repetition-num-prefixes", str(self.num_prefixes)),
            *("--prefix-repetition-output-len", str(self.output_len)),
            *("--max-concurrency", str(CONCURRENCY), "--temperature", "0", "--ignore-eos"),
        ]

    def sessions(self) -> list[Session]:
        """Prompts of the same shape: what the pool is sized for."""
        prefixes = [[n] * self.prefix_len for n in range(self.num_prefixes)]
        suffixes = ([-1 - n] * self.suffix_len for n in range(self.num_prompts))
        return [
            Session([Turn(prefixes[n % self.num_prefixes] + suffix, self.output_len)])
            for n, suffix in enumerate(suffixes)
        ]


# The server


def serve_options(size: Size, checkpoint: Path, port: int, caching: str) -> list[str]:
    """Of ``vllm serve``: an eager engine whose pool holds each load."""
    block_size = size.block_size or size.peer_block_size
    loads = [chat_of(size, 0), PrefixRepetition.of(block_size).sessions()]
    flags = flags_for(loads, block_size, pool=None, budget=4, max_num_seqs=CONCURRENCY)
    options = [str(checkpoint), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", size.name]
    options += ["--dtype", "float32", CACHING[caching], "--block-size", str(block_size), "--enforce-eager"]
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"):
        options += ["--" + name.replace("_", "-"), str(flags[name])]
    return options


def chat_of(size: Size, seed: int) -> list[Session]:
    return workloads.make("chat", size.block_size or size.peer_block_size, size.vocabulary, seed, size.scale)


@contextlib.contextmanager
def serving(commands: Mapping[str, tuple[list[str], int]], logs: Path) -> Iterator[dict[str, str]]:
    """Starts all servers at once; their URLs, by the same names, once each of them is healthy."""
    variables = [f"{name}={value}" for name, value in environment(multiprocessing=True).items()]
    vllm = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    servers: dict[str, demo.Server] = {}
    try:
        for name, (options, port) in commands.items():
            log = logs / f"serve-{name}.log"
            servers[name] = demo.Server(["env", *variables, *vllm, "serve", *options], port, log)
        for name, server in servers.items():
            try:
                server.wait_until_healthy(every=float("inf"))
            except demo.PhaseFailed as error:
                last = "\n".join(f"  | {line}" for line in server.last_lines(demo.FAILURE_LINES))
                raise RuntimeError(f"caching {name}: {error}; see {server.log_path}\n{last}") from error
        yield {name: server.url for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()


# The loads


@dataclass(frozen=True)
class Server:
    """Where a model is served, under which name, and where its tokenizer is."""

    url: str
    model: str
    checkpoint: Path


def bench_options(load: PrefixRepetition, server: Server, seed: int) -> list[str]:
    """All of ``vllm bench serve``; no request comes before the measured ones."""
    where = ["--backend", "openai", "--base-url", server.url, "--model", server.model]
    where += ["--tokenizer", str(server.checkpoint), "--ready-check-timeout-sec", "0"]
    return [*where, *load.options(), "--seed", str(seed), "--disable-tqdm"]


def prefix_repetition(load: PrefixRepetition, server: Server, seed: int, log: Path) -> dict[str, float]:
    """One ``vllm bench serve``, in this process; what it prints goes to ``log``."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = parser.parse_args(bench_options(load, server, seed))
    with log.open("a") as file, contextlib.redirect_stdout(file):
        result = main(options)
    if result["completed"] != load.num_prompts:
        raise RuntimeError(f"{result['completed']} of {load.num_prompts} requests were answered; see {log}")
    return {
        "requests/s": result["request_throughput"],
        "output tokens/s": result["output_throughput"],
        "ttft median": result["median_ttft_ms"] / 1000,
        "ttft p99": result["p99_ttft_ms"] / 1000,
    }


def ask(server: Server, prompt: Sequence[int], answer: int) -> tuple[float, list[int]]:
    """Seconds to the first token of a streamed completion, and its tokens."""
    body = {"model": server.model, "prompt": list(prompt), "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    began, first = time.perf_counter(), None
    tokens: list[int] = []
    with _open(f"{server.url}/v1/completions", json.dumps(body).encode()) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(f"{server.url}: {event['error']}")
            for choice in event["choices"]:
                tokens += choice["token_ids"] or ()
            if first is None and tokens:
                first = time.perf_counter() - began
    if first is None or len(tokens) != answer:
        raise RuntimeError(f"{server.url}: {len(tokens)} of {answer} tokens were answered")
    return first, tokens


def multi_turn(sessions: Sequence[Session], server: Server) -> dict[str, float]:
    """Several sessions at a time; each asks its next turn, on all that was said so far, when it has its answer."""

    def talk(session: Session) -> list[float]:
        said: list[int] = []
        firsts = []
        for turn in session.turns:
            said += turn.new
            first, tokens = ask(server, said, turn.answer)
            said += tokens
            firsts.append(first)
        return firsts

    began = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        firsts = [first for found in pool.map(talk, sessions) for first in found]
    took = time.perf_counter() - began
    return {
        "requests/s": len(firsts) / took,
        "output tokens/s": sum(turn.answer for session in sessions for turn in session.turns) / took,
        "ttft median": statistics.median(firsts),
        "ttft p99": percentile(firsts, 0.99),
    }


def counted(server: Server, run: Callable[[Server], dict[str, float]]) -> dict[str, float]:
    """What ``run`` measures, and the share of its prompt tokens that the server found in its cache."""
    before = counters(server)
    measured = run(server)
    prompts, hits = (after - was for after, was in zip(counters(server), before, strict=True))
    return {**measured, "hit": hits / prompts}


def counters(server: Server) -> tuple[float, float]:
    """Tokens of all prompts that the server has had, and of all hits."""
    with _open(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    names = ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total")
    prompts, hits = (
        sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M))) for name in names
    )
    return prompts, hits


def _open(url: str, data: bytes | None = None) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine's own address needs no proxy
    return opener.open(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=600)


# The run


def measure(
    servers: Mapping[str, Server], size: Size, repeats: int, log: Path, progress: tqdm
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """By load and caching, what each repeat gave; a first, short one of all is left out."""
    load = PrefixRepetition.of(size.block_size or size.peer_block_size)
    short = PrefixRepetition(load.prefix_len, load.suffix_len, load.output_len, 1, 2)
    for server in servers.values():
        prefix_repetition(short, server, repeats, log)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for repeat in range(repeats):
        runs: dict[str, Callable[[Server], dict[str, float]]] = {
            "prefix_repetition": functools.partial(prefix_repetition, load, seed=repeat, log=log),
            "multi-turn chat": functools.partial(multi_turn, chat_of(size, repeat)),
        }
        for name, run in runs.items():
            by_caching = found.setdefault(name, {caching: [] for caching in servers})
            for caching in list(servers)[:: 1 if repeat % 2 == 0 else -1]:
                progress.set_postfix_str(f"{name}, caching {caching}")
                by_caching[caching].append(counted(servers[caching], run))
                progress.update()
    return found


TABLE = (
    ("requests/s", "requests/s", "tenths"),
    ("output tokens/s", "output tokens/s", "rate"),
    ("TTFT median, ms", "ttft median", "ms"),
    ("TTFT p99, ms", "ttft p99", "ms"),
    ("hit, % of prompt tokens", "hit", "share"),
)


def markdown(results: dict[str, Any]) -> str:
    lines = [
        f"{results['machine']}; {results['load']}; {results['command']}",
        "",
        *(f"    {line}" for line in results["commands"]),
        "",
        "| load | caching | " + " | ".join(title for title, _, _ in TABLE) + " |",
        "| --- | --- |" + " ---: |" * len(TABLE),
    ]
    for name, by_caching in results["loads"].items():
        for caching, measured in by_caching.items():
            cells = [shown(spread([one[key] for one in measured]), unit) for _, key, unit in TABLE]
            lines.append(f"| {name} | {caching} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="the model")
    parser.add_argument("--repeats", type=int, default=3, help="of each load on each server")
    parser.add_argument("--out", type=Path, default=OUT, help="directory for JSON, table and logs")


def run(options: argparse.Namespace) -> None:
    use_environment_here()
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"  # vLLM's client would use a proxy
    from vllm_gaudi import device
    from vllm_gaudi.testing import checkpoints

    options.out.mkdir(parents=True, exist_ok=True)
    size = SIZES[options.size]
    checkpoint = checkpoints.build(size.checkpoint, "float32", CHECKPOINTS)
    ports = {caching: demo.free_port() for caching in CACHING}
    commands = {caching: (serve_options(size, checkpoint, port, caching), port) for caching, port in ports.items()}
    log = options.out / "serve-client.log"
    log.unlink(missing_ok=True)
    loads = [os.getloadavg()[0]]
    with tqdm(total=4 * options.repeats, unit="run", desc="Serve") as progress:
        progress.set_postfix_str("starting the servers")
        with serving(commands, options.out) as urls:
            served = {caching: Server(url, size.name, checkpoint) for caching, url in urls.items()}
            found = measure(served, size, options.repeats, log, progress)
    loads.append(os.getloadavg()[0])
    load = PrefixRepetition.of(size.block_size or size.peer_block_size)
    results = {
        "machine": f"device {device.device_type()}, {machine()}",
        "load": f"load {loads[0]:.1f} before and {loads[1]:.1f} after",
        "command": options.command,
        "commands": [
            " ".join(["vllm serve", size.checkpoint, *commands["on"][0][7:]]),
            " ".join(["vllm bench serve", *load.options()]),
        ],
        "loads": found,
    }
    (options.out / "serve.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "serve.md").write_text(markdown(results))
    print(markdown(results))
    print(relative(options.out / "serve.json"))
