# SPDX-License-Identifier: Apache-2.0
"""The operators: checked, noted and computed here, opaque to torch.compile as the bridge's own are.

``torch.ops.hpu.mixture_of_experts`` is called by that name; the kernels behind the Python classes have names of the
stub's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from habana_frameworks.calls import check, note

FLOATS = (torch.float32, torch.bfloat16)

_hpu = torch.library.Library("hpu", "DEF")
_stub = torch.library.Library("habana_stub", "DEF")

_hpu.define(
    "mixture_of_experts(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w1, "
    "Tensor[] w2, Tensor[] w3, bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor"
)
_hpu.define(
    "mixture_of_experts.fused_weights(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, "
    "Tensor[] w12, Tensor[] w3, bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor"
)
_stub.define(
    "fused_sdpa(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, Tensor? lengths, "
    "str padding_side, str softmax_mode) -> Tensor"
)
_stub.define("rotary(Tensor p, Tensor cos, Tensor sin, bool is_blockwise) -> Tensor")
_stub.define("rms_norm(Tensor inputs, Tensor weight, float eps) -> Tensor")


def shapes(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def check_tensors(name: str, dtype: torch.dtype, **tensors: Tensor) -> None:
    check(dtype in FLOATS, f"{name} in {dtype}")
    for argument, tensor in tensors.items():
        check(tensor.dtype == dtype, f"{name}: {argument} is {tensor.dtype}, not {dtype}")
        check(tensor.is_contiguous(), f"{name}: {argument} is not contiguous")


def fused_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    lengths: Tensor | None,
    padding_side: str,
    softmax_mode: str,
) -> Tensor:
    check_tensors("FusedSDPA", query.dtype, query=query, key=key, value=value)
    check(query.dim() == key.dim() == 4 and key.shape == value.shape, f"FusedSDPA: {shapes(query, key, value)}")
    batch, heads, rows, dim = query.shape
    check(key.shape[0] == batch and key.shape[3] == dim, f"FusedSDPA: {shapes(query, key)}")
    check(heads % key.shape[1] == 0, f"FusedSDPA: {heads} heads over {key.shape[1]}")
    check(lengths is None, "FusedSDPA: the stub knows no valid_sequence_lengths")
    context = key.shape[2]
    if mask is not None:
        check_tensors("FusedSDPA", query.dtype, attn_mask=mask)
        check(mask.dim() == 4 and mask.shape[2:] == (rows, context), f"FusedSDPA: mask {tuple(mask.shape)}")
        check(mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads), f"FusedSDPA: mask {tuple(mask.shape)}")
        check(mask.numel() * mask.element_size() < 2**31, "FusedSDPA: a mask of 2^31 bytes")
    note(
        "FusedSDPA",
        shapes=shapes(query, key),
        mask=None if mask is None else tuple(mask.shape),
        dtype=query.dtype,
        softmax_mode=softmax_mode,
    )
    repeats = heads // key.shape[1]
    key, value = (x.double().repeat_interleave(repeats, 1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * (dim**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask.double()
    if is_causal:
        scores = scores.masked_fill(torch.ones(rows, context).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ value).to(query.dtype)


def rotary(p: Tensor, cos: Tensor, sin: Tensor, is_blockwise: bool) -> Tensor:
    check_tensors("rotary", p.dtype, p=p, cos=cos, sin=sin)
    check(p.dim() in (3, 4) and cos.shape == sin.shape and cos.dim() == p.dim(), f"rotary: {shapes(p, cos, sin)}")
    check(cos.shape[-1] == p.shape[-1] and p.shape[-1] % 2 == 0, f"rotary: {shapes(p, cos)}")
    check(all(c in (1, x) for c, x in zip(cos.shape, p.shape, strict=True)), f"rotary: {shapes(p, cos)}")
    note("rotary", shapes=shapes(p, cos), dtype=p.dtype, is_blockwise=is_blockwise)
    if is_blockwise:
        left, right = p.chunk(2, dim=-1)
        turned = torch.cat((-right, left), dim=-1)
    else:
        turned = torch.stack((-p[..., 1::2], p[..., ::2]), dim=-1).flatten(-2)
    return p * cos + turned * sin


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    check_tensors("FusedRMSNorm", inputs.dtype, inputs=inputs, weight=weight)
    check(weight.shape == inputs.shape[-1:], f"FusedRMSNorm: {shapes(inputs, weight)}")
    note("FusedRMSNorm", shapes=shapes(inputs, weight), dtype=inputs.dtype)
    wide = inputs.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(inputs.dtype)


def mixture_of_experts(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> Tensor:
    """``permuted_weights``: weights are [out, in]. Ids outside experts_min..experts_max count for nothing."""
    name, dtype = "mixture_of_experts", hidden_states.dtype
    check_tensors(name, dtype, hidden_states=hidden_states, router_weights=router_weights)
    check_tensors(
        name, dtype, **{f"w12[{i}]": w for i, w in enumerate(w12)}, **{f"w3[{i}]": w for i, w in enumerate(w3)}
    )
    check(hidden_states.dim() == 2, f"{name}: hidden_states {tuple(hidden_states.shape)}")
    check(expert_routing_table.dtype in (torch.int32, torch.int64), f"{name}: ids in {expert_routing_table.dtype}")
    check(expert_routing_table.is_contiguous(), f"{name}: ids not contiguous")
    check(expert_routing_table.shape == router_weights.shape, f"{name}: {shapes(expert_routing_table, router_weights)}")
    check(len(w12) == len(w3) == experts_max - experts_min + 1, f"{name}: {len(w12)} and {len(w3)} weights")
    check(permuted_weights and activation == "silu", f"{name}: the stub knows permuted weights and silu only")
    rows, hidden = hidden_states.shape
    inner = w3[0].shape[1]
    check(tuple(w12[0].shape) == (2 * inner, hidden) and w3[0].shape[0] == hidden, f"{name}: {shapes(w12[0], w3[0])}")
    note(name, shapes=shapes(hidden_states, expert_routing_table), experts=(experts_min, experts_max), dtype=dtype)
    out = torch.zeros(rows, hidden, dtype=torch.float64)
    x = hidden_states.double()
    for expert in range(experts_min, experts_max + 1):
        weight = torch.where(expert_routing_table == expert, router_weights.double(), 0.0).sum(-1, keepdim=True)
        gate, up = (x @ w12[expert - experts_min].double().T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ w3[expert - experts_min].double().T
        out += torch.where(weight != 0, weight * y, 0.0)
    return out.to(dtype)


def mixture_of_three(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    w3: list[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> Tensor:
    w12 = [torch.cat(pair) for pair in zip(w1, w2, strict=True)]
    return mixture_of_experts(
        hidden_states, expert_routing_table, router_weights, w12, w3, permuted_weights, activation, experts_min,
        experts_max,
    )  # fmt: skip


def _like_first(first: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(first)


for _library, _name, _function in (
    (_hpu, "mixture_of_experts", mixture_of_three),
    (_hpu, "mixture_of_experts.fused_weights", mixture_of_experts),
    (_stub, "fused_sdpa", fused_sdpa),
    (_stub, "rotary", rotary),
    (_stub, "rms_norm", rms_norm),
):
    _library.impl(_name, _function, "CPU")
    torch.library.register_fake(f"{_library.ns}::{_name}", _like_first, lib=_library)
