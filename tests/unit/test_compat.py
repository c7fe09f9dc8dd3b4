# SPDX-License-Identifier: Apache-2.0
"""Changes to the host: each row has a test here that fails when the row can go, and each change does what its row says.

What a row is for is shown on the unchanged host (a fresh process where a module must be imported for it). When such a
test fails, the host has been repaired: take the row, its function and its test out.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from tests import with_stub
from vllm_gaudi import capabilities, compat, device, envs


def host_file(package: str, path: str) -> Path:
    """A source file of an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / path


def run(script: str) -> subprocess.CompletedProcess[str]:
    return with_stub.fork(("-c", script), with_stub.environment(False))


@pytest.mark.parametrize("row", compat.ROWS, ids=lambda row: row.test)
def test_every_row_has_its_test_and_every_field(row):
    assert callable(globals().get(row.test))
    for field in dataclasses.fields(row):
        assert getattr(row, field.name).strip(), field.name


def test_no_test_serves_two_rows():
    tests = [row.test for row in compat.ROWS]
    assert len(set(tests)) == len(tests)


# torchvision


def test_torchvision_fails_without_the_schemas():
    done = run("import torch, torchvision")
    assert done.returncode != 0
    assert "operator torchvision::nms does not exist" in done.stderr
    # vLLM still imports it with the model file, through transformers.
    chain = (
        ("vllm", "model_executor/models/qwen3_5.py", "qwen3_vl"),
        ("vllm", "model_executor/models/qwen3_vl.py", "transformers.models.qwen2_vl.image_processing_qwen2_vl"),
        ("transformers", "models/qwen2_vl/image_processing_qwen2_vl.py", "torchvision.transforms.v2"),
    )
    for package, path, imported in chain:
        body = ast.parse(host_file(package, path).read_text()).body
        assert imported in [node.module for node in body if isinstance(node, ast.ImportFrom)], path


def test_torchvision_can_be_imported_with_the_schemas():
    done = run(
        "from vllm_gaudi import compat\n"
        "compat.define_torchvision_schemas()\n"
        "compat.define_torchvision_schemas()\n"
        "import torch, torchvision\n"
        "from torchvision.transforms.v2 import functional\n"
        "print(torch.ops.torchvision.nms.default._schema)\n"
        "compat.define_torchvision_schemas()"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor\n"


@pytest.mark.parametrize("case", ["no torchvision", "torchvision imported", "torch for CUDA", "torchvision for CPU"])
def test_schemas_are_left_alone_where_they_are_not_missing(monkeypatch, case):
    def library(*_):
        raise AssertionError("a schema is defined")

    monkeypatch.setattr(compat, "_torchvision_library", None)
    monkeypatch.setattr(torch.library, "Library", library)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    if case == "no torchvision":
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    elif case == "torchvision imported":
        monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    elif case == "torch for CUDA":
        monkeypatch.setattr(torch.version, "cuda", "13.0")
    else:
        monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.28.0+cpu")
    compat.define_torchvision_schemas()
    assert compat._torchvision_library is None


# Environment variables


@pytest.fixture
def vllm_envs(monkeypatch):
    """vLLM's own module of variables, from its file, under another name: vLLM itself stays unimported."""
    spec = importlib.util.spec_from_file_location("vllm_envs_alone", host_file("vllm", "envs.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    return module


def test_vllm_takes_no_environment_variables_of_a_plugin(monkeypatch, vllm_envs):
    monkeypatch.setenv("VLLM_GAUDI_POISON", "1")
    with pytest.raises(ValueError, match="Unknown vLLM environment variable detected: VLLM_GAUDI_POISON"):
        vllm_envs.validate_environ(hard_fail=True)
    doors = [name for name, value in vars(vllm_envs).items() if callable(value) and "regist" in name.lower()]
    assert not doors, f"vLLM's envs module now has {doors}"
    platform = ast.parse(host_file("vllm", "platforms/interface.py").read_text())
    methods = {node.name for node in ast.walk(platform) if isinstance(node, ast.FunctionDef)}
    doors = [name for name in methods if "environ" in name or ("env" in name.split("_") and "register" in name)]
    assert not doors, f"vLLM's platform interface now has {doors}"


def test_our_variables_are_known_after_registration_and_vllms_stay_its_own(monkeypatch, vllm_envs):
    host = types.ModuleType("vllm")
    host.envs = vllm_envs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", host)
    monkeypatch.setitem(sys.modules, "vllm.envs", vllm_envs)
    before = dict(vllm_envs.environment_variables)
    for _ in range(2):
        compat.register_environment_variables()
    after = vllm_envs.environment_variables
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {n for n in envs.TABLE if n.startswith("VLLM_")} - set(before)
    for name in ("VLLM_SKIP_WARMUP", "VLLM_GAUDI_POISON", "VLLM_CONTIGUOUS_PA"):
        monkeypatch.setenv(name, "1")
    vllm_envs.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_GAUDI_POISON", "0")
    assert after["VLLM_SKIP_WARMUP"]() is True
    assert after["VLLM_GAUDI_POISON"]() is False
    assert after["VLLM_GAUDI_HOST_MEMORY_GIB"]() == 4.0


# torch.accelerator

ACCELERATOR_CALLS = ("synchronize", "empty_cache", "empty_host_cache")


@pytest.fixture
def accelerator(monkeypatch):
    """torch.accelerator as torch has it, whatever a test of before has done; put back afterwards."""
    pristine = importlib.util.find_spec("torch.accelerator")
    assert pristine is not None and pristine.loader is not None
    module = importlib.util.module_from_spec(pristine)
    pristine.loader.exec_module(module)
    for name in ACCELERATOR_CALLS:
        monkeypatch.setattr(torch.accelerator, name, getattr(module, name))
    return torch.accelerator


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this host has an accelerator")
def test_torch_accelerator_raises_without_an_accelerator(accelerator):
    for name in ACCELERATOR_CALLS:
        with pytest.raises(RuntimeError, match="accelerator"):
            getattr(accelerator, name)()
    shutdown = host_file("vllm", "distributed/parallel_state.py").read_text()
    assert "torch.accelerator.empty_cache()" in shutdown
    assert "torch.accelerator.empty_host_cache()" in shutdown


def test_accelerator_calls_become_harmless(monkeypatch, accelerator):
    monkeypatch.setattr(accelerator, "is_available", lambda: False)
    monkeypatch.setattr(device, "is_hpu", lambda: False)
    for _ in range(2):
        compat.patch_torch_accelerator()
    for name in ACCELERATOR_CALLS:
        assert getattr(accelerator, name)() is None
    accelerator.synchronize(torch.device("cpu"))
    # vLLM tells them apart by identity when it saves and restores them.
    assert len({id(getattr(accelerator, name)) for name in ACCELERATOR_CALLS}) == len(ACCELERATOR_CALLS)


def test_synchronize_waits_for_the_device_on_an_hpu(monkeypatch, accelerator):
    waited = []
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(device, "is_hpu", lambda: True)
    monkeypatch.setattr(device, "synchronize", lambda: waited.append(True))
    compat.patch_torch_accelerator()
    accelerator.synchronize()
    assert waited == [True]


def test_an_accelerator_that_works_is_left_alone(monkeypatch, accelerator):
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(device, "is_hpu", lambda: False)
    before = [getattr(accelerator, name) for name in ACCELERATOR_CALLS]
    compat.patch_torch_accelerator()
    assert [getattr(accelerator, name) for name in ACCELERATOR_CALLS] == before


def test_dynamo_s_limit_is_below_the_ladder():
    """Eight shapes of one function; a small engine's buckets has some dozens, and every layer of a kind counts."""
    import torch._dynamo.config as config

    names = ("recompile_limit", "accumulated_recompile_limit")
    assert config.recompile_limit <= 64
    with config.patch({name: getattr(config, name) for name in names}):  # a monkeypatch would leave them deleted
        compat.raise_recompile_limit(1000)
        assert config.recompile_limit == config.accumulated_recompile_limit == 1000
        compat.raise_recompile_limit(10)
        assert config.recompile_limit == 1000
    assert config.recompile_limit <= 64


def test_vllm_s_attention_cannot_be_registered_and_looks_itself_up_by_name():
    tree = ast.parse(host_file("vllm", "model_executor/layers/attention/attention.py").read_text())
    attention = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Attention")
    assert {ast.unparse(base) for base in attention.bases} == {"nn.Module", "AttentionLayerBase"}
    assert not [ast.unparse(decorator) for decorator in attention.decorator_list]
    forward = next(node for node in attention.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call)]
    direct = [call for call in calls if ast.unparse(call.func) == "unified_attention_with_output"]
    assert len(direct) == 1 and "self.layer_name" in [ast.unparse(argument) for argument in direct[0].args]


def test_a_layer_is_extended_by_a_subclass_of_its_own_class_only():
    class Layer:
        def __init__(self):
            self.held = 1

    class Extended(Layer):
        def twice(self):
            return 2 * self.held

    layer = Layer()
    for _ in range(2):
        compat.patch_layer_class(layer, Extended)
    assert layer.twice() == 2
    with pytest.raises(TypeError, match="int is no subclass of Extended"):
        compat.patch_layer_class(layer, int)


# Statistics


def test_vllm_s_statistics_have_no_field_for_a_plugin():
    tree = ast.parse(host_file("vllm", "v1/metrics/stats.py").read_text())
    stats = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SchedulerStats")
    fields = {
        ast.unparse(node.target): ast.unparse(node.annotation) for node in stats.body if type(node) is ast.AnnAssign
    }
    assert fields["waiting_lora_adapters"] == "dict[str, int]"
    words = ("plugin", "custom", "extra", "additional", "platform")
    assert not [name for name in fields if any(word in name for word in words)]


def test_vllm_reads_the_field_that_carries_our_counts_with_lora_only():
    tree = ast.parse(host_file("vllm", "v1/metrics/loggers.py").read_text())
    guards = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "gauge_lora_info is not None" in ast.unparse(n.test)
    ]
    guarded = {id(inner) for guard in guards for inner in ast.walk(guard)}
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "waiting_lora_adapters"]
    assert reads
    assert all(id(read) in guarded for read in reads)
    assert "lora" in {row.name for row in capabilities.TABLE}
