# SPDX-License-Identifier: Apache-2.0
"""The stores whose copies are measured: the shapes of the target models, one layer full size."""

from __future__ import annotations

from math import prod

import pytest

from tools.nightly import copies


@pytest.mark.parametrize(
    ("geometry", "name", "block_size", "kv_heads", "conv", "ssm"),
    [
        (copies.MODELS[0], "Qwen3.6-27B TP4", 896, 1, (3, 2560), (12, 128, 128)),
        (copies.MODELS[1], "Qwen3.5-35B-A3B TP1", 1152, 2, (3, 8192), (32, 128, 128)),
        (copies.MODELS[2], "Qwen3.5-397B-A17B TP8", 640, 1, (3, 1536), (8, 128, 128)),
    ],
)
def test_a_layer_has_the_shapes_of_its_model(geometry, name, block_size, kv_heads, conv, ssm):
    assert copies.name_of(geometry) == name
    layout = copies.build(geometry, layers=3, slots=1, pool_blocks=0).layout
    assert (layout.block_size, layout.num_layers, layout.num_blocks) == (block_size, 3, 4)
    assert layout.page_words == block_size * kv_heads * 256 // 2  # bf16
    assert (geometry.state.conv, geometry.state.ssm) == (conv, ssm)
    assert layout.state_bytes == 2 * prod(conv) + 4 * prod(ssm)
