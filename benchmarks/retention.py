# SPDX-License-Identifier: Apache-2.0
"""What each retention interval keeps, on conversations as chats and agents hold them: hit tokens of reachable ones.

    python -m benchmarks retention [--seeds 3]

Owns: the workloads, in units of B; vLLM's scheduler runs them without a model, on pools that hold a part of what an
unlimited cache would. Reachable: what such a cache would have reused on the same block grid. Prints a Markdown table,
median over the seeds with the smallest and largest. Never asserts a number.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from tqdm import tqdm

from benchmarks.engines import CHECKPOINTS, use_environment_here
from benchmarks.workloads import boundaries

if TYPE_CHECKING:
    from vllm_gaudi.testing.model_free import ModelFree, Turn

B = 16
INTERVALS = {"retention 0": 0, "retention 4 B": 4 * B, "retention None": None}
POOLS = (0.6, 1.0, 1.2, 1.5)
"""Blocks of the pool, as a share of what attention and one checkpoint per conversation take at the end."""

Session = list[tuple[list[int], list[int]]]  # per turn: new prompt tokens, answer tokens


def text(source: random.Random, blocks: float) -> list[int]:
    return [source.randrange(10, 30000) for _ in range(max(1, round(blocks * B)))]


def chat(source: random.Random) -> list[Session]:
    """Twelve users, eight turns each, a short shared system prompt."""
    system = text(source, 0.6)
    return [
        [
            (
                (system if turn == 0 else []) + text(source, source.uniform(0.1, 1.5)),
                text(source, source.uniform(0.2, 1.5)),
            )
            for turn in range(8)
        ]
        for _ in range(12)
    ]


def agent(source: random.Random) -> list[Session]:
    """Six agents on one system prompt of 3 B tokens, thirty turns of tool output of log-normal length."""
    system = text(source, 3.2)
    return [
        [
            ((system if turn == 0 else []) + text(source, source.lognormvariate(-0.7, 0.9)), text(source, 0.25))
            for turn in range(30)
        ]
        for _ in range(6)
    ]


def alternate(source: random.Random) -> list[Session]:
    """Four long documents, each asked about ten times in turns."""
    return [
        [((text(source, 12) if turn == 0 else []) + text(source, 0.5), text(source, 0.7)) for turn in range(10)]
        for _ in range(4)
    ]


def fork(source: random.Random) -> list[Session]:
    """Three documents of 4.6 B tokens, sixteen unrelated questions to each."""
    documents = [text(source, 4.6) for _ in range(3)]
    return [[(document + text(source, 0.7), text(source, 0.5))] for _ in range(16) for document in documents]


def groups(source: random.Random) -> list[Session]:
    """Eight prefixes of 2.84 B tokens, eight prompts with each, in random order."""
    prefixes = [text(source, 2.84) for _ in range(8)]
    sessions = [[(prefix + text(source, 1.33), text(source, 0.2))] for prefix in prefixes for _ in range(8)]
    source.shuffle(sessions)
    return sessions


WORKLOADS: dict[str, Callable[[random.Random], list[Session]]] = {
    workload.__name__: workload for workload in (chat, agent, alternate, fork, groups)
}


def needed_blocks(sessions: list[Session], num_groups: int) -> int:
    """Blocks that all conversations take when they have ended: attention of distinct prefixes, one checkpoint each."""
    seen: set[tuple[int, ...]] = set()
    for session in sessions:
        whole: list[int] = []
        for new, answer in session:
            whole = whole + new + answer
        seen.update(boundaries(whole, len(whole), B))
    return len(seen) + len(sessions) * (num_groups - 1)


def play(bench: ModelFree, sessions: list[Session]) -> tuple[int, int]:
    """Turn by turn over all sessions, two requests at a time; returns hit and reachable tokens."""
    histories: list[list[int]] = [[] for _ in sessions]
    seen: set[tuple[int, ...]] = set()
    played: list[Turn] = []
    reachable = 0
    for turn in range(max(len(session) for session in sessions)):
        running: list[tuple[int, Turn]] = []
        for n, session in enumerate(sessions):
            if turn < len(session):
                new, answer = session[turn]
                request = bench.add(histories[n] + new, answer)
                for _, twin in running:
                    seen.update(boundaries(twin.prompt, len(twin.prompt), B))
                ends = boundaries(request.prompt, len(request.prompt) - 1, B)
                reachable += max((len(prefix) for prefix in ends if prefix in seen), default=0)
                played.append(request)
                # Two in flight: the next one comes while this one is being answered.
                running.append((n, request))
                if len(running) == 2:
                    bench.run()
                    running = _settle(running, histories, seen)
        bench.run()
        _settle(running, histories, seen)
    return sum(request.hit or 0 for request in played), reachable


def _settle(running: list[tuple[int, Turn]], histories: list[list[int]], seen: set[tuple[int, ...]]) -> list:
    for n, request in running:
        histories[n] = request.prompt + request.answer
        seen.update(boundaries(histories[n], len(histories[n]) - 1, B))
    return []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="runs of each workload")


def run(options: argparse.Namespace) -> None:
    use_environment_here()
    from vllm_gaudi.testing import checkpoints
    from vllm_gaudi.testing.engine import engine
    from vllm_gaudi.testing.model_free import ModelFree

    rows = []
    path = checkpoints.build("q35_dense", "float32", CHECKPOINTS)
    with engine(path, enable_prefix_caching=True, block_size=B, max_model_len=4096) as serving:
        num_groups = serving.runner.caches.geometry.num_groups
        for name in tqdm(WORKLOADS, desc="Workloads", unit="workload"):
            for share in POOLS:
                row = {}
                for label, interval in INTERVALS.items():
                    ratios = []
                    for seed in range(options.seeds):
                        sessions = WORKLOADS[name](random.Random(seed))
                        longest = max(sum(len(t) for turn in session for t in turn) for session in sessions)
                        room = int(share * needed_blocks(sessions, num_groups))
                        num_blocks = max(room, 2 * (longest // B + num_groups)) + 1  # two run at a time
                        bench = ModelFree(serving, num_blocks, interval)
                        hit, reachable = play(bench, sessions)
                        ratios.append(hit / reachable)
                    row[label] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
                rows.append((name, share, row))
    print("| workload | pool / need | " + " | ".join(INTERVALS) + " |")
    print("|---|---:|" + "---:|" * len(INTERVALS))
    for name, share, row in rows:
        print(f"| {name} | {share} | " + " | ".join(row.values()) + " |")
