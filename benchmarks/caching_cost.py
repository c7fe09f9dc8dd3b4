# SPDX-License-Identifier: Apache-2.0
"""What prefix caching costs where it does not help: the same work with caching on and off, alternating, in one process.

    OMP_NUM_THREADS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_SKIP_WARMUP=1 python -m benchmarks.caching_cost

Owns: loads on GDN hybrids where nothing is ever hit: decoding one prompt, and prefilling prompts that nobody has sent
before under budgets that are a multiple of B and that are not. Caching is on with dense retention, so every boundary
is saved. Prints throughput with caching as a share of throughput without (1.00: caching is free): the median of the
pairs of neighbouring runs, with the smallest and largest. Time is CPU time of the process, which another load on the
machine disturbs less than the clock on the wall. Never asserts a time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from vllm_gaudi.testing import checkpoints
from vllm_gaudi.testing.engine import Engine, engine, greedy

BUDGETS = (1.0, 2.0, 2.3)
"""Tokens of --max-num-batched-tokens, in B."""


@dataclass(frozen=True)
class Load:
    """One model's work. ``prompt_blocks``: length of a cold prompt, in B."""

    model: str
    block_size: int | None
    prompts: int
    prompt_blocks: float
    decoded: int  # tokens


LOADS = (
    Load("q35_dense", 64, prompts=12, prompt_blocks=7.4, decoded=200),
    Load("q35_small", None, prompts=3, prompt_blocks=3.4, decoded=40),
)


def seconds(serving: Engine, load: Load, source: random.Random, what: str) -> float:
    """CPU seconds of one pass over the load."""
    size = serving.block_size

    def text(tokens: int) -> list[int]:
        return [source.randrange(10, 500) for _ in range(tokens)]

    start = time.process_time()
    if what == "decode":
        serving.generate([text(size // 2)], greedy(load.decoded))
    else:
        for _ in range(load.prompts):
            serving.generate([text(round(load.prompt_blocks * size))], greedy(1))
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="runs of each kind")
    parser.add_argument("--model", action="append", choices=[load.model for load in LOADS], help="default: all")
    arguments = parser.parse_args()
    loads = [load for load in LOADS if not arguments.model or load.model in arguments.model]
    spent: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        runs = [(load, budget, n) for load in loads for budget in BUDGETS for n in range(2 * arguments.repeats)]
        sizes: dict[str, int] = {}
        for load, budget, number in tqdm(runs, desc="Engines", unit="engine"):
            caching = (number % 2) ^ (number // 2 % 2) == 1  # on, off, off, on: neither always comes first
            path = checkpoints.build(load.model, "float32", Path(directory))
            flags = {"block_size": load.block_size, "prefix_cache_retention_interval": None, "max_model_len": 4096}
            if load.model not in sizes:
                with engine(path, enable_prefix_caching=True, **flags) as serving:
                    sizes[load.model] = serving.block_size
            size = sizes[load.model]
            if load.block_size is None:
                flags["block_size"] = size  # the same kernel blocks with caching on and off
            with engine(
                path, enable_prefix_caching=caching, max_num_batched_tokens=int(budget * size), **flags
            ) as serving:
                for what in ("prefill", "decode") if budget == BUDGETS[0] else ("prefill",):
                    source = random.Random(number // 2)
                    seconds(serving, load, source, what)  # warms what is warmed by use
                    label = f"{load.model} {what}" + (f", budget {budget} B" if what == "prefill" else "")
                    spent.setdefault((label, caching), []).append(seconds(serving, load, source, what))
    print("| load | throughput with caching / without |")
    print("|---|---:|")
    for (label, caching), on in spent.items():
        if caching:
            off = spent[label, False]
            ratios = [b / a for a, b in zip(on, off, strict=True)]
            print(f"| {label} | {statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f}) |")


if __name__ == "__main__":
    main()
