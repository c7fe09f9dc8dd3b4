# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/: their generated sections, and the site that MkDocs builds of them in .cache/site.

A section is cog's: ``<!-- [[[cog show(sizes.staging()) ]]] -->``, what that has shown, ``<!-- [[[end]]] -->``.

Owns: running cog and MkDocs. Never: what a section says.

Ordering rule: sections are written before the site is built, so a built site is never older than the tree.
"""

from __future__ import annotations

import subprocess

import cogapp

from tools import install
from tools.install import ROOT

DOCS = ROOT / "docs"
SITE = ROOT / ".cache" / "site"
DOCS_PINS = ROOT / "requirements" / "docs.txt"
PROLOGUE = "from tools.docs import sizes, sources, tables; from tools.docs.markdown import show"
STALE = 5
"""What cog exits with when a page is not as it would be written."""


def write() -> int:
    return _cog("-r")


def check() -> int:
    """0, or STALE where a page is out of date; the difference is printed."""
    return _cog("--check", "--diff", "--check-fail-msg=run make docs, or python -m tools.docs")


def build() -> int:
    failed = write()
    if failed or not install.have_extra(DOCS_PINS):
        return failed or 1
    command = [str(install.VENV / "bin" / "python"), "-m", "mkdocs", "build", "--strict", "--site-dir", str(SITE)]
    failed = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not failed:
        print(f"site: {SITE.relative_to(ROOT)}/index.html")
    return failed


def _cog(*options: str) -> int:
    pages = sorted(str(page) for page in DOCS.rglob("*.md"))
    return cogapp.Cog().main(["cog", "-P", "-p", PROLOGUE, "--verbosity=1", *options, *pages])
