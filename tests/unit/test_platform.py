# SPDX-License-Identifier: Apache-2.0
"""The platform refuses before it fills in, chooses worker and scheduler; a second check changes nothing. Needs vLLM."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gaudi import capabilities

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it


@pytest.fixture(scope="module")
def platform():
    import vllm  # noqa: F401  (before the platform, as in an engine)

    from vllm_gaudi import platform

    return platform


def snapshot(config: SimpleNamespace) -> dict[str, Any]:
    sections = {name: vars(value) if hasattr(value, "__dict__") else value for name, value in vars(config).items()}
    return copy.deepcopy({name: value for name, value in sections.items() if name != "offload_config"})


@pytest.mark.parametrize(
    "changes", [{"lora_config": SimpleNamespace()}, {"additional_config": {"colour": 1}}], ids=["lora", "key"]
)
def test_what_is_refused_is_left_as_it_was(platform, config_of, changes):
    """Refuse first, then fill in."""
    config = config_of(**changes)
    before = snapshot(config)
    with pytest.raises(capabilities.Refused, match="vllm_gaudi refuses this configuration"):
        platform.HpuPlatform.check_and_update_config(config)
    assert snapshot(config) == before


def test_the_platforms_own_classes_are_not_refused(platform, config_of):
    for scheduler in (platform.SCHEDULER, platform.ASYNC_SCHEDULER):
        config = config_of(scheduler__scheduler_cls=scheduler, parallel__worker_cls=platform.WORKER)
        assert capabilities.refusals(config) == {}


@pytest.mark.parametrize(("is_async", "name"), [(True, "HPUAsyncScheduler"), (False, "HPUScheduler")])
def test_worker_and_scheduler_are_chosen_and_vllms_compiler_is_off(platform, config_of, is_async, name):
    from vllm.config import CompilationMode, CUDAGraphMode

    config = config_of(scheduler__async_scheduling=is_async)
    platform.HpuPlatform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == platform.WORKER
    assert config.scheduler_config.scheduler_cls.rpartition(".")[2] == name
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert config.compilation_config.cudagraph_capture_sizes == []


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["align", "none"])
def test_a_second_check_on_the_live_config_changes_nothing(platform, config_of, caching, mode):
    """vLLM repeats it once the engine runs; whatever it lowered then would split scheduler from worker."""
    config = config_of(cache__enable_prefix_caching=caching, cache__mamba_cache_mode=mode)
    platform.HpuPlatform.check_and_update_config(config)
    first = snapshot(config)
    platform.HpuPlatform.check_and_update_config(config)
    assert snapshot(config) == first
    config.cache_config.block_size = 64
    platform.HpuPlatform.check_and_update_config(config)
    assert config.cache_config.block_size == 64


def test_a_config_without_a_model_is_left_alone(platform, config_of):
    """Not even what is refused and what would be filled in is looked at."""
    config = config_of(lora_config=SimpleNamespace())
    config.model_config = None
    before = snapshot(config)
    platform.HpuPlatform.check_and_update_config(config)
    assert snapshot(config) == before


def test_requests_with_embeddings_are_refused(platform):
    with pytest.raises(ValueError, match="token ids"):
        platform.HpuPlatform.validate_request({"type": "embeds"}, None)
    assert platform.HpuPlatform.validate_request({"type": "token"}, None) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_supported_dtypes(platform, dtype):
    assert dtype in platform.HpuPlatform().supported_dtypes
    platform.HpuPlatform.check_if_supports_dtype(dtype)


def test_other_dtypes_are_refused(platform):
    with pytest.raises(ValueError, match="--dtype bfloat16"):
        platform.HpuPlatform.check_if_supports_dtype(torch.float16)


def test_vllm_found_this_platform(platform):
    from vllm.platforms import current_platform

    assert type(current_platform) is platform.HpuPlatform
    assert current_platform.device_type == "cpu"
    assert current_platform.support_hybrid_kv_cache()
    assert current_platform.get_device_total_memory() > 0
    assert current_platform.get_current_memory_usage() > 0
