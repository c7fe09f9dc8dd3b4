# SPDX-License-Identifier: Apache-2.0
"""Warm-up: every shape of the grid once, before the first request.

Owns: the order and the progress bar. Never: real rows: every input is made of pads.

Ordering rule: largest bucket first, so that a budget that is too small fails at the start of warm-up, not at its end.
"""

from __future__ import annotations

from collections.abc import Callable

from tqdm import tqdm

from vllm_gaudi.bucketing.grid import BucketGrid, DecodeBucket, PrefillBucket


def warm_up(grid: BucketGrid, run: Callable[[PrefillBucket | DecodeBucket], None], show: bool) -> int:
    """Call ``run`` with every bucket of the grid, with a progress bar where ``show``; returns how many."""
    buckets: list[PrefillBucket | DecodeBucket] = [*grid.all_prefill(), *grid.all_decode()]
    for bucket in tqdm(buckets, desc="Warming up", unit="shape", disable=not show):
        run(bucket)
    return len(buckets)
