# SPDX-License-Identifier: Apache-2.0
"""README and CONTRIBUTING against the tree: every path exists, every refusal and every configuration key is listed."""

import re
from pathlib import Path

import pytest

import setup as packaging
import vllm_gaudi
from vllm_gaudi import capabilities, envs
from vllm_gaudi.bucketing import grid

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def tree_paths(text):
    """Paths of the README's tree, from its indentation."""
    section = text.split("## The tree\n")[1].split("\n## ")[0]
    parents = []
    for line in section.splitlines():
        if not line.strip():
            continue
        depth, name = (len(line) - len(line.lstrip()) - 4) // 2, line.split()[0]
        parents[depth:] = [name]
        yield "".join(parents)


@pytest.mark.parametrize("path", list(tree_paths(README)))
def test_the_readmes_tree_is_the_tree(path):
    assert (ROOT / path).exists()


def test_files_named_in_the_text_exist():
    named = re.findall(r"`((?:vllm_gaudi|tests|requirements|tools)/[\w./]*)`", README + CONTRIBUTING)
    assert len(named) > 10
    missing = {path for path in named if not (ROOT / path).exists() and "NAME" not in path}
    assert not missing


@pytest.mark.parametrize("row", capabilities.TABLE, ids=lambda row: row.name)
def test_every_refusal_is_in_the_readme(row):
    assert f"`{row.name}`" in README


@pytest.mark.parametrize("architecture", capabilities.SUPPORTED_ARCHITECTURES)
def test_every_supported_architecture_is_in_the_readme(architecture):
    assert architecture in README


@pytest.mark.parametrize("key", grid.CONFIG_KEYS)
def test_every_additional_config_key_is_in_the_readme(key):
    assert f"| `{key}` |" in README


def test_every_variable_of_the_readmes_table_exists():
    named = re.findall(r"^\| `([A-Z][A-Z_]+)` \|", README, re.M)
    assert named and set(named) <= set(envs.TABLE)


def test_the_release_is_the_same_everywhere():
    pin = re.search(r"^vllm==(\S+)", (ROOT / "requirements" / "host.txt").read_text(), re.M)
    assert pin is not None
    assert pin[1] == vllm_gaudi.VLLM_RELEASE == packaging.VLLM_RELEASE
    assert f"vLLM {pin[1]}" in README


def test_every_make_target_of_the_documents_exists():
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.M))
    asked = set(re.findall(r"(?:`|^    )make ([a-z0-9]+)", README + CONTRIBUTING, re.M))
    asked |= set(re.findall(r"run: make ([a-z0-9]+)", "".join(p.read_text() for p in ROOT.glob(".github/workflows/*"))))
    assert {"demo", "test", "unit"} <= asked <= targets
