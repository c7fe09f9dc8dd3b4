# SPDX-License-Identifier: Apache-2.0
"""What only a Gaudi can show. None of it has been run on one yet; the nightly run is where it is proved.

``make e2e MARKERS=hpu WORKERS=0`` on a Gaudi machine. The bodies use nothing of the device, so the same command tries
them on a CPU host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_gaudi.testing.engine import engine, greedy

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
        assert not serving.runner.graphs.cold_shapes
