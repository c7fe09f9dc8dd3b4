# SPDX-License-Identifier: Apache-2.0
"""Save and restore of GDN checkpoints against a plain memcpy of the same bytes, in the same run.

    python -m benchmarks checkpoint [--layers 8] [--repeats 7] [--json FILE]

On a Gaudi both sides move device memory, and a time ends when the device is done.

Owns: the layer shapes of three target models and the table. Prints, per model and number of requests, the ratio of the
memcpy's time to the store's (1.0: as fast as memcpy), median over the repeats with the smallest and largest; store and
memcpy alternate. Fewer layers than the real models have, so that pages and slots fit a small machine; each layer is
full size. Never asserts a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from tqdm import tqdm

from vllm_gaudi import device
from vllm_gaudi.v1.worker.gdn_checkpoint.layout import StateShape, make_layout
from vllm_gaudi.v1.worker.gdn_checkpoint.plan import RowCopies
from vllm_gaudi.v1.worker.gdn_checkpoint.store import GDNCheckpointStore

GROUPS = 3
KERNEL_BLOCK = 128


@dataclass(frozen=True)
class Model:
    """One layer, TP-local; bf16 pages and conv tail, fp32 SSM state."""

    name: str
    block_size: int  # tokens
    kv_heads: int
    conv_dim: int
    v_heads: int
    head: int = 256  # of attention
    dim: int = 128  # of a GDN head, k and v


MODELS = (
    Model("Qwen3.6-27B TP4", block_size=896, kv_heads=1, conv_dim=2560, v_heads=12),
    Model("Qwen3.6-35B-A3B TP1", block_size=1152, kv_heads=2, conv_dim=8192, v_heads=32),
    Model("Qwen3.5-397B-A17B TP8", block_size=640, kv_heads=1, conv_dim=1536, v_heads=8),
)
REQUESTS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Row:
    model: str
    direction: str
    requests: int
    megabytes: float
    median_ratio: float
    lowest_ratio: float
    highest_ratio: float


def build(model: Model, layers: int, slots: int, pool_blocks: int) -> GDNCheckpointStore:
    """A store over ``layers`` GDN layers in three groups, with what ``slots`` checkpoints need or ``pool_blocks``."""
    per_group = layers // GROUPS
    num_blocks = max(GROUPS * slots + 1, pool_blocks)
    page = (num_blocks * model.block_size + KERNEL_BLOCK, model.kv_heads, model.head)
    where = torch.device(device.device_type())
    k = [torch.zeros(page, dtype=torch.bfloat16, device=where) for _ in range(per_group)]
    v = [torch.zeros(page, dtype=torch.bfloat16, device=where) for _ in range(per_group)]
    conv = [torch.randn(slots + 2, 3, model.conv_dim).to(where, torch.bfloat16) for _ in range(layers)]
    ssm = [torch.randn(slots + 2, model.v_heads, model.dim, model.dim).to(where) for _ in range(layers)]
    layout = make_layout(
        state=StateShape((3, model.conv_dim), 2, (model.v_heads, model.dim, model.dim), 4),
        block_size=model.block_size,
        num_blocks=num_blocks,
        page_bytes=2 * model.block_size * model.kv_heads * model.head * 2,
        group_ids=range(GROUPS),
        group_sizes=[per_group] * GROUPS,
        num_positions=per_group,
    )
    return GDNCheckpointStore(layout, k, v, conv, ssm)


def seconds(run: Callable[[], object]) -> float:
    device.synchronize()
    start = time.perf_counter()
    run()
    device.synchronize()
    return time.perf_counter() - start


def measure(store: GDNCheckpointStore, requests: int, repeats: int, model: str) -> list[Row]:
    slots = np.arange(requests, dtype=np.int32)
    blocks = 1 + np.arange(GROUPS * requests, dtype=np.int32).reshape(GROUPS, requests)
    copies = RowCopies(slots, blocks)
    num_bytes = requests * store.layout.checkpoint_bytes
    source = torch.randint(0, 9, (num_bytes // 4,), dtype=torch.int32).to(device.device_type())
    target = torch.zeros_like(source)
    rows = []
    for direction, move in (("save", store.save), ("restore", store.restore)):
        move(copies)  # touches every page once, as memcpy's target is touched above
        ratios = []
        for _ in range(repeats):
            plain = seconds(lambda: target.copy_(source))
            ours = seconds(lambda move=move: move(copies))  # type: ignore[misc]
            ratios.append(plain / ours)
        rows.append(
            Row(model, direction, requests, num_bytes / 1e6, statistics.median(ratios), min(ratios), max(ratios))
        )
    return rows


def measure_all(
    models: Sequence[Model], sizes: Sequence[int], layers: int, repeats: int, pool_blocks: int = 0
) -> list[Row]:
    """Rows of every model and number of requests, one store at a time.

    ``pool_blocks``: at least so many; a device that copies all of a pool to move some blocks shows it in a large one.
    """
    device.initialize()
    rows: list[Row] = []
    for model in tqdm(models, desc="Models", unit="model"):
        store = build(model, layers, max(sizes), pool_blocks)
        for requests in tqdm(sizes, desc=model.name, unit="size", leave=False):
            rows += measure(store, requests, repeats, model.name)
        del store
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=6, help="GDN layers, a multiple of three")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pool-blocks", type=int, default=0, help="at least so many blocks in the pool")
    parser.add_argument("--json", help="also write the rows to this file")


def run(arguments: argparse.Namespace) -> None:
    rows = measure_all(MODELS, REQUESTS, arguments.layers, arguments.repeats, arguments.pool_blocks)
    threads = torch.get_num_threads()
    print(f"{threads} thread(s), {arguments.layers} layers, median of {arguments.repeats} (lowest..highest)")
    print("| model | direction | requests | MB | memcpy time / store time |")
    print("|---|---|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row.model} | {row.direction} | {row.requests} | {row.megabytes:.1f} | "
            f"{row.median_ratio:.2f} ({row.lowest_ratio:.2f}..{row.highest_ratio:.2f}) |"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
