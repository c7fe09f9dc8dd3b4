# SPDX-License-Identifier: Apache-2.0
"""What prefix caching costs where it does not help: the same work with caching on and off, alternating, in one process.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python benchmarks/bench_caching_cost.py [--repeats 5]

Owns: two loads on the tiny GDN hybrid, decoding one prompt and prefilling prompts that nobody has sent before. Prints
the ratio of the times, on to off (1.0: caching is free), median over the repeats with the smallest and largest. Never
asserts a time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from vllm_gaudi.testing import checkpoints
from vllm_gaudi.testing.engine import Engine, engine, greedy

DECODED = 200  # tokens
PROMPTS, PROMPT_TOKENS = 6, 400


def decode(serving: Engine, source: random.Random) -> None:
    serving.generate([[source.randrange(10, 500) for _ in range(20)]], greedy(DECODED))


def prefill(serving: Engine, source: random.Random) -> None:
    for _ in range(PROMPTS):
        serving.generate([[source.randrange(10, 500) for _ in range(PROMPT_TOKENS)]], greedy(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="engines of each kind")
    repeats = parser.parse_args().repeats
    seconds: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = checkpoints.build("q35_dense", "float32", Path(directory))
        for number in tqdm(range(2 * repeats), desc="Engines", unit="engine"):
            caching = bool(number % 2)
            with engine(path, enable_prefix_caching=caching, block_size=64) as serving:
                for load in (decode, prefill):
                    source = random.Random(number // 2)
                    load(serving, source)  # warms what is warmed by use
                    start = time.perf_counter()
                    load(serving, source)
                    seconds.setdefault((load.__name__, caching), []).append(time.perf_counter() - start)
    print("| load | time with caching / without |")
    print("|---|---:|")
    for load in (decode, prefill):
        pairs = zip(seconds[load.__name__, True], seconds[load.__name__, False], strict=True)
        ratios = [on / off for on, off in pairs]
        print(f"| {load.__name__} | {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) |")


if __name__ == "__main__":
    main()
