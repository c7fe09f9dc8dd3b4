# SPDX-License-Identifier: Apache-2.0
"""What each retention interval keeps, on conversations as chats and agents hold them: hit tokens of reachable ones.

    python -m benchmarks retention [--seeds 3]

Owns: the pools and the order of requests: turn by turn over all sessions, two requests at a time, without gaps. vLLM's
scheduler runs the workloads without a model, on pools that hold a part of what an unlimited cache would. Reachable:
what such a cache would have reused on the same block grid. Prints a Markdown table, median over the seeds with the
smallest and largest. Never asserts a number.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import TYPE_CHECKING

from tqdm import tqdm

from benchmarks import workloads
from benchmarks.engines import CHECKPOINTS, use_environment_here
from benchmarks.workloads import Session, Texts, boundaries

if TYPE_CHECKING:
    from vllm_gaudi.testing.model_free import ModelFree, Turn

B = 16
VOCABULARY = 30000
INTERVALS = {"retention 0": 0, "retention 4 B": 4 * B, "retention None": None}
POOLS = (0.6, 1.0, 1.2, 1.5)
"""Blocks of the pool, as a share of what attention and one checkpoint per conversation take at the end."""
NAMES = ("chat", "agent", "alternate-4", "fork", "groups")


def play(bench: ModelFree, sessions: list[Session], answers: Texts) -> tuple[int, int]:
    """Turn by turn over all sessions, two requests at a time; returns hit and reachable tokens.

    ``answers`` makes up what the model says; a turn that asks for several answers is played as one.
    """
    histories: list[list[int]] = [[] for _ in sessions]
    seen: set[tuple[int, ...]] = set()
    played: list[Turn] = []
    reachable = 0
    for number in range(max(len(session.turns) for session in sessions)):
        running: list[tuple[int, Turn]] = []
        for n, session in enumerate(sessions):
            if number < len(session.turns):
                turn = session.turns[number]
                request = bench.add(histories[n] + turn.new, answers.tokens(turn.answer / B))
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
        num_gdn_groups = len(serving.runner.step.caches.geometry.gdn_groups)
        for name in tqdm(NAMES, desc="Workloads", unit="workload"):
            for share in POOLS:
                row = {}
                for label, interval in INTERVALS.items():
                    ratios = []
                    for seed in range(options.seeds):
                        sessions = workloads.make(name, B, VOCABULARY, seed, 1.0)
                        room = int(share * workloads.needed_blocks(sessions, B, num_gdn_groups))
                        least = 2 * (workloads.longest(sessions) // B + 1 + num_gdn_groups)  # two run at a time
                        bench = ModelFree(serving, max(room, least) + 1, interval)
                        hit, reachable = play(bench, sessions, Texts(B, VOCABULARY, random.Random(seed)))
                        ratios.append(hit / reachable)
                    row[label] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
                rows.append((name, share, row))
    print("| workload | pool / need | " + " | ".join(INTERVALS) + " |")
    print("|---|---:|" + "---:|" * len(INTERVALS))
    for name, share, row in rows:
        print(f"| {name} | {share} | " + " | ".join(row.values()) + " |")
