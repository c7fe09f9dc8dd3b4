# SPDX-License-Identifier: Apache-2.0
"""Each HPU variant of an op against its CPU variant, eager and compiled.

Owns: the cases, one list for three places. On a Gaudi the variants run on the device and the references on the CPU.
With the stub of the bridge (tests/stubs on PYTHONPATH) the variants run on CPU tensors, and the calls that the stub
noted prove which kernel was reached. On any other host the references are compared with themselves, which proves the
cases.

Never: a model or an engine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.unit.ops.oracles import delta_rule_inputs, error, lengths_of
from vllm_gaudi import device
from vllm_gaudi.ops.registry import TABLE, resolve
from vllm_gaudi.v1.worker import execution

pytestmark = pytest.mark.hpu

IS_STUB = device.is_hpu() and importlib.util.find_spec("habana_frameworks.calls") is not None
DEVICE = "hpu" if device.is_hpu() and not IS_STUB else "cpu"
VARIANT = "hpu" if device.is_hpu() else "cpu"
BACKEND = execution.choose(enforce_eager=False).backend or "aot_eager"

TOLERANCE = {torch.float32: 2e-6 if DEVICE == "cpu" else 1e-3, torch.bfloat16: 1.5e-2}
"""Relative error (Frobenius) against the CPU variant in the same dtype. On a host float32 differs by the order of sums;
a device's matrix engine may round more, and bfloat16 rounds at other places, each by 2^-9."""

SPARE = 20  # kernel blocks of the pool, so the id of the spare one
KERNEL_BLOCK = 16
SCALE = 0.25


@dataclass(frozen=True)
class Case:
    """``build`` gives an op's arguments; ``kernel`` is noted ``calls`` times by the stub, None where it is plain torch.

    ``written``: positions of arguments that the op writes to.
    """

    op: str
    name: str
    build: Callable[[torch.dtype], tuple[Sequence[Any], dict[str, Any]]]
    kernel: str | None = None
    calls: int = 1
    written: tuple[int, ...] = ()
    patch: tuple[str, int] | None = None  # a constant of the variant's module that makes the case small


def norm(*shape: int, residual: bool = False, offset_weight: bool = False, is_slice: bool = False) -> Any:
    def build(dtype: torch.dtype) -> Any:
        x = torch.randn(*shape).to(dtype)
        if is_slice:
            x = torch.cat((x, x), dim=-1)[..., : shape[-1]]
        weight = torch.randn(shape[-1])
        weight = weight * 0.1 + 1.0 if offset_weight else weight.to(dtype)
        return (x, weight, 1e-6, torch.randn(*shape).to(dtype) if residual else None), {}

    return build


def rotary(tokens: int, heads: int, head_size: int, rotary_dim: int, is_neox: bool = True) -> Any:
    def build(dtype: torch.dtype) -> Any:
        angle = torch.rand(tokens, rotary_dim // 2) * 6
        both = torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)  # a row of vLLM's table
        x = torch.randn(tokens, heads + 1, head_size).to(dtype)[:, 1:]  # as cut out of a fused projection
        return (x, *both.chunk(2, dim=-1), is_neox), {}

    return build


def mixture(rows: int, num_experts: int, top_k: int, hidden: int, inner: int) -> Any:
    def build(dtype: torch.dtype) -> Any:
        w13 = torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5
        w2 = torch.randn(num_experts, hidden, inner) * inner**-0.5
        weights, ids = resolve("route", "cpu")(torch.randn(rows, num_experts), top_k, True)
        return (torch.randn(rows, hidden).to(dtype), w13.to(dtype), w2.to(dtype), weights, ids), {}

    return build


def pages(kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shape = ((SPARE + 1) * KERNEL_BLOCK, kv_heads, dim)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def insert(*slots: int) -> Any:
    def build(dtype: torch.dtype) -> Any:
        k, v = (torch.randn(len(slots), 2, 8).to(dtype) for _ in range(2))
        return (*pages(2, 8, dtype), k, v, torch.tensor(slots)), {}

    return build


def prefill(starts: Sequence[int], queries: int, heads: int, kv_heads: int, dim: int, width: int) -> Any:
    """``width``: kernel blocks of a table, the last of which are padding where a sequence is shorter."""

    def build(dtype: torch.dtype) -> Any:
        table = torch.full((len(starts), width), SPARE, dtype=torch.int32)
        for row, start in enumerate(starts):
            used = min(width, -(-(start + queries) // KERNEL_BLOCK))
            table[row, :used] = torch.randperm(SPARE)[:used].int()
        q = torch.randn(len(starts), queries, heads, dim).to(dtype)
        return (q, *pages(kv_heads, dim, dtype), table, lengths_of(*starts), SCALE), {"kernel_block": KERNEL_BLOCK}

    return build


def decode(lengths: Sequence[int], pads: int, heads: int, kv_heads: int, dim: int) -> Any:
    """One row per length in tokens; 0 is padding row. What a block holds behind its length is NaN."""

    def build(dtype: torch.dtype) -> Any:
        k_cache, v_cache = pages(kv_heads, dim, dtype)
        free = iter(torch.randperm(SPARE).tolist())
        blocks, rows, lens, first = [], [], [], []
        for row, length in enumerate(lengths):
            first.append(len(blocks) if length else 0)
            for start in range(0, length, KERNEL_BLOCK):
                block, used = next(free), min(KERNEL_BLOCK, length - start)
                behind = slice(block * KERNEL_BLOCK + used, (block + 1) * KERNEL_BLOCK)
                k_cache[behind] = v_cache[behind] = float("nan")
                blocks.append(block)
                rows.append(row)
                lens.append(used)
        lists = blocks + [SPARE] * pads, rows + [len(lengths) - 1] * pads, lens + [0] * pads, first
        q = torch.randn(len(lengths), heads, dim).to(dtype)
        return (q, k_cache, v_cache, *(torch.tensor(x, dtype=torch.int32) for x in lists), SCALE), {
            "kernel_block": KERNEL_BLOCK
        }

    return build


def chunked_rule(*lengths: int, tokens: int, chunk: int, **boundaries: Any) -> Any:
    def build(dtype: torch.dtype) -> Any:
        args = delta_rule_inputs(len(lengths), tokens, 2, 4, 16, 32, dtype)
        return (*args, lengths_of(*lengths)), {"chunk_size": chunk, **boundaries}

    return build


def one_token_rule(batch: int) -> Any:
    def build(dtype: torch.dtype) -> Any:
        *heads, state = delta_rule_inputs(batch, 1, 2, 4, 16, 32, dtype)
        return (*(x[:, 0] for x in heads), state), {}

    return build


def convolution(*lengths: int, tokens: int, channels: int, **boundaries: Any) -> Any:
    def build(dtype: torch.dtype) -> Any:
        x, tail = torch.randn(len(lengths), tokens, channels), torch.randn(len(lengths), 3, channels)
        return (x.to(dtype), tail.to(dtype), torch.randn(channels, 4).to(dtype), None, lengths_of(*lengths)), boundaries

    return build


def one_token_convolution(batch: int, channels: int) -> Any:
    def build(dtype: torch.dtype) -> Any:
        x, tail = torch.randn(batch, channels), torch.randn(batch, 3, channels)
        return (x.to(dtype), tail.to(dtype), torch.randn(channels, 4).to(dtype), None), {}

    return build


KEPT = {"boundary_offset": lengths_of(32, 16), "boundary_interval": 32}
CASES = (
    Case("rms_norm", "hidden", norm(7, 64), "FusedRMSNorm"),
    Case("rms_norm", "residual", norm(33, 128, residual=True), "FusedRMSNorm"),
    Case("rms_norm", "float32_weight", norm(7, 64, offset_weight=True), "FusedRMSNorm"),
    Case("rms_norm", "float32_weight_residual", norm(1, 96, residual=True, offset_weight=True), "FusedRMSNorm"),
    Case("rms_norm", "heads_cut_out", norm(5, 3, 32, offset_weight=True, is_slice=True), "FusedRMSNorm"),
    Case("rotary_embedding", "quarter_of_a_head", rotary(9, 4, 32, 8), "rotary"),
    Case("rotary_embedding", "quarter_of_256", rotary(17, 2, 256, 64), "rotary"),
    Case("rotary_embedding", "whole_head", rotary(16, 3, 64, 64), "rotary"),
    Case("rotary_embedding", "pairs_side_by_side", rotary(9, 4, 32, 16, is_neox=False), "rotary"),
    Case("experts", "few", mixture(11, 4, 2, 16, 8), "mixture_of_experts"),
    Case("experts", "one_row_all_experts", mixture(1, 8, 8, 24, 16), "mixture_of_experts"),
    Case("experts", "more_than_one_call_takes", mixture(20, 150, 8, 32, 16), "mixture_of_experts", calls=3),
    Case("experts", "as_many_as_the_largest_model", mixture(16, 512, 10, 64, 32), "mixture_of_experts", calls=8),
    Case("reshape_and_cache", "with_a_pad", insert(6, 0, 200, SPARE * KERNEL_BLOCK), written=(0, 1)),
    Case("paged_prefill_attention", "from_the_start", prefill([0], 40, 4, 2, 32, 3), "FusedSDPA"),
    Case("paged_prefill_attention", "behind_contexts", prefill([3, 64, 0], 32, 6, 2, 64, 8), "FusedSDPA"),
    Case("paged_prefill_attention", "one_kv_head_pad_blocks", prefill([16], 16, 4, 1, 16, 8), "FusedSDPA"),
    Case("paged_prefill_attention", "no_gqa", prefill([7, 9], 16, 2, 2, 128, 4), "FusedSDPA"),
    Case(
        "paged_prefill_attention",
        "long_context_that_cuts_queries",
        prefill([200, 100], 48, 4, 2, 32, 16),
        "FusedSDPA",
        calls=4,
        patch=("QUERY_BIAS_BYTES", 2 * 12 * 256 * 4),  # 12 rows of two sequences in float32
    ),
    Case("paged_decode_attention", "rows_of_many_lengths", decode([1, 40, 16, 100, 17], 0, 4, 2, 32)),
    Case("paged_decode_attention", "pad_rows_and_pad_entries", decode([30, 5, 0, 0], 9, 6, 2, 64)),
    Case("paged_decode_attention", "one_kv_head", decode([33], 1, 4, 1, 16)),
    Case("chunk_gated_delta_rule", "odd_lengths", chunked_rule(70, 33, tokens=96, chunk=32)),
    Case("chunk_gated_delta_rule", "kept_boundaries", chunked_rule(96, 80, tokens=96, chunk=16, **KEPT)),
    Case("recurrent_gated_delta_rule", "five_rows", one_token_rule(5)),
    Case("causal_conv1d_prefill", "odd_lengths", convolution(21, 2, 0, tokens=24, channels=40)),
    Case("causal_conv1d_prefill", "kept_boundaries", convolution(96, 80, tokens=96, channels=8, **KEPT)),
    Case("causal_conv1d_update", "five_rows", one_token_convolution(5, 33)),
)


def test_every_variant_has_a_case():
    """Experts come with what prepares them."""
    assert {case.op for case in CASES} | {"prepare_experts"} == {
        name for name, (_, hpu) in TABLE.items() if hpu is not None
    }


def to(place: str, value: Any) -> Any:
    """A copy at ``place``, except for a slice on a CPU: it stays one, since a variant must cope with it."""
    if not isinstance(value, torch.Tensor) or (place == "cpu" and not value.is_contiguous()):
        return value
    return value.clone().to(place)


def arguments(case: Case, variant: Any, place: str, args: Sequence[Any]) -> list[Any]:
    """``args`` at ``place``; the experts' weights as this variant prepares them when a model is loaded."""
    placed = [to(place, x) for x in args]
    if case.op == "experts":
        x, w13, w2, *routing = placed
        return [x, resolve("prepare_experts", variant)(w13, w2), *routing]
    return placed


def results_of(case: Case, op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    made = op(*args, **kwargs)
    made = made if isinstance(made, tuple) else (made,)
    return [x.cpu() for x in (*made, *(args[i] for i in case.written)) if x is not None]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.name}")
@torch.inference_mode()
def test_a_variant_agrees_with_the_cpu_s(
    case: Case, dtype: torch.dtype, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.initialize()
    torch.manual_seed(len(case.name))
    args, kwargs = case.build(dtype)
    wanted = results_of(case, resolve(case.op, "cpu"), arguments(case, "cpu", "cpu", args), kwargs)
    op = resolve(case.op, VARIANT)  # type: ignore[arg-type]
    if case.patch is not None and VARIANT == "hpu":
        monkeypatch.setitem(op.__globals__, *case.patch)
    if is_compiled:
        torch._dynamo.reset()
        op = torch.compile(op, backend=BACKEND, dynamic=False, fullgraph=True)
    if IS_STUB:
        from habana_frameworks import calls

        calls.reset()
    found = results_of(
        case, op, arguments(case, VARIANT, DEVICE, args), {key: to(DEVICE, x) for key, x in kwargs.items()}
    )
    if IS_STUB:
        factor = 2 if dtype == torch.bfloat16 and case.patch else 1  # half the bytes, twice the rows per call
        reached = [name for name in calls.names() if name == case.kernel]
        assert len(reached) == (case.calls // factor if case.kernel else 0)
        assert ("run" in calls.names()) is is_compiled
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        if case.op == "reshape_and_cache":
            assert torch.equal(one, other)
        else:
            assert error(one, other) < TOLERANCE[dtype]
