# SPDX-License-Identifier: Apache-2.0
"""Save and restore of GDN checkpoints against a plain memcpy of the same bytes, in one run on one device.

Owns: the stores that are measured, and the ratio: the memcpy's time over the store's (1.0: as fast as memcpy), median
over the repeats with the smallest and largest. Fewer layers than the real models have, so that pages and slots fit a
small machine; each layer is full size. Never: asserts a time.

Ordering rule: store and memcpy alternate, and a time ends when the device is done.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from tools.docs.sizes import QWEN35_27B, QWEN35_35B, QWEN35_397B
from tools.model_sizes import Geometry
from vllm_gaudi import device
from vllm_gaudi.v1.worker.gdn_checkpoint.layout import make_layout
from vllm_gaudi.v1.worker.gdn_checkpoint.plan import RowCopies
from vllm_gaudi.v1.worker.gdn_checkpoint.store import GDNCheckpointStore

GROUPS = 3
KERNEL_BLOCK = 128
MODELS = (Geometry(QWEN35_27B, ranks=4), Geometry(QWEN35_35B, ranks=1), Geometry(QWEN35_397B, ranks=8))
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


def name_of(geometry: Geometry) -> str:
    return f"{geometry.model.path.rpartition('/')[2]} TP{geometry.ranks}"


def build(geometry: Geometry, layers: int, slots: int, pool_blocks: int) -> GDNCheckpointStore:
    """A store over ``layers`` GDN layers in three groups, with what ``slots`` checkpoints need or ``pool_blocks``."""
    state, block_size = geometry.state, geometry.block
    per_group = layers // GROUPS
    num_blocks = max(GROUPS * slots + 1, pool_blocks)
    head = geometry.model.head
    kv_heads = geometry.token_bytes // (2 * head * torch.bfloat16.itemsize)
    page = (num_blocks * block_size + KERNEL_BLOCK, kv_heads, head)
    where = torch.device(device.device_type())
    k = [torch.zeros(page, dtype=torch.bfloat16, device=where) for _ in range(per_group)]
    v = [torch.zeros(page, dtype=torch.bfloat16, device=where) for _ in range(per_group)]
    conv = [torch.randn(slots + 2, *state.conv).to(where, torch.bfloat16) for _ in range(layers)]
    ssm = [torch.randn(slots + 2, *state.ssm).to(where) for _ in range(layers)]
    layout = make_layout(
        state=state,
        block_size=block_size,
        num_blocks=num_blocks,
        page_bytes=geometry.page_bytes,
        group_ids=range(GROUPS),
        group_sizes=[per_group] * GROUPS,
        num_attention_layers=per_group,
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
    models: Sequence[Geometry], sizes: Sequence[int], layers: int, repeats: int, pool_blocks: int = 0
) -> list[Row]:
    """Rows of every model and number of requests, one store at a time.

    ``pool_blocks``: at least so many; a device that copies all of a pool to move some blocks shows it in a large one.
    """
    device.initialize()
    rows: list[Row] = []
    for model in tqdm(models, desc="Models", unit="model"):
        store = build(model, layers, max(sizes), pool_blocks)
        for requests in tqdm(sizes, desc=name_of(model), unit="size", leave=False):
            rows += measure(store, requests, repeats, name_of(model))
        del store
    return rows
