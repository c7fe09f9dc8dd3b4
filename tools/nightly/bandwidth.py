# SPDX-License-Identifier: Apache-2.0
"""How fast checkpoints move against a plain copy of the same bytes on the same device: a ratio, one per size.

Owns: the choice of sizes, the table, and the one loose floor. The measuring is that of ``copies``. Never: a time.

Ordering rule: the table is written before the floor is looked at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tools.nightly import process, report
from tools.nightly.setting import Setting

# Of the largest moves, on a device: below this a copy has left the device, or goes row by row. To be raised to half of
# what the first nights show.
FLOOR = 0.05


def measure(layers: int, sizes: Sequence[int], repeats: int, pool_blocks: int) -> list[dict[str, Any]]:
    """In this process, on this machine's device; ``layers``: GDN layers of each model, a multiple of three."""
    from tools.nightly import copies

    rows = copies.measure_all(copies.MODELS, sizes, layers, repeats, pool_blocks)
    return [dataclasses.asdict(row) for row in rows]


def check(rows: Sequence[dict[str, Any]], floor: float) -> None:
    """Raises AssertionError when a move was not measured, or the largest move of a model is below ``floor``."""
    assert rows, "nothing was measured"
    largest = max(row["requests"] for row in rows)
    for row in rows:
        ratio = row["median_ratio"]
        assert math.isfinite(ratio) and ratio > 0, f"{row['model']}, {row['direction']}: no ratio: {ratio}"
        if row["requests"] == largest:
            assert ratio >= floor, f"{row['model']}, {row['direction']}: {ratio:.3f} of a plain copy, floor {floor}"


def run(setting: Setting) -> list[dict[str, Any]]:
    """Measures, writes the table and checks it; returns its rows."""
    arguments = (
        {"layers": 6, "sizes": [1, 2, 4, 8, 16, 32], "repeats": 7, "pool_blocks": 2000}
        if setting.is_device
        else {"layers": 3, "sizes": [1, 2], "repeats": 2, "pool_blocks": 0}
    )
    rows = process.apply(setting, "tools.nightly.bandwidth:measure", arguments, {}, "bandwidth")
    report.write(setting.out, "bandwidth", "Checkpoints against a plain copy: copy's time / store's time", rows)
    check(rows, FLOOR if setting.is_device else 0.0)
    return rows
