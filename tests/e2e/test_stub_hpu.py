# SPDX-License-Identifier: Apache-2.0
"""The choice between Gaudi and the host, by whole processes: with a stub of Gaudi's bridge, without, and told so.

The stub has the public names that ``vllm_gaudi.device`` uses and computes nothing; what runs on a device is not tested
here. One process each asks vLLM for its platform, as ``vllm serve`` would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Importing the bridge gives torch its ``hpu`` module, as the real one does.
BRIDGE = """
import sys
import types

import torch

hpu = types.ModuleType("torch.hpu")


class Event:
    def record(self): pass
    def synchronize(self): pass


hpu.Event = Event
hpu.is_available = lambda: True
hpu.device_count = lambda: 1
hpu.current_device = lambda: 0
hpu.synchronize = lambda: None
hpu.mem_get_info = lambda device=None: (90 * 2**30, 96 * 2**30)
hpu.reset_peak_memory_stats = lambda: None
hpu.max_memory_allocated = lambda: 7 * 2**30
torch.hpu = hpu
sys.modules["torch.hpu"] = hpu
"""
KERNELS = "class FusedSDPA:\n    pass\n"

FACTS = """
import json
import os
import sys

import vllm_gaudi

light = [name for name in ("torch", "vllm", "numpy", "habana_frameworks") if name in sys.modules]

from vllm.platforms import current_platform
from vllm_gaudi import device
from vllm_gaudi.attention.backend import HPUAttentionBackend, block_size_granule
from vllm_gaudi.ops.registry import Ops, load_ops
from dataclasses import fields

facts = {
    "heavy": light,
    "bridge_before": "habana_frameworks" in sys.modules,
    "platform": type(current_platform).__name__,
    "device_type": current_platform.device_type,
    "device_name": current_platform.device_name,
    "dispatch_key": current_platform.dispatch_key,
    "backend": current_platform.dist_backend,
    "said_name": current_platform.get_device_name(),
    "out_of_tree": current_platform.is_out_of_tree(),
    "communicator": current_platform.get_device_communicator_cls(),
    "granule": block_size_granule(),
    "kernel_blocks": [getattr(size, "base", size) for size in HPUAttentionBackend.get_supported_kernel_block_sizes()],
    "ops": {field.name: getattr(load_ops(), field.name).__module__ for field in fields(Ops)},
}
if device.is_hpu():
    with device.PeakMemory() as peak:
        device.synchronize()
    facts |= {
        "total": current_platform.get_device_total_memory(),
        "used": device.used_memory(),
        "peak": peak.bytes,
        "sdpa": device.kernels().FusedSDPA.__name__,
    }
    device.initialize()
    device.set_graph_defaults()
facts["input_reuse"] = os.environ.get("PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE")

from vllm.engine.arg_utils import EngineArgs

checkpoint = os.environ["CHECKPOINT"]


def configure(**flags):
    try:
        config = EngineArgs(model=checkpoint, max_model_len=512, **flags).create_engine_config()
    except RuntimeError as refused:
        return str(refused)
    return {
        "device": config.device_config.device_type,
        "worker": config.parallel_config.worker_cls,
        "scheduler": config.scheduler_config.scheduler_cls,
    }


facts["config"] = configure(dtype="bfloat16")
facts["block_64"] = configure(dtype="bfloat16", block_size=64)
print("FACTS " + json.dumps(facts))
"""


def facts_of(tmp_path: Path, checkpoint: Path, *, with_stub: bool, **env: str) -> dict[str, Any]:
    """What a new process finds out."""
    if with_stub:
        package = tmp_path / "site" / "habana_frameworks" / "torch"
        (package / "hpex" / "kernels").mkdir(parents=True)
        (package.parent / "__init__.py").write_text("")
        (package / "__init__.py").write_text(BRIDGE)
        (package / "hpex" / "__init__.py").write_text("")
        (package / "hpex" / "kernels" / "__init__.py").write_text(KERNELS)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_USE_FAKE", "PT_HPU", "PYTHONPATH"))}
    environment |= {"CHECKPOINT": str(checkpoint), "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", **env}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FACTS)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("FACTS "))


HOST = {
    "device_type": "cpu",
    "device_name": "cpu",
    "dispatch_key": "CPU",
    "backend": "gloo",
    "granule": 16,
    "kernel_blocks": [16],
    "input_reuse": None,
}
GAUDI = {
    "device_type": "hpu",
    "device_name": "hpu",
    "dispatch_key": "HPU",
    "backend": "hccl",
    "granule": 128,
    "kernel_blocks": [128],
    "said_name": "Intel Gaudi",
    "total": 96 * 2**30,
    "used": 6 * 2**30,
    "peak": 2**30,  # of 7 GiB at most, 6 were in use before
    "sdpa": "FusedSDPA",
    "input_reuse": "0",
}
HPU_OPS = {"insert_kv", "paged_prefill_attention", "paged_decode_attention", "experts"}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {key: found.get(key) for key in expected} == expected


def assert_common(found: dict[str, Any], device_type: str) -> None:
    """What does not depend on the device: the plugin is the platform, imports little, and names its own classes."""
    assert found["heavy"] == [] and found["bridge_before"] is False
    assert (found["platform"], found["out_of_tree"]) == ("HpuPlatform", True)
    assert found["communicator"] == "vllm_gaudi.distributed.hpu_communicator.HpuCommunicator"
    assert found["config"] == {
        "device": device_type,
        "worker": "vllm_gaudi.v1.worker.hpu_worker.HPUWorker",
        "scheduler": "vllm_gaudi.v1.core.sched.hpu_async_scheduler.HPUAsyncScheduler",
    }


def test_with_the_bridge_the_platform_is_gaudi(tmp_path, checkpoint):
    found = facts_of(tmp_path, checkpoint("q35_dense"), with_stub=True)
    assert_common(found, "hpu")
    assert_same(found, GAUDI)
    on_hpu = {name for name, module in found["ops"].items() if module.endswith(("_hpu", ".hpu"))}
    assert on_hpu >= HPU_OPS and {"chunk_gated_delta_rule", "causal_conv1d_prefill"} <= on_hpu
    assert "multiple of 128" in found["block_64"]


@pytest.mark.parametrize("with_stub", [False, True], ids=["absent", "VLLM_USE_FAKE_HPU"])
def test_without_the_bridge_or_told_so_the_platform_is_the_host(tmp_path, checkpoint, with_stub):
    env = {"VLLM_USE_FAKE_HPU": "1"} if with_stub else {}
    found = facts_of(tmp_path, checkpoint("q35_dense"), with_stub=with_stub, **env)
    assert_common(found, "cpu")
    assert_same(found, HOST)
    assert not any(module.endswith(("_hpu", ".hpu")) for module in found["ops"].values())
    assert isinstance(found["block_64"], dict)
