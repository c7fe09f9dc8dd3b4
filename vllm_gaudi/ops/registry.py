# SPDX-License-Identifier: Apache-2.0
"""The table of ops: each name's CPU variant and, where one exists, its HPU variant with the same signature.

Owns: the choice between them, made once per process from `vllm_gaudi.device.is_hpu()`.
Never: imports an HPU file on another host; falls back from one variant to the other at call time.
Ordering rule: `get_ops()` before the first layer is built; what it returns is frozen.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from vllm_gaudi.ops.causal_conv1d import CausalConv1dPrefill, CausalConv1dUpdate
from vllm_gaudi.ops.gated_delta_rule import ChunkGatedDeltaRule, RecurrentGatedDeltaRule
from vllm_gaudi.ops.moe import Experts, PrepareExperts
from vllm_gaudi.ops.norm import RMSNorm
from vllm_gaudi.ops.paged_attention import PagedDecodeAttention, PagedPrefillAttention, ReshapeAndCache
from vllm_gaudi.ops.rotary import RotaryEmbedding

Variant = Literal["cpu", "hpu"]

_OPS = "vllm_gaudi.ops."

# name -> (module of the CPU variant, module of the HPU variant or None: the same function runs on both)
TABLE: dict[str, tuple[str, str | None]] = {
    "row_tiled_linear": (_OPS + "linear", None),
    "gdn_gating": (_OPS + "gated_delta_rule.gating", None),
    "chunk_gated_delta_rule": (_OPS + "gated_delta_rule.cpu", _OPS + "gated_delta_rule.hpu"),
    "recurrent_gated_delta_rule": (_OPS + "gated_delta_rule.cpu", _OPS + "gated_delta_rule.hpu"),
    "recurrent_gated_delta_rule_": (_OPS + "gated_delta_rule.cpu", None),
    "causal_conv1d_prefill": (_OPS + "causal_conv1d.cpu", _OPS + "causal_conv1d.hpu"),
    "causal_conv1d_update": (_OPS + "causal_conv1d.cpu", _OPS + "causal_conv1d.hpu"),
    "rms_norm": (_OPS + "norm.cpu", _OPS + "norm.hpu"),
    "rotary_embedding": (_OPS + "rotary.cpu", _OPS + "rotary.hpu"),
    "reshape_and_cache": (_OPS + "paged_attention.cpu", _OPS + "paged_attention.hpu"),
    "paged_prefill_attention": (_OPS + "paged_attention.cpu", _OPS + "paged_attention.hpu"),
    "paged_decode_attention": (_OPS + "paged_attention.cpu", _OPS + "paged_attention.hpu"),
    "route": (_OPS + "moe.routing", None),
    "prepare_experts": (_OPS + "moe.cpu", _OPS + "moe.hpu"),
    "experts": (_OPS + "moe.cpu", _OPS + "moe.hpu"),
}


@dataclass(frozen=True)
class Ops:
    """One callable per row of TABLE. Where there are two variants, the field's type is the contract of both."""

    row_tiled_linear: Callable[..., Any]
    gdn_gating: Callable[..., Any]
    chunk_gated_delta_rule: ChunkGatedDeltaRule
    recurrent_gated_delta_rule: RecurrentGatedDeltaRule
    recurrent_gated_delta_rule_: Callable[..., Any]
    causal_conv1d_prefill: CausalConv1dPrefill
    causal_conv1d_update: CausalConv1dUpdate
    rms_norm: RMSNorm
    rotary_embedding: RotaryEmbedding
    reshape_and_cache: ReshapeAndCache
    paged_prefill_attention: PagedPrefillAttention
    paged_decode_attention: PagedDecodeAttention
    route: Callable[..., Any]
    prepare_experts: PrepareExperts
    experts: Experts


@functools.cache
def variant() -> Variant:
    """The variant that this process runs."""
    from vllm_gaudi.device import is_hpu

    return "hpu" if is_hpu() else "cpu"


@functools.cache
def get_ops() -> Ops:
    """The ops of this process's device, chosen on the first call."""
    return Ops(**{field.name: resolve(field.name, variant()) for field in fields(Ops)})


class OpsMixin:
    """A layer or method of vLLM's, named before its class, that has the ops of this process as ``_ops``."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ops = get_ops()


def resolve(name: str, variant: Variant) -> Callable[..., Any]:
    """One variant of one op, chosen by the caller. An op without an HPU variant answers with what runs on both.

    Raises ValueError for a name or a variant that does not exist.
    """
    if name not in TABLE:
        raise ValueError(f"no op named {name!r}; ops are {', '.join(TABLE)}")
    if variant not in ("cpu", "hpu"):
        raise ValueError(f"no variant named {variant!r}; variants are 'cpu' and 'hpu'")
    cpu, hpu = TABLE[name]
    module = hpu if variant == "hpu" and hpu is not None else cpu
    return getattr(importlib.import_module(module), name)
