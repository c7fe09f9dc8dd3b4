# SPDX-License-Identifier: Apache-2.0
"""The table of ops: each name's plain-torch reference and, where one exists, its HPU variant of the same signature.

Owns: the choice between them, made once per process from `vllm_gaudi.device.is_hpu()`.
Never: imports an HPU file on another host; falls back from one variant to the other at call time.
Order: `load_ops()` before the first layer is built; what it returns is frozen.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

Variant = Literal["reference", "hpu"]

# name -> (reference, HPU variant or None: the reference is what runs there too)
TABLE: dict[str, tuple[str, str | None]] = {
    "row_tiled_linear": ("vllm_gaudi.ops.linear", None),
    "gdn_gating": ("vllm_gaudi.ops.gated_delta_rule.reference", None),
    "chunk_gated_delta_rule": ("vllm_gaudi.ops.gated_delta_rule.reference", "vllm_gaudi.ops.gated_delta_rule.hpu"),
    "recurrent_gated_delta_rule": ("vllm_gaudi.ops.gated_delta_rule.reference", "vllm_gaudi.ops.gated_delta_rule.hpu"),
    "recurrent_gated_delta_rule_": ("vllm_gaudi.ops.gated_delta_rule.reference", None),
    "causal_conv1d_prefill": ("vllm_gaudi.ops.causal_conv1d.reference", "vllm_gaudi.ops.causal_conv1d.hpu"),
    "causal_conv1d_update": ("vllm_gaudi.ops.causal_conv1d.reference", "vllm_gaudi.ops.causal_conv1d.hpu"),
    "rms_norm": ("vllm_gaudi.ops.norm", "vllm_gaudi.ops.norm_hpu"),
    "rotary_embedding": ("vllm_gaudi.ops.rotary", "vllm_gaudi.ops.rotary_hpu"),
    "insert_kv": ("vllm_gaudi.ops.paged_attention", "vllm_gaudi.ops.paged_attention_hpu"),
    "paged_prefill_attention": ("vllm_gaudi.ops.paged_attention", "vllm_gaudi.ops.paged_attention_hpu"),
    "paged_decode_attention": ("vllm_gaudi.ops.paged_attention", "vllm_gaudi.ops.paged_attention_hpu"),
    "route": ("vllm_gaudi.ops.moe", None),
    "prepare_experts": ("vllm_gaudi.ops.moe", "vllm_gaudi.ops.moe_hpu"),
    "experts": ("vllm_gaudi.ops.moe", "vllm_gaudi.ops.moe_hpu"),
}


@dataclass(frozen=True)
class Ops:
    """One callable per row of TABLE; the contracts are the docstrings of the references."""

    row_tiled_linear: Callable[..., Any]
    gdn_gating: Callable[..., Any]
    chunk_gated_delta_rule: Callable[..., Any]
    recurrent_gated_delta_rule: Callable[..., Any]
    recurrent_gated_delta_rule_: Callable[..., Any]
    causal_conv1d_prefill: Callable[..., Any]
    causal_conv1d_update: Callable[..., Any]
    rms_norm: Callable[..., Any]
    rotary_embedding: Callable[..., Any]
    insert_kv: Callable[..., Any]
    paged_prefill_attention: Callable[..., Any]
    paged_decode_attention: Callable[..., Any]
    route: Callable[..., Any]
    prepare_experts: Callable[..., Any]
    experts: Callable[..., Any]


@functools.cache
def load_ops() -> Ops:
    """The ops of this process's device, chosen on the first call."""
    from vllm_gaudi.device import is_hpu

    variant: Variant = "hpu" if is_hpu() else "reference"
    return Ops(**{field.name: resolve(field.name, variant) for field in fields(Ops)})


class UsesOps:
    """A layer or method of vLLM's, named before its class, that has the ops of this process as ``_ops``."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ops = load_ops()


def resolve(name: str, variant: Variant) -> Callable[..., Any]:
    """One variant of one op, asked for explicitly. An op without an HPU variant answers with its reference.

    Raises ValueError for a name or a variant that does not exist.
    """
    if name not in TABLE:
        raise ValueError(f"no op named {name!r}; ops are {', '.join(TABLE)}")
    if variant not in ("reference", "hpu"):
        raise ValueError(f"no variant named {variant!r}; variants are 'reference' and 'hpu'")
    reference, hpu = TABLE[name]
    module = hpu if variant == "hpu" and hpu is not None else reference
    return getattr(importlib.import_module(module), name)
