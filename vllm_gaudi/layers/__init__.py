# SPDX-License-Identifier: Apache-2.0
"""Out-of-tree layers for vLLM's own model classes, registered through vLLM's ``register_oot``."""

from __future__ import annotations

_registered = False


def register_layers() -> None:
    """Register every layer class once per process; vLLM asserts on a second registration."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm_gaudi.layers import gdn_attention, moe, rotary  # noqa: F401  (importing them registers them)
    from vllm_gaudi.ops.registry import variant

    if variant() == "hpu":
        from vllm_gaudi.layers import norm  # noqa: F401
