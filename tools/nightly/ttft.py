# SPDX-License-Identifier: Apache-2.0
"""Time to the first token, cold and out of the cache, over prompts of 1 to 16 blocks: a table, never a limit.

Owns: the prompts and the clock. Never: an assertion on a time.

Ordering rule: each prompt runs once under another salt before it is timed, so that no time holds a first compilation.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.nightly import process, report
from tools.nightly.setting import Setting, from_json

REST = 0.25  # blocks of a prompt that no cache can hold
REPEATS = 3


def measure(setting: Mapping[str, Any], blocks: list[int]) -> list[dict[str, Any]]:
    """One engine, in this process: a row for each number of ``blocks``."""
    from vllm_gaudi.testing.engine import engine

    it = from_json(setting)
    rows = []
    with engine(it.model, **it.engine_flags(enable_prefix_caching=True)) as serving:
        source = random.Random(5)
        for num_blocks in blocks:
            length = int((num_blocks + REST) * serving.block_size)
            text = [source.randrange(10, 500) for _ in range(length)]
            _first_token(serving, text, "untimed")
            cold = [_first_token(serving, text, f"cold {n}") for n in range(REPEATS)]
            _first_token(serving, text, "")
            hit = [_first_token(serving, text, "") for _ in range(REPEATS)]
            cold_seconds, hit_seconds = (statistics.median(seconds for seconds, _ in runs) for runs in (cold, hit))
            rows.append(
                {
                    "blocks": num_blocks,
                    "prompt tokens": length,
                    "cached tokens": hit[0][1],
                    "cold, ms": 1000 * cold_seconds,
                    "hit, ms": 1000 * hit_seconds,
                    "cold / hit": cold_seconds / hit_seconds,
                    "wanted": num_blocks * serving.block_size,
                    "cold cached": max(cached for _, cached in cold),
                    "least hit": min(cached for _, cached in hit),
                }
            )
    return rows


def _first_token(serving: Any, text: list[int], salt: str) -> tuple[float, int]:
    """Seconds until the request's only token, and the tokens that it found cached."""
    from vllm_gaudi.testing.engine import greedy

    start = time.perf_counter()
    (result,) = serving.generate([text], greedy(1), **({"cache_salt": salt} if salt else {}))
    return time.perf_counter() - start, result.cached_tokens


def check(rows: list[dict[str, Any]]) -> None:
    """Raises AssertionError when a row's hit is none, or its cold run is none."""
    assert rows, "nothing was measured"
    for row in rows:
        assert row["cold cached"] == 0, f"{row['blocks']} blocks: the cold run has reused {row['cold cached']} tokens"
        assert row["cached tokens"] == row["least hit"] == row["wanted"] > 0, f"{row['blocks']} blocks: no whole hit"


def run(setting: Setting) -> list[dict[str, Any]]:
    """Measures, writes the table and checks it; returns its rows."""
    arguments: dict[str, Any] = {"setting": setting.to_json(), "blocks": list(range(1, setting.longest + 1))}
    environment = setting.environment(warm_up=setting.is_device)
    rows = process.apply(setting, "tools.nightly.ttft:measure", arguments, environment, "ttft")
    columns = list(rows[0])[:6]
    shown = [{column: row[column] for column in columns} for row in rows]
    report.write(setting.out, "ttft", f"Time to the first token, {Path(setting.model).name}", shown)
    check(rows)
    return rows
