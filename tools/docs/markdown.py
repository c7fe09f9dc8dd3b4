# SPDX-License-Identifier: Apache-2.0
"""Tables and code spans as Markdown has them, and how they get into a page.

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


def show(text: str) -> None:
    """What a page calls: cog puts what is printed into the page. Markdown wants empty lines around a table."""
    print(f"\n{text}")


def code(text: object) -> str:
    return f"`{text}`"
