# SPDX-License-Identifier: Apache-2.0
"""README, CONTRIBUTING and the pages that they point to against the tree: every path, refusal and key is there."""

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
REFUSALS = (ROOT / "docs" / "refusals.md").read_text()
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()


def test_files_named_in_the_text_exist():
    named = re.findall(r"`((?:vllm_gaudi|tests|requirements|tools)/[\w./]*)`", README + CONTRIBUTING)
    assert len(named) > 10
    missing = {path for path in named if not (ROOT / path).exists() and "NAME" not in path}
    assert not missing


@pytest.mark.parametrize("row", capabilities.TABLE, ids=lambda row: row.name)
def test_every_refusal_is_in_its_page(row):
    assert f"`{row.name}`" in REFUSALS


@pytest.mark.parametrize("architecture", capabilities.SUPPORTED_ARCHITECTURES)
def test_every_supported_architecture_is_in_the_readme(architecture):
    assert architecture in README


@pytest.mark.parametrize("key", grid.CONFIG_KEYS)
def test_every_additional_config_key_is_in_its_page(key):
    assert f"| `{key}` |" in CONFIGURATION


def test_every_variable_has_a_row_in_its_page():
    named = re.findall(r"^\| `([A-Z][A-Z0-9_]+)` \|", CONFIGURATION, re.M)
    assert set(envs.TABLE) <= set(named)


def test_every_page_that_is_linked_exists():
    linked = re.findall(r"\]\(([\w./-]+\.md)\)", README + CONTRIBUTING)
    assert len(linked) > 8
    assert not [path for path in linked if not (ROOT / path).is_file()]


def test_the_readme_can_be_read_in_one_go():
    lines = README.splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 130


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
