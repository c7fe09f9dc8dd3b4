# SPDX-License-Identifier: Apache-2.0
"""How numbers are written down: medians with their spread, the machine that they are from, and where files go.

Owns: units and digits of a table's cells. Never: a measurement.
"""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / ".cache" / "bench"


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: list[float | None]) -> list[float] | None:
    """Median, smallest and largest, or None where nothing was measured."""
    real = [value for value in values if value is not None]
    return [statistics.median(real), min(real), max(real)] if real else None


def shown(value: list[float] | None, unit: str) -> str:
    if value is None:
        return "-"
    scale, digits = {"ms": (1000, 0), "share": (100, 0), "rate": (1, 0), "count": (1, 0), "tenths": (1, 1)}[unit]
    middle, low, high = (f"{scale * part:.{digits}f}" for part in value)
    return middle if low == high else f"{middle} ({low}..{high})"


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}, Python {platform.python_version()}"


def relative(path: Path) -> Path:
    """As seen from the checkout's root where it is inside."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
