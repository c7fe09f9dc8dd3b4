# SPDX-License-Identifier: Apache-2.0
"""The operator contract: every operator of a step, of every model family, on the host's path and on Gaudi's.

Two processes record a load that reaches every phase: one as it is, one with the stub of Gaudi's bridge in sight, so
that the variants for Gaudi run (on CPU tensors). What they ask for is the table of ``tests.support.operator_table``,
row for row, and breaks no rule. Where a list of the operators that the bridge registers is at hand, the table is held
to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests import with_stub
from tests.support.operator_recorder import OperatorRecorder, watch
from tests.support.operator_table import EXEMPTIONS, OPERATORS
from vllm_gaudi import device
from vllm_gaudi.testing.engine import engine, greedy

pytestmark = pytest.mark.execution_mode("hpu_like")

FAMILIES = ("q35_dense", "q35_moe", "next_moe", "llama")
IN_A_SOAK = (*FAMILIES, "q35_vl", "q35_moe_vl", "qwen3", "qwen3_moe")  # what these ask for, others ask for too
REGISTERED = Path(__file__).resolve().parents[3] / "shared" / "hpu" / "hpu_ops_1.19.json"
PATHS = ("host", "gaudi")
TOKENS = "vllm_gaudi.v1.worker.sampling:tokens"

Record = dict[str, Any]


@pytest.fixture(scope="module")
def recorded(
    checkpoint: Callable[..., Path],
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
    worker_id: str,
) -> dict[str, Record]:
    """What both paths ask of the device, by path. It takes minutes: the processes of one run share it."""
    base = tmp_path_factory.getbasetemp()
    file = (base if worker_id == "master" else base.parent) / "operators.json"
    with FileLock(f"{file}.lock"):
        if not file.is_file():
            names = IN_A_SOAK if pytestconfig.getoption("--soak") else FAMILIES
            directories = [str(checkpoint(name)) for name in names]
            command = ("-m", "tests.support.record_operators", *directories)
            quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_SKIP_WARMUP": "1", "VLLM_GAUDI_COMPILE": "none"}
            found = {
                "host": with_stub.facts(*command, with_stub=False, **quiet),
                "gaudi": with_stub.facts(*command, "--tensors-on-cpu", **quiet),
            }
            file.write_text(json.dumps(found))
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.random  # a soak has more families
@pytest.mark.parametrize("path", PATHS)
def test_no_step_breaks_a_rule(recorded, path):
    assert recorded[path]["violations"] == {}


@pytest.mark.random
@pytest.mark.parametrize("path", PATHS)
def test_what_is_asked_for_is_the_table(recorded, path):
    """A new operator, and a row that nothing asks for any more, are both named."""
    wanted = {name for name, row in OPERATORS.items() if row.path in ("", path)}
    assert set(recorded[path]["phases"]) == wanted


def test_the_phases_of_a_row_are_those_in_which_it_is_asked_for(recorded):
    found: dict[str, set[str]] = {}
    for path in PATHS:
        for name, phases in recorded[path]["phases"].items():
            found.setdefault(name, set()).update(phases)
    assert found == {name: set(row.phases.split()) for name, row in OPERATORS.items()}


def test_every_exception_is_needed(recorded):
    """The lists stay short: what nothing uses any more is a row to take out."""
    dtypes = [item for path in PATHS for item in recorded[path]["dtypes"].items()]
    used = {name.split(".")[1] for name, seen in dtypes if "int64" in seen}
    assert {*EXEMPTIONS.int64, *EXEMPTIONS.int64_moves} <= used


@pytest.mark.parametrize("path", PATHS)
def test_the_host_waits_once_a_step(recorded, path):
    found = recorded[path]
    assert found["steps"] > 100
    assert 0 < found["reads"][TOKENS] == found["awaited"] <= found["steps"]
    assert set(found["reads"]) == {TOKENS}


def test_without_async_scheduling_it_waits_for_the_same_copy(checkpoint):
    with engine(checkpoint("q35_dense"), async_scheduling=False) as serving, watch(serving.runner, EXEMPTIONS) as seen:
        serving.generate([list(range(20, 60))], greedy(5))
    assert seen.record.violations == {}
    assert set(seen.record.reads) == {TOKENS} and seen.record.num_sampled == 5
    assert seen.record.reads[TOKENS] == seen.record.num_awaited == 5 + 4  # for the answer, and in the next step again


def wait_for_the_device(store: Any) -> None:
    device.synchronize()


def wait_for_a_copy(store: Any) -> None:
    device.HostCopy(torch.zeros(1)).get()


@pytest.mark.parametrize("fault", [wait_for_the_device, wait_for_a_copy])
def test_a_wait_that_no_operator_shows_is_found(fault, checkpoint, monkeypatch):
    with engine(checkpoint("q35_dense")) as serving:
        before_forward = serving.runner.step.store.before_forward
        monkeypatch.setattr(
            serving.runner.step.store,
            "before_forward",
            lambda plan: (fault(serving.runner.step.store), before_forward(plan)),
        )
        with watch(serving.runner, EXEMPTIONS) as seen:
            serving.generate([list(range(20, 60))], greedy(2))
    assert {violation.rule for violation in seen.record.violations} == {"the host waits for the device"}
    assert {violation.phase for violation in seen.record.violations} == {"store"}


def test_an_index_of_our_own_operators_is_looked_at(checkpoint, monkeypatch):
    with engine(checkpoint("q35_dense"), enable_prefix_caching=True) as serving:
        seen = OperatorRecorder(serving.runner, EXEMPTIONS)
        page, rows = torch.zeros(4, 2, dtype=torch.int32), torch.tensor([1, 4], dtype=torch.int32)
        with seen.phase("store"):
            ours = torch.ops.vllm_gaudi
            seen.check_indices(ours.zero_rows_.default, ([page], rows))
            seen.check_indices(ours.copy_rows_.default, ([page], [page], rows - 1, rows - 2))
    assert [(violation.operator, violation.detail) for violation in seen.record.violations] == [
        ("vllm_gaudi.zero_rows_.default", "1..4 into 4"),
        ("vllm_gaudi.copy_rows_.default", "-1..2 into 4"),
    ]


# What a regression would look like


def insert_through_a_view(k_cache, v_cache, key, value, slot_mapping):
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.flatten(1).index_copy_(0, slot_mapping, new.flatten(1))


def insert_where_true(k_cache, v_cache, key, value, slot_mapping):
    keep = slot_mapping >= 0
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.index_copy_(0, slot_mapping[keep], new[keep])


def insert_after_a_look(k_cache, v_cache, key, value, slot_mapping):
    if slot_mapping.max().item() >= 0:
        k_cache.index_copy_(0, slot_mapping, key)
        v_cache.index_copy_(0, slot_mapping, value)


def insert_by_long_sums(k_cache, v_cache, key, value, slot_mapping):
    k_cache.index_copy_(0, slot_mapping + 1 - 1, key)
    v_cache.index_copy_(0, slot_mapping, value)


FAULTS = {
    "a write through a view in a compiled region": insert_through_a_view,
    "the shape depends on data": insert_where_true,
    "the host waits for the device": insert_after_a_look,
    "int64 arithmetic": insert_by_long_sums,
}


@pytest.mark.parametrize("rule", FAULTS)
def test_an_operator_that_breaks_a_rule_is_found_in_a_running_engine(rule, checkpoint, monkeypatch):
    with engine(checkpoint("qwen3")) as serving:
        from vllm_gaudi.ops.registry import get_ops

        monkeypatch.setitem(get_ops().__dict__, "reshape_and_cache", FAULTS[rule])
        with watch(serving.runner, EXEMPTIONS) as seen:
            serving.generate([list(range(20, 60))], greedy(3))
    found = {violation.rule for violation in seen.record.violations}
    assert rule in found, found


# The bridge


def registered_name(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


@pytest.mark.skipif(not REGISTERED.is_file(), reason="no list of the bridge's operators beside this checkout")
def test_the_bridge_registers_what_gaudis_path_asks_for(recorded):
    """In release 1.19, the last one whose sources are public; what it lacks needs its reason in the table."""
    registered = json.loads(REGISTERED.read_text())
    short = {"float32": "Float", "int32": "Int", "int64": "Long", "bool": "Bool", "bfloat16": "BFloat16"}
    for name, row in OPERATORS.items():
        if row.path == "host" or not name.startswith("aten."):
            continue
        key = registered_name(name)
        assert bool(row.made_of) == (key not in registered), name
        dtypes = registered.get(key, {}).get("dtypes")
        if isinstance(dtypes, dict):
            dtypes = dtypes["Gaudi2"]
        if isinstance(dtypes, list):
            # int64 is int32 on the device, and a mask is a byte.
            known = {*dtypes, "Long", "Bool"} if "Int" in dtypes else set(dtypes)
            assert {short[dtype] for dtype in recorded["gaudi"]["dtypes"][name]} <= known, name


def test_torch_itself_makes_what_the_bridge_does_not_register():
    """Such an operator has a kernel that works on any device, or is made of others before a device is asked."""
    for name, row in OPERATORS.items():
        if not row.made_of:
            continue
        operator = f"aten::{registered_name(name)}"
        keys = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
        assert any(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key) for key in keys), name
