# SPDX-License-Identifier: Apache-2.0
"""The table of ops: both variants of an op take the same arguments, and the device decides once."""

import dataclasses
import inspect
import subprocess
import sys
import typing

import pytest

from vllm_gaudi.ops import registry


def test_every_row_is_a_field_and_every_field_a_row():
    assert [field.name for field in dataclasses.fields(registry.Ops)] == list(registry.TABLE)


@pytest.mark.parametrize("name", registry.TABLE)
def test_a_cpu_variant_takes_what_the_hpu_variant_takes_and_hints(name):
    cpu, hpu = (registry.resolve(name, variant) for variant in ("cpu", "hpu"))
    shared = inspect.signature(hpu).parameters.values()
    added = [one for one in inspect.signature(cpu).parameters.values() if one not in shared]
    assert all(one.kind is one.KEYWORD_ONLY and one.default is not one.empty for one in added), "hints may be left out"
    assert (cpu is hpu) == (registry.TABLE[name][1] is None)
    for function in (cpu, hpu):
        assert function.__name__ == name
        assert function.__doc__


@pytest.mark.parametrize("name", [name for name, (_, hpu) in registry.TABLE.items() if hpu is not None])
def test_variants_follow_the_contract_that_their_package_states(name):
    contract = typing.get_type_hints(registry.Ops)[name]
    assert contract.__doc__ and contract.__module__ == registry.TABLE[name][0].rpartition(".")[0]
    parameters = list(inspect.signature(contract.__call__).parameters.values())[1:]
    assert parameters == list(inspect.signature(registry.resolve(name, "hpu")).parameters.values())


def test_a_host_without_gaudi_gets_cpu_variants_and_imports_no_hpu_file():
    script = (
        "import sys; from vllm_gaudi.ops.registry import TABLE, get_ops, resolve; ops = get_ops();"
        "assert all(getattr(ops, n) is resolve(n, 'cpu') for n in TABLE);"
        "assert get_ops() is ops;"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('vllm', 'habana_frameworks') or m.endswith('hpu')];"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={"VLLM_USE_FAKE_HPU": "1", "PATH": ""})


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no op named 'conv'"):
        registry.resolve("conv", "cpu")
    with pytest.raises(ValueError, match="no variant named 'cuda'"):
        registry.resolve("experts", "cuda")  # type: ignore[arg-type]


def test_the_choice_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        registry.get_ops().experts = None  # type: ignore[misc, assignment]
