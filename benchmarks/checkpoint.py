# SPDX-License-Identifier: Apache-2.0
"""Save and restore of GDN checkpoints against a plain memcpy of the same bytes, in the same run.

    python -m benchmarks checkpoint [--layers 6] [--repeats 7] [--json FILE]

Owns: the table. What measures is ``tools/nightly/copies.py``, as in the nightly run: on a Gaudi both sides move device
memory, and a time ends when the device is done. Never asserts a time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=6, help="GDN layers, a multiple of three")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pool-blocks", type=int, default=0, help="at least so many blocks in the pool")
    parser.add_argument("--json", help="also write the rows to this file")


def run(options: argparse.Namespace) -> None:
    import torch

    from tools.nightly import copies

    rows = copies.measure_all(copies.MODELS, copies.REQUESTS, options.layers, options.repeats, options.pool_blocks)
    threads = torch.get_num_threads()
    print(f"{threads} thread(s), {options.layers} layers, median of {options.repeats} (lowest..highest)")
    print("| model | direction | requests | MB | memcpy time / store time |")
    print("|---|---|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row.model} | {row.direction} | {row.requests} | {row.megabytes:.1f} | "
            f"{row.median_ratio:.2f} ({row.lowest_ratio:.2f}..{row.highest_ratio:.2f}) |"
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
