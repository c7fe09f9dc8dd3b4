# SPDX-License-Identifier: Apache-2.0
"""What the runner itself costs per decode step: everything but the model's forward, the logits and vLLM's sampler.

    python -m benchmarks step [--model q35_small] [--batches 1 8 32 128]

Owns: the clocks around the runner's parts. Prints a Markdown table: medians over the steps, with the quartiles of the
overhead. Growth is against the smallest batch. Never asserts a number.
"""

from __future__ import annotations

import argparse
import operator
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from benchmarks.engines import CHECKPOINTS, use_environment_here

PROMPT = 24
MODEL_PARTS = ("forward", "logits", "sampler")
OUR_PARTS = ("requests", "plan and store", "inputs", "sampling rows")


# Where the clocks are: the runner's attribute that has the method ("" is the runner), the method, and the part that its
# time is booked on. The only place that knows the runner's methods by name.
PHASES = (
    ("graphs", "run", "forward"),
    ("graphs", "logits", "logits"),
    ("sampling.sampler", "forward", "sampler"),
    ("step.requests", "apply", "requests"),
    ("step.store", "before_forward", "plan and store"),
    ("step.store", "save", "plan and store"),
    ("step.inputs", "_decode_inputs", "inputs"),
    ("step.inputs", "store_sampled_tokens", "inputs"),
    ("sampling", "_update_rows", "sampling rows"),
    ("", "execute_model", "whole"),
    ("", "sample_tokens", "whole"),
)
LAST = ("", "sample_tokens")
"""A step is over when this returns."""


class Clocks:
    """Seconds per part of the step that is running, and the steps that are over."""

    def __init__(self, runner: Any):
        self.now: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []
        for path, method, part in PHASES:
            owner = operator.attrgetter(path)(runner) if path else runner
            self._around(owner, method, part, self._end if (path, method) == LAST else lambda: None)

    def _around(self, owner: Any, method: str, part: str, after: Callable[[], None]) -> None:
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.now[part] = self.now.get(part, 0.0) + time.perf_counter() - began
                after()

        owner.__dict__[method] = timed

    def _end(self) -> None:
        self.steps.append(self.now)
        self.now = {}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="q35_small", help="a checkpoint of vllm_gaudi.testing.checkpoints")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=24)


def run(options: argparse.Namespace) -> None:
    use_environment_here()
    from vllm_gaudi.testing import checkpoints
    from vllm_gaudi.testing.engine import engine, greedy

    path = checkpoints.build(options.model, "float32", CHECKPOINTS)
    source = random.Random(1)
    rows = []
    flags = {
        "max_num_seqs": max(options.batches),
        "max_num_batched_tokens": 4096,
        "max_model_len": 512,
        "num_gpu_blocks_override": 4 * max(options.batches) + 48,
        "enable_prefix_caching": True,
        "enforce_eager": True,
    }
    with engine(path, **flags) as serving:
        for batch in tqdm(options.batches, desc="Batches", unit="batch"):
            prompts = [[source.randrange(10, 500) for _ in range(PROMPT)] for _ in range(batch)]
            serving.generate(prompts, greedy(2))  # every shape once
            clocks = Clocks(serving.runner)
            serving.generate(prompts, greedy(options.steps + 4))
            steps = [step for step in clocks.steps if "forward" in step][3:-2]
            overhead = [step["whole"] - sum(step.get(part, 0.0) for part in MODEL_PARTS) for step in steps]
            whole = statistics.median(step["whole"] for step in steps)
            ours = {part: statistics.median(step.get(part, 0.0) for step in steps) for part in OUR_PARTS}
            rows.append((batch, whole, quartiles(overhead), ours))
    print("| batch | step, ms | overhead, ms | of the step | growth | " + " | ".join(OUR_PARTS) + " |")
    print("| ---: |" + " ---: |" * (4 + len(OUR_PARTS)))
    first_batch, _, (first, _, _), _ = rows[0]
    for batch, whole, (middle, low, high), ours in rows:
        cells = [
            f"{1e3 * whole:.1f}",
            f"{1e3 * middle:.2f} ({1e3 * low:.2f}..{1e3 * high:.2f})",
            f"{100 * middle / whole:.0f} %",
            f"{middle / first:.1f} x for {batch / first_batch:.0f} x",
            *(f"{1e3 * ours[part]:.2f}" for part in OUR_PARTS),
        ]
        print(f"| {batch} | " + " | ".join(cells) + " |")
