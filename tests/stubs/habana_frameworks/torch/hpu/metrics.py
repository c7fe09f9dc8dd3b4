# SPDX-License-Identifier: Apache-2.0
"""Counters of compilations and of operators that fell back to the CPU; here they are always zero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from habana_frameworks.calls import check


class Metric:
    def stats(self) -> list[tuple[str, int]]:
        return [("TotalNumber", 0), ("TotalTime", 0)]


@contextlib.contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    check(name in ("graph_compilation", "cpu_fallback", "recipe_cache"), f"no metric {name}")
    yield Metric()
