# SPDX-License-Identifier: Apache-2.0
"""The version, which comes from git; everything else about the package stands in pyproject.toml.

Versions are ``<vLLM release>.postN``: N counts the plugin's releases against one vLLM release. A tag
``v0.30.0.post2`` on the commit gives 0.30.0.post2, commits after it give 0.30.0.post3.devK. Without git or tags (a
source archive, a shallow clone) the version is the archive's own, or the first of its line.
"""

import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
(VLLM_RELEASE,) = re.findall(r'^VLLM_RELEASE = "(.+)"', (ROOT / "vllm_gaudi" / "__init__.py").read_text(), re.M)
FALLBACK = f"{VLLM_RELEASE}.post1"


def version_from_describe(described: str) -> str:
    """``git describe --long`` of a tag ``v0.30.0.postN`` -> version. Raises ValueError on any other shape."""
    match = re.fullmatch(rf"v{re.escape(VLLM_RELEASE)}\.post(\d+)-(\d+)-g[0-9a-f]+", described)
    if match is None:
        raise ValueError(f"git describe gave {described!r}, expected v{VLLM_RELEASE}.postN-COMMITS-gHASH")
    release, commits = int(match[1]), int(match[2])
    if commits == 0:
        return f"{VLLM_RELEASE}.post{release}"
    return f"{VLLM_RELEASE}.post{release + 1}.dev{commits}"


def git(*arguments: str) -> str | None:
    """Output of one git command in this directory, or None where git or its answer is missing."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def version() -> str:
    archive = ROOT / "PKG-INFO"
    if archive.is_file():
        return HeaderParser().parsestr(archive.read_text(encoding="utf-8"))["Version"]
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        return FALLBACK
    described = git("describe", "--tags", "--long", "--match", f"v{VLLM_RELEASE}.post[0-9]*")
    return version_from_describe(described) if described else FALLBACK


if __name__ == "__main__":
    setup(version=version())
