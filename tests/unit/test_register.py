# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM asks for its platform's class path, while `import vllm` runs. Needs no vLLM."""

from __future__ import annotations

import sys
import types

import pytest

import vllm_gaudi
from vllm_gaudi import compat


@pytest.fixture(autouse=True)
def no_schemas(monkeypatch):
    monkeypatch.setattr(compat, "define_torchvision_schemas", lambda: None)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "being imported"])
def test_vllm_finds_no_platform_module_that_is_still_being_imported(monkeypatch, is_whole):
    """`import vllm_gaudi.platform` before vLLM (test_stub_hpu does it in a process of its own)."""
    module = types.ModuleType("vllm_gaudi.platform")
    if is_whole:
        module.HpuPlatform = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for _ in range(2):
        assert vllm_gaudi.register() == "vllm_gaudi.platform.HpuPlatform"
    assert sys.modules.get(module.__name__) is (module if is_whole else None)
