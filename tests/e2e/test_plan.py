# SPDX-License-Identifier: Apache-2.0
"""`vllm-gaudi plan` against engines that are started: every number, and every refusal word for word.

Owns: the comparison. The plan is given the directory of a tiny checkpoint with its config.json alone.
Never: the plan's own records as the truth: bytes are counted on the tensors that the engine holds.

Ordering rule: a plan is made before the engine is there or after it has gone; in one process there is one of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_gaudi import cli
from vllm_gaudi.cli import dry_run
from vllm_gaudi.testing.engine import DEFAULTS, Engine, close_sockets, engine
from vllm_gaudi.v1.worker.hpu_worker import HPUWorker

MIB = 2**20
GIVEN = 24 * MIB
FLAGS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": GIVEN,
}
OF_TESTS = {"num_gpu_blocks_override": None, "block_size": None}  # what the test engine sets and a user does not


def command_line(flags: dict[str, Any]) -> list[str]:
    found = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            found.append(flag)
        elif value is False:
            found.append(flag.replace("--", "--no-", 1))
        elif value is not None:
            found += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return found


@pytest.fixture
def config_of(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint's config.json, alone in a directory."""

    def copy(name: str, dtype: str = "float32") -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        shutil.copy(checkpoint(name, dtype) / "config.json", directory)
        return directory

    return copy


@pytest.fixture
def plan(capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """``plan(path, *flags)``: the JSON; what the command sets in the environment goes again."""

    def call(path: Path, *flags: object) -> dict[str, Any]:
        capfd.readouterr()
        before = set(os.environ)
        code = cli.main(["plan", str(path), "--json", *map(str, flags)])
        found = json.loads(capfd.readouterr().out)
        assert code == bool(found["refusals"])
        for name in set(os.environ) - before:
            del os.environ[name]
        return found

    return call


def size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def told_and_held(numbers: dict[str, Any], opened: Engine) -> dict[str, tuple[Any, Any]]:
    """Per number: what the plan says and what the engine has."""
    runner, scheduler = opened.runner, opened.scheduler
    caches, geometry = runner.step.caches, runner.step.caches.geometry
    layout = getattr(runner.step.store, "layout", None)
    block, memory, pool = numbers["block"], numbers["memory"], numbers["pool"]
    fit = numbers["max_concurrency"]["caching_on" if numbers["flags"]["prefix_caching"] else "caching_off"]
    spare = size((*caches.k, *caches.v)) // (geometry.num_kernel_blocks + 1)
    found = {
        "B": (block["tokens"], opened.block_size),
        "B of the scheduler": (block["tokens"], scheduler.cache_config.block_size),
        "kernel block": (block["kernel_block"], geometry.kernel_block),
        "chunk": (block["gdn_chunk"], geometry.gdn_chunk),
        "groups": (block["gdn_groups"], [len(names) for names in geometry.gdn_layers]),
        "page": (block["page_bytes"], size((caches.k[0][: opened.block_size], caches.v[0][: opened.block_size]))),
        "block": (block["block_bytes"], block["page_bytes"] * len(caches.k)),
        "blocks": (pool["blocks"], scheduler.kv_cache_manager.block_pool.num_gpu_blocks),
        "blocks of the worker": (pool["blocks"], geometry.num_blocks),
        "pool": (pool["bytes"], size((*caches.k, *caches.v)) - spare),
        "tokens": (pool["tokens"], (geometry.num_blocks - 1) * opened.block_size),
        "spare": (memory["spare"], spare),
        "weights": (memory["weights"], size(runner.model.parameters())),
        "parameters": (memory["parameters"], sum(p.numel() for p in runner.model.parameters())),
        "states": (memory["states"], size((*caches.conv_states, *caches.ssm_states))),
        "staging": (memory["staging_rows"], runner.step.grid.num_staging),
        "slots": (memory["slots"], runner.step.state_slots.num_slots),
        "available": (memory["available"], opened.core.model_executor.driver_worker.worker.memory.available),
        "fits": (fit["blocks"], geometry.num_blocks),
        "boundary": (numbers["boundary"] is None, layout is None),
    }
    if caches.ssm_states:
        rows = caches.first_staging_row + runner.step.grid.num_staging
        state = numbers["state"]
        found["row"] = (state["row_bytes"], size((*caches.conv_states, *caches.ssm_states)) // rows)
        found["ssm dtype"] = ("torch." + state["ssm_dtype"], str(caches.ssm_states[0].dtype))
        found["conv dtype"] = ("torch." + state["conv_dtype"], str(caches.conv_states[0].dtype))
    if layout is not None:
        boundary = numbers["boundary"]
        found["blocks per boundary"] = (boundary["blocks"], layout.blocks_per_boundary)
        found["moved"] = (boundary["moved_bytes"], layout.checkpoint_bytes)
        found["segments"] = (state["segments"], [vars(segment) for segment in layout.segments])
        found["whole heads"] = (state["whole_heads"], layout.whole_heads)
    return found


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("q35_dense", "float32", {}),
    "dense, B given": ("q35_dense", "float32", {"block_size": 16}),
    "dense, bf16": ("q35_dense", "bfloat16", {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}),
    "dense, no caching": ("q35_dense", "float32", {"enable_prefix_caching": False}),
    "dense, no async": ("q35_dense", "float32", {"async_scheduling": False, "max_num_batched_tokens": 1000}),
    "dense, override": ("q35_dense", "float32", {"num_gpu_blocks_override": 77, "block_size": 32}),
    "experts": ("q35_moe", "float32", {"max_num_seqs": 3}),
    "next": ("next_moe", "bfloat16", {"dtype": "bfloat16"}),
    "text part": ("q35_vl", "float32", {"language_model_only": True}),
    "attention": ("llama", "float32", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_a_started_engine(case, checkpoint, config_of, plan):
    name, dtype, changes = CASES[case]
    flags = {**FLAGS, **changes}
    found = plan(config_of(name, dtype), *command_line(flags))
    assert found["refusals"] == []
    with engine(checkpoint(name, dtype), **{**OF_TESTS, **flags}) as opened:
        compared = told_and_held(found["numbers"], opened)
    assert {what: pair for what, pair in compared.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("name", ["q35_dense", "llama"])
def test_a_share_of_the_device_with_the_measured_peak_gives_the_same_blocks(
    name, checkpoint, config_of, plan, monkeypatch
):
    """The profile run of a tiny model takes next to nothing, so here it says that it has taken 3 MiB."""
    monkeypatch.setattr(HPUWorker, "_profile", lambda worker: 3 * MIB)
    monkeypatch.setenv("VLLM_GAUDI_HOST_MEMORY_GIB", "0.25")
    flags = {**FLAGS, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.8}
    with engine(checkpoint(name), **{**OF_TESTS, **flags}) as opened:
        memory = opened.core.model_executor.driver_worker.worker.memory
        blocks = opened.runner.step.caches.geometry.num_blocks
    path = config_of(name)
    numbers = plan(path, "--memory", 0.25, "--peak", memory.peak / 2**30, *command_line(flags))["numbers"]
    assert memory.peak == 3 * MIB
    assert numbers["pool"]["blocks"] == blocks
    assert numbers["memory"]["available"] == memory.available
    without = plan(path, "--memory", 0.25, *command_line(flags))["numbers"]
    assert without["pool"]["blocks"] > blocks and without["memory"]["peak"] == 0


def test_caching_off_is_planned_as_it_would_start(checkpoint, config_of, plan):
    fits = plan(config_of("q35_dense"), *command_line(FLAGS))["numbers"]["max_concurrency"]
    with engine(checkpoint("q35_dense"), **{**OF_TESTS, **FLAGS, "enable_prefix_caching": False}) as opened:
        assert fits["caching_off"]["blocks"] == opened.runner.step.caches.geometry.num_blocks
    assert fits["caching_on"]["blocks"] < fits["caching_off"]["blocks"]


@pytest.mark.slow
def test_one_rank_of_two(checkpoint, config_of, plan):
    flags = {**FLAGS, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    numbers = plan(config_of("q35_moe"), *command_line(flags))["numbers"]
    opened = LLMEngine.from_engine_args(
        EngineArgs(model=str(checkpoint("q35_moe")), **{**DEFAULTS, **OF_TESTS, **flags})
    )
    try:
        held = opened.collective_rpc(
            lambda worker: (
                worker.model_runner.step.caches.geometry.block_size,
                worker.model_runner.step.caches.geometry.num_blocks,
                worker.model_runner.step.caches.geometry.page_bytes,
                worker.model_runner.step.caches.state_bytes,
                worker.model_runner.step.store.layout.checkpoint_bytes,
                worker.model_runner.step.grid.num_staging,
                sum(p.numel() * p.element_size() for p in worker.get_model().parameters()),
            )
        )
    finally:
        opened.engine_core.shutdown()
        close_sockets()
    memory = numbers["memory"]
    told = (
        numbers["block"]["tokens"],
        numbers["pool"]["blocks"],
        numbers["block"]["page_bytes"],
        memory["states"],
        numbers["boundary"]["moved_bytes"],
        memory["staging_rows"],
        memory["weights"],
    )
    assert held == [told, told]


# Refusals

REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "lora": ("q35_dense", {"enable_lora": True}, {}),
    "kv-cache-dtype": ("q35_dense", {"kv_cache_dtype": "fp8"}, {}),
    "dtype": ("q35_dense", {"dtype": "float16"}, {}),
    "two at once": ("q35_dense", {"dtype": "float16", "kv_cache_dtype": "fp8"}, {}),
    "multimodal": ("q35_vl", {}, {}),
    "block size": ("q35_dense", {"block_size": 24}, {}),
    "environment": ("q35_dense", {}, {"VLLM_COMPACT_GDN": "0"}),
    "unknown key": ("q35_dense", {"additional_config": {"foo": 1}}, {}),
    "expert parallel": ("q35_moe", {"enable_expert_parallel": True}, {}),
    "vLLM's own": ("q35_dense", {"enable_sleep_mode": True}, {}),
    "no memory": ("q35_dense", {"kv_cache_memory_bytes": 1000}, {}),
    "too long": ("q35_dense", {"kv_cache_memory_bytes": 4 * MIB, "max_model_len": 8192}, {}),
    "buckets": ("q35_dense", {"additional_config": {"prefill_query_buckets": [100]}}, {}),
    "retention": ("q35_dense", {"prefix_cache_retention_interval": 100}, {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_the_one_that_a_start_raises(case, checkpoint, config_of, plan, monkeypatch):
    name, changes, environment = REFUSED[case]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    flags = {**FLAGS, **changes}
    directory = config_of(name)
    refusals = plan(directory, *command_line(flags))["refusals"]
    try:
        with pytest.raises((RuntimeError, ValueError)) as refused:
            Engine(checkpoint(name), **{**OF_TESTS, **flags})
    finally:  # a start that fails leaves its process groups behind
        cleanup_dist_env_and_memory()
    raised = dry_run.message_of(refused.value, checkpoint(name), str(directory))
    said = "; ".join(refusal["sentence"] for refusal in refusals)
    if refusals[0]["name"] != "start":
        said = "vllm_gaudi refuses this configuration: " + said
    assert raised == said


def test_a_plan_beside_an_engine_is_told_to_go_elsewhere(checkpoint, config_of, plan):
    with engine(checkpoint("llama")):
        (refusal,) = plan(config_of("llama"))["refusals"]
    assert "an engine runs in this process" in refusal["sentence"]
    assert plan(config_of("llama"))["refusals"] == []
