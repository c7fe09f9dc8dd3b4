# SPDX-License-Identifier: Apache-2.0
"""Tables and code spans as Markdown has them.

Owns: their spelling. Never: what is in a cell.

Ordering rule: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """A Markdown table; ``right``: columns that are aligned to the right."""
    lines = [head, ["---:" if n in right else "---" for n in range(len(head))], *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def code(text: object) -> str:
    return f"`{text}`"
