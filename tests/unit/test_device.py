# SPDX-License-Identifier: Apache-2.0
"""The device module: its host twin for real, its HPU side against a stand-in for ``torch.hpu`` and for the bridge."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from vllm_gaudi import device

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


class TestHost:
    @pytest.fixture(autouse=True)
    def _host(self, monkeypatch):
        monkeypatch.setattr(device, "is_hpu", lambda: False)

    def test_names(self):
        assert device.device_type() == "cpu"
        assert device.distributed_backend() == "gloo"

    def test_nothing_to_initialise_or_wait_for(self):
        assert device.initialize() is None
        assert device.synchronize() is None

    def test_a_host_copy_gives_the_tensor_again_and_again_from_any_thread(self):
        tensor = torch.arange(5)
        copy = device.HostCopy(tensor)
        got = []
        thread = threading.Thread(target=lambda: got.append(copy.get()))
        thread.start()
        thread.join()
        assert torch.equal(copy.get(), torch.arange(5))
        assert torch.equal(got[0], torch.arange(5))

    def test_total_memory_is_what_the_variable_says(self, monkeypatch):
        monkeypatch.setenv("VLLM_GAUDI_HOST_MEMORY_GIB", "1.5")
        assert device.total_memory() == 1536 * MIB

    def test_used_memory_is_that_of_this_process(self):
        assert 20 * MIB < device.used_memory() < 64 * 1024 * MIB

    def test_peak_memory_sees_an_allocation_that_is_gone_at_the_end(self):
        with device.PeakMemory() as peak:
            block = torch.ones(64 * MIB, dtype=torch.uint8)
            del block
        assert 48 * MIB < peak.bytes < 128 * MIB

    def test_peak_memory_of_nothing_is_next_to_nothing(self):
        block = torch.ones(64 * MIB, dtype=torch.uint8)  # an older, higher peak
        del block
        with device.PeakMemory() as peak:
            pass
        if _can_reset_the_peak():
            assert peak.bytes < 16 * MIB
        assert peak.bytes >= 0

    def test_peak_memory_is_taken_also_when_the_run_fails(self):
        peak = device.PeakMemory()
        with pytest.raises(ZeroDivisionError), peak:
            block = torch.ones(64 * MIB, dtype=torch.uint8)
            del block
            raise ZeroDivisionError
        assert peak.bytes > 48 * MIB

    def test_a_missing_status_field_is_said(self):
        with pytest.raises(RuntimeError, match="VmNothing"):
            device._status_kib("VmNothing")

    def test_no_bridge_variable_is_set(self, monkeypatch):
        monkeypatch.delenv("PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE", raising=False)
        device.set_graph_defaults()
        assert "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE" not in os.environ


def _can_reset_the_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class FakeTensor:
    """Notes when it is copied; ``log`` is shared with the event that must come after."""

    def __init__(self, log):
        self.log = log

    def to(self, target, non_blocking):
        self.log.append(f"copy to {target}, non_blocking={non_blocking}")
        return "on the host"


class TestHpu:
    @pytest.fixture(autouse=True)
    def _hpu(self, monkeypatch):
        self.log = log = []

        class Event:
            def record(self):
                log.append("record")

            def synchronize(self):
                log.append("wait for the event")

        hpu = types.SimpleNamespace(
            Event=Event,
            synchronize=lambda: log.append("synchronize"),
            mem_get_info=lambda: (30 * MIB, 100 * MIB),
            reset_peak_memory_stats=lambda: log.append("reset peak"),
            max_memory_allocated=lambda: 95 * MIB,
        )
        monkeypatch.setattr(device, "is_hpu", lambda: True)
        monkeypatch.setattr(device, "_torch_hpu", lambda: hpu)

    def test_names(self):
        assert device.device_type() == "hpu"
        assert device.distributed_backend() == "hccl"

    def test_synchronize(self):
        device.synchronize()
        assert self.log == ["synchronize"]

    def test_a_host_copy_does_not_wait_before_it_is_asked_and_then_once(self):
        copy = device.HostCopy(FakeTensor(self.log))
        assert self.log == ["copy to cpu, non_blocking=True", "record"]
        assert copy.get() == "on the host"
        assert copy.get() == "on the host"
        assert self.log[2:] == ["wait for the event"]

    def test_a_host_copy_lets_the_device_tensor_go_when_it_has_arrived(self):
        copy = device.HostCopy(FakeTensor(self.log))
        assert any(isinstance(value, FakeTensor) for value in vars(copy).values())
        copy.get()
        assert not any(isinstance(value, FakeTensor) for value in vars(copy).values())

    def test_memory_figures_are_the_devices(self):
        assert device.total_memory() == 100 * MIB
        assert device.used_memory() == 70 * MIB
        with device.PeakMemory() as peak:
            assert self.log == ["reset peak"]
        assert peak.bytes == 25 * MIB

    def test_the_bridge_variable_is_set_where_the_user_set_none(self, monkeypatch):
        name = "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE"
        monkeypatch.setenv(name, "1")
        device.set_graph_defaults()
        assert os.environ[name] == "1"
        monkeypatch.delenv(name)
        device.set_graph_defaults()
        assert os.environ[name] == "0"


STUB = """
import torch, types
torch.hpu = types.SimpleNamespace(synchronize=lambda: print("synchronised"))
"""

REPORT = """
from vllm_gaudi import device
print(device.device_type(), device.distributed_backend())
if device.is_hpu():
    device.initialize()
    device.synchronize()
    print(device.bridge().__name__, device.kernels().__name__)
from vllm_gaudi.ops.registry import load_ops
print(load_ops().insert_kv.__module__)
"""


@pytest.fixture
def run_with_a_bridge(tmp_path):
    """Runs a script in a process whose path has a stub of the bridge; returns the lines that it printed."""
    package = tmp_path / "habana_frameworks" / "torch"
    kernels = package / "hpex" / "kernels"
    kernels.mkdir(parents=True)
    for folder in (package.parent, package / "hpex", kernels):
        (folder / "__init__.py").write_text("")
    (package / "__init__.py").write_text(STUB)

    def run(script: str, **variables: str) -> list[str]:
        environment = {**os.environ, **variables, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_with_the_bridge_importable_the_device_is_hpu(run_with_a_bridge):
    assert run_with_a_bridge(REPORT, VLLM_USE_FAKE_HPU="0") == [
        "hpu hccl",
        "synchronised",
        "habana_frameworks.torch habana_frameworks.torch.hpex.kernels",
        "vllm_gaudi.ops.paged_attention_hpu",
    ]


def test_the_user_may_ask_for_the_host_beside_the_bridge(run_with_a_bridge):
    assert run_with_a_bridge(REPORT, VLLM_USE_FAKE_HPU="1") == ["cpu gloo", "vllm_gaudi.ops.paged_attention"]


def test_importing_the_package_imports_neither_torch_nor_vllm_nor_the_bridge(run_with_a_bridge):
    script = (
        "import sys, vllm_gaudi, vllm_gaudi.envs, vllm_gaudi.device, vllm_gaudi.capabilities, vllm_gaudi.compat\n"
        "print(sorted({'torch', 'vllm', 'numpy', 'habana_frameworks'} & set(sys.modules)))"
    )
    assert run_with_a_bridge(script) == ["[]"]


@pytest.mark.parametrize(
    ("asked", "is_hpu", "backend"),
    [
        (None, False, None),
        (None, True, "hpu_backend"),
        ("none", True, None),
        ("aot_eager", False, "aot_eager"),
        ("inductor", True, "inductor"),
    ],
)
def test_the_backend_of_compiled_layers(monkeypatch, asked, is_hpu, backend):
    monkeypatch.setattr(device, "is_hpu", lambda: is_hpu)
    if asked is None:
        monkeypatch.delenv("VLLM_GAUDI_COMPILE", raising=False)
    else:
        monkeypatch.setenv("VLLM_GAUDI_COMPILE", asked)
    assert device.compile_backend() == backend
