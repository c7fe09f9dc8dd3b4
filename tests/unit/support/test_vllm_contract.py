# SPDX-License-Identifier: Apache-2.0
"""vLLM has moved under the plugin: one failing test per symbol, with the row that says who depends on it."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_gaudi
from tests.support import vllm_contract
from tests.support.vllm_contract import ROWS, Row

PACKAGE = Path(vllm_gaudi.__file__).parent
RECORD = vllm_contract.recorded()

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it


@pytest.fixture(scope="module", autouse=True)
def platform() -> None:
    """vLLM finds its platform first; a plugin module that is imported before that is in a circle."""
    from vllm.platforms import current_platform

    assert current_platform.device_type in ("cpu", "hpu")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.symbol)
def test_vllm_is_as_it_was(row: Row) -> None:
    assert vllm_contract.drift(row, RECORD) is None


def test_the_record_is_of_the_supported_release_and_has_the_rows_of_the_table() -> None:
    (path,) = vllm_contract.FOLDER.glob("vllm-*.json")
    assert path.name == f"vllm-{vllm_gaudi.VLLM_RELEASE}.json"
    assert list(RECORD) == sorted(row.symbol for row in ROWS)


def test_the_modules_of_the_rows_are_there_and_name_the_fields() -> None:
    for module in {module for row in ROWS for module in row.used_by.split(", ")}:
        path = PACKAGE / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = {name for fields in vllm_contract.READS.values() for name in fields}
    assert {name for name in named if not re.search(rf"\b{name}\b", text)} == set()
    assert set(vllm_contract.READS) <= {row.symbol for row in ROWS}


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


def test_everything_overridden_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import custom_op

    from vllm_gaudi.layers import register_layers

    register_layers()
    # Importing every module registers a Gaudi's layers too; no other test of this process may be given those.
    monkeypatch.setattr(custom_op, "op_registry_oot", dict(custom_op.op_registry_oot))
    missing = set(overridden()) - {row.symbol for row in ROWS}
    assert not missing, f"no row in tests/support/vllm_contract.py for {sorted(missing)}"


POOL = "vllm.v1.core.block_pool.BlockPool"
NEW = "vllm.v1.core.sched.output.NewRequestData"


@pytest.mark.parametrize(
    ("row", "record", "words"),
    [
        (Row(f"{POOL}.gone", "x"), {f"{POOL}.gone": "(self)"}, "is gone"),
        (Row(f"{POOL}.touch", "x"), {f"{POOL}.touch": "(self)"}, "is (self, blocks) and was (self)"),
        (Row(f"{POOL}.touch", "x"), {f"{POOL}.touch": "(self, blocks=...)"}, "and was (self, blocks=...)"),
        (Row(f"{POOL}.touch", "x"), {f"{POOL}.touch": "property"}, "and was property"),
        (Row(f"{POOL}.touch", "x"), {}, "is not recorded"),
        (Row(NEW, "x", fields=("req_id", "gone")), {NEW: ["req_id", "gone"]}, "has no field gone"),
    ],
)
def test_drift_is_said(row: Row, record: vllm_contract.Record, words: str) -> None:
    found = vllm_contract.drift(row, record)
    assert found is not None and words in found


def test_a_field_that_nobody_reads_is_no_drift() -> None:
    assert vllm_contract.drift(Row(NEW, "x", fields=("req_id",)), {NEW: ["req_id", "dropped_since"]}) is None


def test_parameters_are_recorded_with_their_kinds_and_without_the_values_of_defaults() -> None:
    def function(a: int, /, b: str, c: object = object(), *rest: int, d: int, e: int = 3, **more: str) -> None: ...

    assert vllm_contract._parameters(function) == "(a, /, b, c=..., *rest, d, e=..., **more)"


def test_recording_replaces_the_former_record_and_prints_the_difference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after an upgrade: one field is new, one symbol has other parameters, one is gone, the others are the same."""
    former = {**RECORD, NEW: list(RECORD[NEW])[1:], f"{POOL}.touch": "(self, request)", f"{POOL}.gone": "(self)"}
    (tmp_path / "vllm-0.29.0.json").write_text(json.dumps(dict(sorted(former.items())), indent=1))
    monkeypatch.setattr(vllm_contract, "FOLDER", tmp_path)
    lines = [line for line in vllm_contract.record().splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert lines == [
        f'- "{POOL}.gone": "(self)",',
        f'- "{POOL}.touch": "(self, request)",',
        f'+ "{POOL}.touch": "(self, blocks)",',
        f'+  "{RECORD[NEW][0]}",',
    ]
    assert [path.name for path in tmp_path.iterdir()] == [f"vllm-{vllm_gaudi.VLLM_RELEASE}.json"]
    assert vllm_contract.recorded() == RECORD
    assert "nothing has changed" in vllm_contract.record()
