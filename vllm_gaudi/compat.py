# SPDX-License-Identifier: Apache-2.0
"""The one place where the host (vLLM, torch) is changed, row by row, each with the condition that removes it.

Owns: ``ROWS``, what is changed and why, and the functions that do it. Every function is idempotent. One row changes
nothing but uses a field of vLLM's for what it is not meant for: the scheduler fills it and ``v1.metrics`` reads it.
Never: a change without a row, or a row without a test in ``tests/unit/test_compat.py`` that fails when it can go.

Ordering rule: ``define_torchvision_schemas`` runs before anybody imports torchvision.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    symbol: str
    symptom: str
    cause: str
    versions: str
    removal: str
    test: str


ROWS: tuple[Row, ...] = (
    Row(
        symbol="torch.ops.torchvision.{nms,qnms} (schemas only)",
        symptom="`import vllm` ends in 'operator torchvision::nms does not exist'",
        cause="Qwen3.5's module imports torchvision; the registry's wheel is a CUDA build whose extension cannot load "
        "beside a CPU build of torch, and its fake registrations ask for schemas that the extension would define",
        versions="torch 2.13 (CPU) with torchvision 0.28",
        removal="torchvision ships a CPU wheel for this torch, or vLLM imports it lazily",
        test="test_torchvision_fails_without_the_schemas",
    ),
    Row(
        symbol="vllm.envs.environment_variables",
        symptom="a warning 'Unknown vLLM environment variable detected' for each variable of the plugin",
        cause="vLLM validates every VLLM_* name against its own table and a plugin cannot add its names",
        versions="vLLM 0.30",
        removal="vLLM offers a registration call for a plugin's variables",
        test="test_vllm_takes_no_environment_variables_of_a_plugin",
    ),
    Row(
        symbol="torch.accelerator.{synchronize,empty_cache,empty_host_cache}",
        symptom="the engine's shutdown raises on a host without an accelerator, and on Gaudi whose bridge lacks them",
        cause="vLLM's executor frees caches through torch.accelerator on every platform but its own CPU one",
        versions="vLLM 0.30 with torch 2.13",
        removal="vLLM asks the platform instead, or torch.accelerator answers without an accelerator",
        test="test_torch_accelerator_raises_without_an_accelerator",
    ),
    Row(
        symbol="torch._dynamo.config.{recompile_limit,accumulated_recompile_limit}",
        symptom="with compiled layers, all but the first eight shapes of the bucket grid run eagerly",
        cause="dynamo counts compilations per code object, which all layers of a class and all buckets share, and "
        "torch.compile takes no limit as an argument",
        versions="torch 2.13",
        removal="torch.compile takes the limit, or counts per module",
        test="test_dynamo_s_limit_is_below_the_ladder",
    ),
    Row(
        symbol="the class of each vllm Attention instance",
        symptom="each attention layer has compiled graphs of its own, for every shape of the bucket grid",
        cause="vLLM's attention looks itself up by its name in the forward's context, which a compiler takes for a "
        "constant; unlike its linear, norm, rotary and GDN layers it has no `register_oot`",
        versions="vLLM 0.30",
        removal="Attention can be registered out of tree, or calls its implementation with what it holds itself",
        test="test_vllm_s_attention_cannot_be_registered_and_looks_itself_up_by_name",
    ),
    Row(
        symbol="SchedulerStats.waiting_lora_adapters",
        symptom="the plugin's counters stay in the scheduler's process, and /metrics, in another one, lacks them",
        cause="the statistics that cross the process boundary are a fixed record; this field of it maps names to "
        "counts, and vLLM reads it with LoRA only, which the plugin refuses",
        versions="vLLM 0.30",
        removal="SchedulerStats gets a field for plugins; where LoRA is admitted the counts need another field at once",
        test="test_vllm_s_statistics_have_no_field_for_a_plugin",
    ),
)

_torchvision_library: Any = None


def define_torchvision_schemas() -> None:
    """Define the two operator schemas that torchvision's Python side needs, where its extension cannot load.

    Does nothing when torchvision is absent or already imported, when torch is a CUDA build, or at the second call.
    """
    global _torchvision_library
    if _torchvision_library is not None or "torchvision" in sys.modules:
        return
    if importlib.util.find_spec("torchvision") is None:
        return
    import torch

    if torch.version.cuda is not None or importlib.metadata.version("torchvision").endswith("+cpu"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for op in ("nms", "qnms"):
        library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision_library = library


def register_environment_variables() -> None:
    """Add our names to vLLM's table of known variables; vLLM's own entries are never replaced."""
    import vllm.envs

    from vllm_gaudi import envs

    for name in envs.TABLE:
        if name.startswith("VLLM_"):
            vllm.envs.environment_variables.setdefault(name, lambda name=name: envs.get(name))


def raise_recompile_limit(count: int) -> None:
    """Let dynamo keep ``count`` compilations of one function, warm-up's shapes over all layers; never lowers it."""
    import torch._dynamo

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)


def patch_layer_class(layer: Any, subclass: type) -> None:
    """Make ``layer``, an instance of one of vLLM's classes, an instance of ``subclass``, which adds no state."""
    if not issubclass(subclass, type(layer)):
        raise TypeError(f"{subclass.__name__} is no subclass of {type(layer).__name__}")
    layer.__class__ = subclass


def patch_torch_accelerator() -> None:
    """Replace the calls that raise where ``torch.accelerator`` has no device behind it; no-op where it has one."""
    import torch

    from vllm_gaudi import device

    if torch.accelerator.is_available() and not device.is_hpu():
        return

    def synchronize(*args: Any, **kwargs: Any) -> None:
        device.synchronize()

    def empty_cache(*args: Any, **kwargs: Any) -> None:
        return

    def empty_host_cache(*args: Any, **kwargs: Any) -> None:
        return

    torch.accelerator.synchronize = synchronize
    torch.accelerator.empty_cache = empty_cache
    torch.accelerator.empty_host_cache = empty_host_cache
