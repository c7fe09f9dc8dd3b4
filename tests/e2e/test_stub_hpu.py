# SPDX-License-Identifier: Apache-2.0
"""What the plugin decides where Gaudi's bridge can be imported, shown with the stub of it (tests/stubs).

Owns: names, layouts, op variants and environment that follow from the device, and an engine that runs as on a Gaudi:
by the HPU variants, compiled by the stub's backend, on CPU tensors. What only a device can show is in
docs/hpu-unproved.md. One process each asks vLLM for its platform, as ``vllm serve`` would.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests import with_stub

pytestmark = pytest.mark.execution_mode("hpu_like")

FACTS = """
import json
import os
import subprocess
import sys

import vllm_gaudi

bridge_before = "habana_frameworks" in sys.modules
from vllm_gaudi import platform  # before vLLM, which asks for this module while it is imported
from vllm.platforms import current_platform
from vllm_gaudi import device
from vllm_gaudi.attention.backend import HPUAttentionBackend
from vllm_gaudi.capabilities import block_size_granule
from vllm_gaudi.ops.registry import Ops, get_ops
from dataclasses import fields

facts = {
    "bridge_before": bridge_before or "habana_frameworks" in sys.modules,
    "platform": type(current_platform).__name__,
    "one_platform": type(current_platform) is platform.HpuPlatform,
    "device_type": current_platform.device_type,
    "device_name": current_platform.device_name,
    "dispatch_key": current_platform.dispatch_key,
    "backend": current_platform.dist_backend,
    "said_name": current_platform.get_device_name(),
    "out_of_tree": current_platform.is_out_of_tree(),
    "communicator": current_platform.get_device_communicator_cls(),
    "granule": block_size_granule(),
    "kernel_blocks": [getattr(size, "base", size) for size in HPUAttentionBackend.get_supported_kernel_block_sizes()],
    "ops": {field.name: getattr(get_ops(), field.name).__module__ for field in fields(Ops)},
}
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

child = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
inherited = json.loads(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
facts["variables_before"] = [name for name in device.BRIDGE_DEFAULTS if name in os.environ or name in inherited]
facts["bridge_after_config"] = "habana_frameworks" in sys.modules
facts["front_end_total"] = current_platform.get_device_total_memory()
device.initialize()
if device.is_hpu():
    with device.PeakMemory() as peak:
        device.synchronize()
    facts |= {
        "total": current_platform.get_device_total_memory(),
        "used": device.used_memory(),
        "peak": peak.bytes,
        "taken": [device.taken_memory(4 * 2**30), device.taken_memory(9 * 2**30)],
        "sdpa": device.kernels().FusedSDPA.__name__,
    }
facts["input_reuse"] = os.environ.get("PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE")
print("FACTS " + json.dumps(facts))
"""


def facts_of(checkpoint: Path, *, is_stubbed: bool, **env: str) -> dict[str, Any]:
    """What a new process finds out."""
    return with_stub.facts("-c", FACTS, with_stub=is_stubbed, CHECKPOINT=str(checkpoint), **env)


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
    "front_end_total": 0,  # a process that does not own the device must not ask it
    "total": 96 * 2**30,
    "used": 6 * 2**30,
    "peak": 2**30,  # of 5 GiB of tensors at most, 4 were there before
    "taken": [6 * 2**30, 9 * 2**30],  # two of the six belong to no tensor
    "sdpa": "FusedSDPA",
    "input_reuse": "0",
}
HPU_OPS = {
    "rms_norm",
    "rotary_embedding",
    "reshape_and_cache",
    "paged_prefill_attention",
    "paged_decode_attention",
    "experts",
}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {key: found.get(key) for key in expected} == expected


def assert_common(found: dict[str, Any], device_type: str) -> None:
    """What does not depend on the device: the plugin is the platform, imports little, and names its own classes."""
    assert found["bridge_before"] is False
    assert found["variables_before"] == [] and found["bridge_after_config"] is False
    assert (found["platform"], found["out_of_tree"], found["one_platform"]) == ("HpuPlatform", True, True)
    assert found["communicator"] == "vllm_gaudi.distributed.hpu_communicator.HpuCommunicator"
    assert found["config"] == {
        "device": device_type,
        "worker": "vllm_gaudi.v1.worker.hpu_worker.HPUWorker",
        "scheduler": "vllm_gaudi.v1.core.sched.hpu_async_scheduler.HPUAsyncScheduler",
    }


def test_with_the_bridge_the_platform_is_gaudi(checkpoint):
    found = facts_of(checkpoint("q35_dense"), is_stubbed=True)
    assert_common(found, "hpu")
    assert_same(found, GAUDI)
    on_hpu = {name for name, module in found["ops"].items() if module.endswith(("_hpu", ".hpu"))}
    assert on_hpu >= HPU_OPS and {"chunk_gated_delta_rule", "causal_conv1d_prefill"} <= on_hpu
    assert "multiple of 128" in found["block_64"]


@pytest.mark.parametrize("is_stubbed", [False, True], ids=["absent", "VLLM_USE_FAKE_HPU"])
def test_without_the_bridge_or_told_so_the_platform_is_the_host(checkpoint, is_stubbed):
    env = {"VLLM_USE_FAKE_HPU": "1"} if is_stubbed else {}
    found = facts_of(checkpoint("q35_dense"), is_stubbed=is_stubbed, **env)
    assert_common(found, "cpu")
    assert_same(found, HOST)
    assert not any(module.endswith(("_hpu", ".hpu")) for module in found["ops"].values())
    assert isinstance(found["block_64"], dict)


AUTOLOADED = """
import json
import logging
import sys
import torch

loaded = "habana_frameworks.torch" in sys.modules
from vllm_gaudi import device

said = []
device.logger.handle = lambda record: said.append(record.getMessage())
device.initialize()
print("FACTS " + json.dumps({"loaded": loaded, "said": said}))
"""


@pytest.mark.parametrize("is_set", [False, True], ids=["unset", "set"])
def test_a_bridge_that_torch_has_loaded_may_have_missed_its_variables(is_set, tmp_path):
    """Gaudi's images have torch load the bridge by itself, through an entry point of a distribution."""
    from vllm_gaudi.device import BRIDGE_DEFAULTS

    (tmp_path / "bridge-1.dist-info").mkdir()
    (tmp_path / "bridge-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: bridge\nVersion: 1\n")
    entry = "[torch.backends]\nbridge = habana_frameworks.torch:autoload\n"
    (tmp_path / "bridge-1.dist-info" / "entry_points.txt").write_text(entry)
    given = {name: value for name, (value, _) in BRIDGE_DEFAULTS.items()} if is_set else {}
    path = with_stub.environment()["PYTHONPATH"]
    found = with_stub.facts("-c", AUTOLOADED, is_fresh=True, PYTHONPATH=os.pathsep.join((str(tmp_path), path)), **given)
    assert found["loaded"]
    assert len(found["said"]) == (0 if is_set else 1)
    for line in found["said"]:
        assert "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE=0" in line and "docker/Dockerfile.gaudi" in line


def test_lazy_mode_is_refused_before_there_is_a_worker(checkpoint):
    found = facts_of(checkpoint("q35_dense"), is_stubbed=True, VLLM_USE_FAKE_HPU="1", PT_HPU_LAZY_MODE="1")
    assert "lazy mode is not supported" in found["config"] and "PT_HPU_LAZY_MODE" in found["config"]


def test_every_variant_agrees_with_its_reference_and_reaches_its_kernel():
    """The cases of the nightly run, with the stub in the device's place."""
    said = with_stub.forked("-m", "pytest", "-q", "-m", "hpu", "tests/e2e/hpu/test_kernels.py")
    assert "failed" not in said and "skipped" not in said and int(said.split(" passed")[0].split()[-1]) > 100, said


# An engine as on a Gaudi, except that tensors are on the CPU: the one switch is the name of torch's device.
ENGINE = """
import json
import os
import random
from collections import Counter

from vllm_gaudi import device

if os.environ["IS_STUBBED"] == "1":
    device.device_type = lambda: "cpu"

import torch
from vllm_gaudi.testing.engine import engine, greedy
from vllm_gaudi.v1.worker import hpu_model_runner
from vllm_gaudi.v1.worker.kv_cache import KVCaches

FLAGS = dict(enable_prefix_caching=True, block_size=128, max_model_len=384, max_num_seqs=2, max_num_batched_tokens=128)
source = random.Random(11)
prompts = [[source.randrange(10, 500) for _ in range(length)] for length in (290, 17, 129)]
facts = {"is_hpu": device.is_hpu()}
marks = []
if device.is_hpu():
    from habana_frameworks import calls

    def marked(owner, name):
        function = getattr(owner, name)
        def call(*args, **kwargs):
            calls.note(name)
            return function(*args, **kwargs)
        setattr(owner, name, call)

    marked(KVCaches, "zero_reserved")
    marked(hpu_model_runner, "warm_up")
    marked(hpu_model_runner, "validate")

with engine(os.environ["CHECKPOINT"], num_gpu_blocks_override=40, **FLAGS) as serving:
    runner = serving.runner
    facts["backend"] = runner.graphs.backend
    facts["shapes"] = len(runner.graphs.warmed_shapes)
    facts["layers"] = sorted({type(module).__name__ for module in runner.model.modules()})
    if device.is_hpu():
        facts["start"] = [
            [call.name, call.facts.get("value", call.facts.get("is_compile_only"))]
            for call in calls._log
            if call.name in ("env_setting", "zero_reserved", "warm_up", "validate", "run")
        ]
        facts["compiled"] = Counter(str(call["is_compile_only"]) for call in calls.of("compile"))
        facts["operators"] = sorted({name for call in calls.of("compile") for name in call["operators"]})
        facts["makes_lists"] = [call["makes_lists"] for call in calls.of("compile") if call["makes_lists"]]
        facts["creators"] = calls.of("hccl")[:1]
        calls.reset()
    caches = runner.step.caches
    reserved = [t[caches.geometry.num_tokens :] for t in (*caches.k, *caches.v)]
    reserved += [t[caches.zero_row :] for t in (*caches.conv_states, *caches.ssm_states)]
    facts["reserved_is_zero"] = all(bool((t == 0).all()) for t in reserved)
    cold = serving.generate(prompts, greedy(10), cache_salt="cold")
    first = serving.generate(prompts, greedy(10))
    hit = serving.generate(prompts, greedy(10))
    facts["cold"] = [[r.cached_tokens, r.tokens] for r in cold]
    facts["hit"] = [[r.cached_tokens, r.tokens] for r in hit]
    facts["hit_is_cold"] = all(torch.equal(a.logits, b.logits) for a, b in zip(hit, cold))
    facts["late"] = [runner.graphs.num_late_graphs, len(runner.graphs.unwarmed_shapes)]
    facts["is_async"] = runner.step.is_async
    torch.save([r.logits for r in cold], os.environ["LOGITS"])
    if device.is_hpu():
        facts["served"] = Counter(calls.names())
        names = ("wait_stream", "stream", "Event.record", "Event.synchronize")
        from tests.e2e.hpu.test_device import experts_error

        facts["experts_error"] = experts_error(runner) if facts["served"]["mixture_of_experts"] else 0.0
        facts["copies"] = [[call.name, call.facts.get("stream"), call.facts.get("other")] for call in calls._log
                           if call.name in names]
print("FACTS " + json.dumps(facts))
"""
VARIANTS = {"q35_dense": ("FusedSDPA", "FusedRMSNorm", "rotary")}
VARIANTS["next_moe"] = (*VARIANTS["q35_dense"], "mixture_of_experts")
OPERATORS = {
    "FusedSDPA": "habana_stub.fused_sdpa",
    "FusedRMSNorm": "habana_stub.rms_norm",
    "rotary": "habana_stub.rotary",
    "mixture_of_experts": "hpu.mixture_of_experts",
}


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param("q35_dense", marks=pytest.mark.soak), "next_moe"])
def test_an_engine_runs_as_on_a_gaudi(model, checkpoint, tmp_path):
    import torch

    def run(is_stubbed: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
        logits = tmp_path / f"{is_stubbed}.pt"
        found = with_stub.facts(
            "-c",
            ENGINE,
            with_stub=is_stubbed,
            CHECKPOINT=str(checkpoint(model)),
            IS_STUBBED=str(int(is_stubbed)),
            LOGITS=str(logits),
            VLLM_SKIP_WARMUP=str(int(not is_stubbed)),
            VLLM_GAUDI_ROW_TILES="1",  # these products run on a CPU, whose bits depend on the number of rows
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )
        return found, torch.load(logits)

    wanted, wanted_logits = run(False)
    found, logits = run(True)
    assert (wanted["is_hpu"], found["is_hpu"]) == (False, True)
    assert (wanted["backend"], found["backend"]) == (None, "hpu_backend")

    # The variants were built and reached, the plain host's layers are vLLM's own.
    assert "HPUGemmaRMSNorm" in found["layers"] and "HPUGemmaRMSNorm" not in wanted["layers"]
    assert "HPURotaryEmbedding" in {*found["layers"]} & {*wanted["layers"]}
    for kernel in VARIANTS[model]:
        assert found["served"].get(kernel, 0) > 0, kernel
    assert found["creators"] == [{"rank": 0, "size": 1}]

    # Warm-up compiled and ran nothing; then padding' rows were zeroed, two shapes ran, and pads' rows were zeroed
    # again.
    start = found["start"]
    begin, end = start.index(["env_setting", True]), start.index(["env_setting", False])
    inside, after = start[begin + 1 : end], start[end + 1 :]
    assert inside[0] == ["warm_up", None] and {tuple(entry) for entry in inside[1:]} == {("run", True)}
    assert len(inside) > found["shapes"] >= 10
    assert [name for name, _ in after if name != "run"] == ["zero_reserved", "validate", "zero_reserved"]
    assert after[1][0] == "validate" and ["run", True] not in after and after.count(["run", False]) >= 2
    assert found["reserved_is_zero"]
    assert found["compiled"]["True"] > 10

    # The same tokens as the references give; a hit equals cold; nothing was compiled late.
    assert found["cold"] == wanted["cold"]
    assert max(float((a - b).abs().max()) for a, b in zip(logits, wanted_logits, strict=True)) < 1e-4
    assert [cached for cached, _ in found["cold"]] == [0, 0, 0]
    assert [cached for cached, _ in found["hit"]] == [256, 0, 128] and found["hit_is_cold"]
    assert [tokens for _, tokens in found["hit"]] == [tokens for _, tokens in found["cold"]]
    assert found["late"] == [0, 0]

    # Nothing in a graph is hidden from its compiler but the bridge's own kernels; a layer's experts are one of them,
    # which is given each expert's weights and leaves no graph to cut them out.
    assert set(found["operators"]) == {OPERATORS[kernel] for kernel in VARIANTS[model]}
    assert found["makes_lists"] == []
    assert found["experts_error"] < 2e-6

    # Tokens leave on a stream of their own, which waits for the computing one, and are waited for by event.
    assert found["is_async"]
    copies, one = found["copies"], found["copies"][0][1]
    assert copies[:3] == [["wait_stream", one, 0], ["stream", one, None], ["Event.record", one, None]] and one != 0
    started = [entry[0] for entry in copies if entry[0] != "Event.synchronize"]
    assert started == ["wait_stream", "stream", "Event.record"] * (len(started) // 3)
    assert started.count("Event.record") == len(copies) - len(started) >= 10
