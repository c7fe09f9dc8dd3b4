# SPDX-License-Identifier: Apache-2.0
"""Warm-up: every shape of the grid once, before the first request.

Owns: the order, the progress bar and what is tried for real where warm-up only compiles. Never: real rows: every input
is made of padding.

Ordering rule: largest bucket first, so that a budget that is too small fails at the start of warm-up, not at its end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tqdm import tqdm

from vllm_gaudi.bucketing.grid import BucketGrid, DecodeBucket, PrefillBucket


def warm_up(grid: BucketGrid, run: Callable[[PrefillBucket | DecodeBucket], object], show: bool) -> int:
    """Call ``run`` with every bucket of the grid, with a progress bar where ``show``; returns how many."""
    buckets: list[PrefillBucket | DecodeBucket] = [*grid.all_prefill(), *grid.all_decode()]
    for bucket in tqdm(buckets, desc="Warming up", unit="shape", disable=not show):
        run(bucket)
    return len(buckets)


def validate(grid: BucketGrid, run: Callable[[PrefillBucket | DecodeBucket], torch.Tensor]) -> None:
    """Run the largest prefill and the largest decode bucket; ``run`` gives their logits.

    Raises RuntimeError where padding, which reads zeros, gives a value that is not finite.
    """
    for bucket in (grid.all_prefill()[0], grid.all_decode()[0]):
        if not bool(torch.isfinite(run(bucket)).all()):
            raise RuntimeError(
                f"the first run of {bucket} after warm-up gives logits that are not finite, on padding that reads "
                "zeros: the compiled graphs are wrong; try --enforce-eager, and report the bucket"
            )
