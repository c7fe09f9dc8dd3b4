# SPDX-License-Identifier: Apache-2.0
"""vLLM has moved under the plugin: one failing test per symbol, with the row that says who depends on it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

import vllm_gaudi
from tests.support import vllm_contract
from tests.support.vllm_contract import ROWS, Row

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it


@pytest.fixture(scope="module", autouse=True)
def platform() -> None:
    """vLLM finds its platform first; a plugin module that is imported before that is in a circle."""
    from vllm.platforms import current_platform

    assert current_platform.device_type in ("cpu", "hpu")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.symbol)
def test_vllm_is_as_it_was(row: Row) -> None:
    assert vllm_contract.drift(row) is None


def overridden() -> Iterator[str]:
    """Symbols of vLLM's classes that a class of ours defines anew."""
    for module_info in pkgutil.walk_packages(vllm_gaudi.__path__, "vllm_gaudi."):
        if ".testing" in module_info.name:
            continue
        module = importlib.import_module(module_info.name)
        for name, owner in vars(module).items():
            if not inspect.isclass(owner) or owner.__module__ != module_info.name or name.startswith("_"):
                continue
            for attribute in vars(owner):
                if attribute in ("_abc_impl", "name") or (attribute.startswith("__") and attribute != "__init__"):
                    continue
                for base in owner.__mro__[1:]:
                    if base.__module__.startswith("vllm.") and attribute in vars(base):
                        yield f"{base.__module__}.{base.__qualname__}.{attribute}"
                        break


def test_everything_overridden_has_a_row() -> None:
    missing = set(overridden()) - {row.symbol for row in ROWS}
    assert not missing, f"no row in tests/support/vllm_contract.py for {sorted(missing)}"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row("vllm.v1.core.block_pool.BlockPool.gone", "x"), "is gone"),
        (Row("vllm.v1.core.block_pool.BlockPool.touch", "x", parameters=("self",)), "takes"),
        (Row("vllm.v1.core.sched.output.NewRequestData", "x", fields=("gone",)), "has no field gone"),
    ],
)
def test_drift_is_said(row: Row, words: str) -> None:
    found = vllm_contract.drift(row)
    assert found is not None and words in found and "x" in found
