# SPDX-License-Identifier: Apache-2.0
"""Tables of a nightly run: the same rows as Markdown for people and as JSON for programs.

Owns: the two files and their form. Never: a judgement of what is in them.

Ordering rule: a table is written before anything is asserted about it, so a failing night has its table too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write(out: str | Path, name: str, title: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """``OUT/NAME.md`` and ``OUT/NAME.json``; the keys of the first row are the columns. Returns the Markdown's path."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0]) if rows else []
    lines = [f"# {title}", "", _line(columns), _line("---" for _ in columns)] if rows else [f"# {title}", "", "nothing"]
    lines += [_line(_shown(row[column]) for column in columns) for row in rows]
    path = folder / f"{name}.md"
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".json").write_text(json.dumps({"title": title, "rows": list(rows)}, indent=1) + "\n")
    return path


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
