# SPDX-License-Identifier: Apache-2.0
"""Bytes as people read them. Standard library only.

Owns: the one format of a size in log lines, errors and the command line. Never: how many bytes something takes.

Ordering rule: none.
"""

from __future__ import annotations

MIB = 2**20
GIB = 2**30

LEAST_IN_GIB = 192 * MIB
"""Below that two decimals of a GiB would say too little."""


def format_bytes(num_bytes: float) -> str:
    """As vLLM's log lines tell memory: ``x.xx GiB``, and ``x.xx MiB`` for less than ``LEAST_IN_GIB``."""
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= LEAST_IN_GIB else f"{num_bytes / MIB:.2f} MiB"
