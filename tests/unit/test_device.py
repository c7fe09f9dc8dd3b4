# SPDX-License-Identifier: Apache-2.0
"""The device module: its host twin for real, its HPU side against a stand-in for ``torch.hpu`` and for the bridge."""

from __future__ import annotations

import contextlib
import threading
import types
from pathlib import Path

import pytest
import torch

from tests import with_stub
from vllm_gaudi import device

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

    def test_everything_inside_compile_only_runs(self):
        with device.compile_only() as nothing_runs:
            assert nothing_runs is False

    def test_a_host_needs_no_call_before_it_is_used(self):
        assert device.is_initialized()

    def test_a_seed_gives_the_same_numbers_again(self):
        device.seed_all(3)
        first = torch.rand(4)
        device.seed_all(3)
        assert torch.equal(torch.rand(4), first)


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
        self.free = 30

        class Event:
            def record(self):
                log.append("record")

            def synchronize(self):
                log.append("wait for the event")

        class Stream:
            def wait_stream(self, other):
                log.append(f"copies wait for {other}")

        @contextlib.contextmanager
        def stream(it):
            log.append("on the copies' stream")
            yield
            log.append("off it")

        hpu = types.SimpleNamespace(
            Event=Event,
            Stream=Stream,
            stream=stream,
            current_stream=lambda: "the computing stream",
            synchronize=lambda: log.append("synchronize"),
            mem_get_info=lambda: (self.free * MIB, 100 * MIB),
            reset_peak_memory_stats=lambda: log.append("reset peak"),
            memory_allocated=lambda: 60 * MIB,
            max_memory_allocated=lambda: 85 * MIB,
        )
        device._copy_stream.cache_clear()
        monkeypatch.setattr(device, "is_hpu", lambda: True)
        monkeypatch.setattr(device, "_torch_hpu", lambda: hpu)
        yield
        device._copy_stream.cache_clear()

    def test_names(self):
        assert device.device_type() == "hpu"
        assert device.distributed_backend() == "hccl"

    def test_synchronize(self):
        device.synchronize()
        assert self.log == ["synchronize"]

    def test_a_host_copy_does_not_wait_before_it_is_asked_and_then_once(self):
        copy = device.HostCopy(FakeTensor(self.log))
        assert self.log == [
            "copies wait for the computing stream",
            "on the copies' stream",
            "copy to cpu, non_blocking=True",
            "record",
            "off it",
        ]
        assert copy.get() == "on the host"
        assert copy.get() == "on the host"
        assert self.log[5:] == ["wait for the event"]

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

    @pytest.mark.parametrize(("free_at_the_end", "peak_mib"), [(30, 25), (2, 28), (60, 25)])
    def test_a_peak_is_that_of_the_meter_that_saw_more(self, free_at_the_end, peak_mib):
        with device.PeakMemory() as peak:
            self.free = free_at_the_end
        assert peak.bytes == peak_mib * MIB

    def test_what_the_driver_holds_beside_the_weights_is_taken_too(self):
        assert device.taken_memory(60 * MIB) == 70 * MIB and device.taken_memory(80 * MIB) == 80 * MIB


REPORT = """
from vllm_gaudi import device
print(device.device_type(), device.distributed_backend(), device.is_initialized())
device.initialize()
device.synchronize()
device.seed_all(5)
print(device.is_initialized())
if device.is_hpu():
    from habana_frameworks import calls
    print(device.bridge().__name__, device.kernels().__name__, device.normalization().__name__)
    print([name for name in calls.names() if name in ("import", "synchronize", "manual_seed_all")])
    with device.compile_only() as nothing_runs:
        print(nothing_runs, calls.of("env_setting"))
    print(calls.of("env_setting")[1:])
from vllm_gaudi.ops.registry import get_ops
print(get_ops().reshape_and_cache.__module__)
"""


def test_with_the_bridge_importable_the_device_is_hpu():
    flag = "{'flag': 'PT_COMPILE_ONLY_MODE', 'value': %s}"
    assert with_stub.forked("-c", REPORT).splitlines() == [
        "hpu hccl False",
        "True",
        "habana_frameworks.torch habana_frameworks.torch.hpex.kernels habana_frameworks.torch.hpex.normalization",
        "['import', 'synchronize', 'manual_seed_all']",
        f"True [{flag % True}]",
        f"[{flag % False}]",
        "vllm_gaudi.ops.paged_attention.hpu",
    ]


def test_the_user_may_ask_for_the_host_beside_the_bridge():
    lines = with_stub.forked("-c", REPORT, VLLM_USE_FAKE_HPU="1").splitlines()
    assert lines == ["cpu gloo True", "True", "vllm_gaudi.ops.paged_attention.cpu"]


def test_importing_the_package_imports_neither_torch_nor_vllm_nor_the_bridge():
    script = (
        "import sys, vllm_gaudi, vllm_gaudi.envs, vllm_gaudi.device, vllm_gaudi.capabilities, vllm_gaudi.compat\n"
        "print(sorted({'torch', 'vllm', 'numpy', 'habana_frameworks'} & set(sys.modules)))"
    )
    assert with_stub.run("-c", script).splitlines() == ["[]"]


# Prints which of the bridge's variables stand after imports, what the bridge found, and what stands at the end.
VARIABLES = """
import json, os
import vllm_gaudi
from vllm_gaudi import device
from vllm_gaudi.ops import registry
def now(): return {name: os.environ[name] for name in device.BRIDGE_DEFAULTS if name in os.environ}
imported = now()
device.initialize()
found = {}
if device.is_hpu():
    from habana_frameworks import calls
    found = {name: calls.ENVIRONMENT_AT_IMPORT.get(name) for name in device.BRIDGE_DEFAULTS}
print("FACTS " + json.dumps({"imported": imported, "found": found, "end": now()}))
"""
DEFAULTS = {name: value for name, (value, _) in device.BRIDGE_DEFAULTS.items()}


def test_the_bridge_finds_its_variables_when_it_is_imported_and_our_imports_set_none():
    assert len(DEFAULTS) == 6 and DEFAULTS["PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE"] == "0"
    assert with_stub.facts("-c", VARIABLES) == {"imported": {}, "found": DEFAULTS, "end": DEFAULTS}


def test_what_the_user_set_stays():
    asked = dict.fromkeys(list(DEFAULTS)[::2], "the user's")
    wanted = {**DEFAULTS, **asked}
    assert with_stub.facts("-c", VARIABLES, **asked) == {"imported": asked, "found": wanted, "end": wanted}


@pytest.mark.parametrize("is_stubbed", [True, False], ids=["VLLM_USE_FAKE_HPU", "absent"])
def test_a_host_sets_no_variable(is_stubbed):
    found = with_stub.facts("-c", VARIABLES, with_stub=is_stubbed, VLLM_USE_FAKE_HPU="1")
    assert found == {"imported": {}, "found": {}, "end": {}}


def test_lazy_mode_is_refused_by_the_process_that_owns_the_device():
    script = (
        "from vllm_gaudi import device\n"
        "try: device.initialize()\n"
        "except RuntimeError as refused: print(refused, device.is_initialized())"
    )
    (line,) = with_stub.forked("-c", script, PT_HPU_LAZY_MODE="1").splitlines()
    assert "lazy mode" in line and "PT_HPU_LAZY_MODE" in line and line.endswith("False")
