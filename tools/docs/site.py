# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/: their generated sections, and the site that MkDocs builds of them in .cache/site.

Owns: the generated sections (in the pages, between ``<!-- generated: NAME -->`` and ``<!-- end -->``).
Never: a sentence by hand inside a generated section.

Ordering rule: sections are written before the site is built, so a built site is never older than the tree.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from tools import install
from tools.docs import sizes, sources, tables
from tools.install import ROOT

DOCS = ROOT / "docs"
SITE = ROOT / ".cache" / "site"
DOCS_PINS = ROOT / "requirements" / "docs.txt"
SECTION = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.S)

SECTIONS: dict[str, Callable[[], str]] = {
    "dimensions": sizes.dimensions,
    "block-sizes": sizes.block_sizes,
    "pool-costs": sizes.pool_costs,
    "staging": sizes.staging,
    "rooms-left": sizes.rooms_left,
    "recipes": sizes.recipe_commands,
    "environment": tables.environment,
    "bridge-defaults": tables.bridge_defaults,
    "hits": sizes.hits,
    "boundary-cost": sizes.boundary_cost,
    "additional-config": sizes.additional_config,
    "refusals": tables.refusal_table,
    "start-errors": sources.raises,
    "architectures": tables.architectures,
    "metrics": tables.metrics,
    "operators": tables.operators,
    "miss-reasons": tables.miss_reasons,
    "log-lines": sources.log_lines,
    "entry-points": tables.entry_points,
    "nightly-variables": tables.nightly_variables,
    "pins": tables.pins,
    "compat": tables.compat_rows,
    "ops": tables.ops,
    "owners": sources.owners,
    "ordering-rules": sources.ordering_rules,
    "step-order": sources.step_order,
    "vllm-symbols": tables.vllm_symbols,
    "plan-arguments": lambda: tables.arguments("plan"),
    "why-arguments": lambda: tables.arguments("why"),
    "why-example": tables.reused,
}


def rendered(text: str) -> str:
    """A page with its generated sections as they are now. Raises LookupError for a section that nobody makes."""

    def section(match: re.Match[str]) -> str:
        if match[2] not in SECTIONS:
            raise LookupError(f"no section is named {match[2]}; sections are {', '.join(SECTIONS)}")
        return f"{match[1]}\n{SECTIONS[match[2]]()}\n{match[3]}"

    return SECTION.sub(section, text)


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def outputs() -> dict[Path, str]:
    """What every file with a generated part should be."""
    return {path: rendered(path.read_text()) for path in pages()}


def stale() -> list[Path]:
    return [path for path, text in outputs().items() if path.read_text() != text]


def write() -> list[Path]:
    """Bring the generated parts up to date; returns what has changed."""
    changed = stale()
    for path, text in outputs().items():
        if path in changed:
            path.write_text(text)
    return changed


def build() -> int:
    for path in write():
        print(f"written: {path.relative_to(ROOT)}", flush=True)
    if not install.have_extra(DOCS_PINS):
        return 1
    command = [str(install.VENV / "bin" / "python"), "-m", "mkdocs", "build", "--strict", "--site-dir", str(SITE)]
    code_of_mkdocs = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code_of_mkdocs == 0:
        print(f"site: {SITE.relative_to(ROOT)}/index.html")
    return code_of_mkdocs
