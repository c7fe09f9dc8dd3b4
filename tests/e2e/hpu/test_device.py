# SPDX-License-Identifier: Apache-2.0
"""What only a Gaudi can show. None of it has been run on one yet; the nightly run is where it is proved.

``make e2e MARKERS=hpu WORKERS=0`` on a Gaudi machine. The bodies use nothing of the device, so the same command tries
them on a CPU host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.unit.ops.oracles import error
from vllm_gaudi.ops.registry import resolve
from vllm_gaudi.testing.engine import engine, greedy
from vllm_gaudi.v1.worker import execution

pytestmark = pytest.mark.hpu


@pytest.mark.parametrize("model", ["q35_dense", "next_moe"])
def test_a_hit_equals_cold_after_warm_up(
    model: str, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled graphs that drop or mis-bind a state write pass every eager test and fail this one."""
    monkeypatch.setenv("VLLM_SKIP_WARMUP", "0")
    flags = {"dtype": "bfloat16", "block_size": 128, "max_model_len": 1024, "max_num_batched_tokens": 512}
    with engine(checkpoint(model, "bfloat16"), enable_prefix_caching=True, **flags) as serving:
        text = prompt(3 * serving.block_size + 5)
        cold = serving.generate([text], greedy(16), cache_salt="cold")[0]
        serving.generate([text], greedy(16))
        hit = serving.generate([text], greedy(16))[0]
        assert hit.cached_tokens == 3 * serving.block_size
        assert hit.tokens == cold.tokens
        assert not serving.runner.graphs.unwarmed_shapes


def test_a_compiled_layer_of_experts_agrees_with_the_references(checkpoint: Callable[..., Path]) -> None:
    """One graph around routing, experts and shared expert, which is given each expert's weights as views of one."""
    with engine(checkpoint("next_moe", "bfloat16"), dtype="bfloat16") as serving:
        assert experts_error(serving.runner) < 1.5e-2


@torch.inference_mode()
def experts_error(runner: Any) -> float:
    """Relative error of a model's first layer of experts, compiled by itself, against the references on the CPU."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    layer = next(module for module in runner.model.modules() if isinstance(module, MoERunner))
    routed, gate = layer.routed_experts, layer.gate.weight.cpu()
    torch.manual_seed(3)
    x = torch.randn(256, gate.shape[1]).to(gate.dtype)
    # Rows whose choice of experts does not hang on a rounding.
    most = F.linear(x.double(), gate.double()).topk(routed.top_k + 1).values
    x = x[most[:, -2] - most[:, -1] > 0.1][:64]
    assert len(x) == 64
    weights, ids = resolve("route", "cpu")(F.linear(x, gate), routed.top_k, routed.renormalize)
    prepared = resolve("prepare_experts", "cpu")(routed.w13_weight.cpu(), routed.w2_weight.cpu())
    wanted = resolve("experts", "cpu")(x, prepared, weights, ids).double()

    torch._dynamo.reset()
    backend = execution.choose(enforce_eager=False).backend or "aot_eager"
    compiled = torch.compile(layer, backend=backend, dynamic=False, fullgraph=True)
    given = x.to(runner.device)
    metadata = SimpleNamespace(gemm_rows=None, expert_gemm_rows=None)
    with set_forward_context(metadata, runner.vllm_config, num_tokens=len(x), slot_mapping={}):
        found = compiled(given, given)
        wanted += layer.shared_experts._layer(given).cpu().double()
    assert found.dtype == x.dtype
    return error(found.cpu(), wanted)
