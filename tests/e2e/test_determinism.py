# SPDX-License-Identifier: Apache-2.0
"""A prompt's logits have the same bits however the engine is set up and whatever runs beside it (design: determinism).

Owns: the variants of an engine that must not change a bit, the two (a budget below one GDN chunk, and only that) that
may change the last ones, and the proof that the comparison can fail.
Never: a tolerance where the chunk grid is kept, or an oracle (``test_oracle``).

Ordering rule: a variant proves that it ran differently (other chunks, other shapes) before its bits are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_gaudi.bucketing import grid
from vllm_gaudi.ops.linear import GemmRows
from vllm_gaudi.testing.engine import Engine, Result, engine, greedy
from vllm_gaudi.v1.core.sched import hpu_scheduler
from vllm_gaudi.v1.worker.inputs import InputBuilder

pytestmark = pytest.mark.execution_mode("hpu_like")  # tests of exact shapes choose the other one

TOKENS = 16
WHOLE = 512  # the reference's budget: every prompt in one chunk
NEAR = 1e-4


@dataclass(frozen=True)
class Model:
    """A checkpoint on one geometry."""

    name: str
    dtype: str
    block: int
    chunk: int  # the GDN chunk that the geometry gives
    flags: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        ssm = self.flags.get("mamba_ssm_cache_dtype")
        return f"{self.name}-{self.dtype}-B{self.block}" + (f"-ssm_{ssm}" if ssm else "")

    @property
    def lengths(self) -> list[int]:
        """Six prompts around chunk and block, the longest over several of both."""
        if self.block < 128:
            return [17, 1, 180, 31, 52, 15]
        return [129, 1, 322, 63, 200, 65]


MODELS = [
    Model("q35_dense", "float32", 16, 16),
    Model("q35_dense", "float32", 128, 64),
    Model("q35_dense", "bfloat16", 32, 32),
    Model("q35_dense", "bfloat16", 128, 64),
    Model("next_moe", "bfloat16", 128, 64, {"mamba_ssm_cache_dtype": "bfloat16"}),
    Model("q35_moe_vl", "float32", 128, 64, {"language_model_only": True}),
    Model("qwen3", "bfloat16", 16, 16),
]


def prompt_of(length: int) -> list[int]:
    source = random.Random(20000 + length)
    return [source.randrange(10, 500) for _ in range(length)]


@dataclass
class Reference:
    """What each prompt of ``model`` gives alone, in one chunk, asynchronously, with the default buckets."""

    model: Model
    path: Any
    results: dict[int, Result] = field(default_factory=dict)
    shapes: set[Any] = field(default_factory=set)
    neighbours: dict[str, dict[int, Result]] = field(default_factory=dict)  # the same engine's answers in company

    def open(self, **flags: Any) -> Any:
        model = self.model
        # Every prompt is computed, never found: what a hit gives is test_prefix_cache's.
        fixed = {"dtype": model.dtype, "block_size": model.block, "enable_prefix_caching": False}
        return engine(self.path, **{**fixed, **model.flags, **flags})


SHARE = (1, 3, 4, 6)  # both dtypes, experts with a bf16 state, and attention alone


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(model, id=str(model), marks=() if n in SHARE else pytest.mark.soak)
        for n, model in enumerate(MODELS)
    ],
)
def reference(request, checkpoint) -> Reference:
    model = request.param
    made = Reference(model, checkpoint(model.name, model.dtype))
    with made.open(max_num_batched_tokens=WHOLE) as opened:
        assert (opened.block_size, opened.chunk) == (model.block, model.chunk)
        assert opened.runner.step.is_async
        made.results = alone(opened, model.lengths)
        made.shapes = set(opened.runner.graphs.unwarmed_shapes)
        made.neighbours = {run.__name__: run(opened, model.lengths) for run in (together, backwards, one_by_one)}
    for result in made.results.values():
        assert result.logits.shape[0] == TOKENS and torch.isfinite(result.logits).all()
    return made


# How prompts arrive


def alone(opened: Engine, lengths: list[int]) -> dict[int, Result]:
    return {length: opened.generate([prompt_of(length)], greedy(TOKENS))[0] for length in lengths}


def together(opened: Engine, lengths: list[int]) -> dict[int, Result]:
    return dict(zip(lengths, opened.generate([prompt_of(n) for n in lengths], greedy(TOKENS)), strict=True))


def backwards(opened: Engine, lengths: list[int]) -> dict[int, Result]:
    return together(opened, lengths[::-1])


def one_by_one(opened: Engine, lengths: list[int]) -> dict[int, Result]:
    """A prompt arrives at every third step, so prefills meet decodes of any number of requests."""
    ids = {}
    for length in lengths:
        ids[length] = opened.add(prompt_of(length), greedy(TOKENS))
        for _ in range(3):
            opened.step()
    opened.run(ids.values())
    return {length: opened.take(req_id) for length, req_id in ids.items()}


def different(reference: Reference, results: dict[int, Result]) -> list[int]:
    """Lengths of the prompts whose tokens or logits are not the reference's, bit for bit."""
    found = []
    for length, result in results.items():
        want = reference.results[length]
        if result.tokens != want.tokens or not torch.equal(result.logits, want.logits):
            found.append(length)
    return found


def chunk_ends(steps: list[dict[str, int]], lengths: dict[str, int]) -> list[int]:
    """Where the chunks of prompts end that do not end their prompt; ``lengths``: prompt length per request id."""
    done: dict[str, int] = {}
    ends = []
    for step in steps:
        for req_id, scheduled in step.items():
            done[req_id] = done.get(req_id, 0) + scheduled
            if done[req_id] < lengths[req_id]:
                ends.append(done[req_id])
    return ends


def watch_chunks(opened: Engine, schedule_of: Callable) -> Callable[[], list[int]]:
    """Returns a function that gives the chunk ends of every request so far."""
    lengths: dict[str, int] = {}
    add = opened.scheduler.add_request

    def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
        lengths[request.request_id] = request.num_prompt_tokens
        return add(request, *args, **kwargs)

    opened.scheduler.add_request = watched
    steps = schedule_of(opened)
    return lambda: chunk_ends(steps, lengths)


def watch_gemm_slices(opened: Engine) -> list[tuple[int, int]]:
    """The products of less than a row tile that prefills are cut into, as they run."""
    cut: list[tuple[int, int]] = []
    build = opened.runner.step.inputs.build

    def watched(*args: Any) -> Any:
        for inputs in build(*args):
            cut.extend(part for part in inputs.attn.gemm_rows.slices or () if part[1] < inputs.attn.gemm_rows.tile)
            yield inputs

    opened.runner.step.inputs.build = watched
    return cut


# Variants

BUDGETS: dict[str, tuple[float, bool]] = {  # GDN chunks, async
    "one chunk": (1, False),
    "five chunks": (5, False),
    "off the grid": (100 / 64, True),  # 100 tokens for a chunk of 64: clipped to 64
}


@pytest.mark.parametrize("company", ["together", "backwards", "one_by_one"])
def test_neighbours_change_no_bit(reference, company):
    assert different(reference, reference.neighbours[company]) == []


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_budget_of_at_least_a_chunk_changes_a_bit(reference, budget, schedule_of):
    model = reference.model
    chunks, is_async = BUDGETS[budget]
    with reference.open(max_num_batched_tokens=int(chunks * model.chunk), async_scheduling=is_async) as opened:
        ends = watch_chunks(opened, schedule_of)
        assert different(reference, one_by_one(opened, model.lengths)) == []
        assert len(ends()) >= 1
        assert model.name == "qwen3" or all(end % model.chunk == 0 for end in ends())


# No step in common with the default buckets, apart from the tops, which are the engine's limits.
OTHER_LADDERS = {
    "prefill_batch_buckets": [1, 3],
    "prefill_query_buckets": [192, 320],
    "prefill_block_buckets": [3, 7, 11],
    "decode_batch_buckets": [3, 7],
    "decode_block_buckets": [5, 23, 37],
}

VARIANTS: dict[str, Callable[[Model], dict[str, Any]]] = {
    "other buckets": lambda model: {"additional_config": OTHER_LADDERS, "max_num_seqs": 9},
    "two sequences and a threshold": lambda model: {
        "max_num_seqs": 2,
        "long_prefill_token_threshold": int(2.5 * model.chunk),
    },
    "thirty-three sequences, sync": lambda model: {
        "max_num_seqs": 33,
        "max_model_len": 448,
        "async_scheduling": False,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_neither_buckets_nor_limits_change_a_bit(reference, variant):
    model = reference.model
    with reference.open(**{"max_num_batched_tokens": WHOLE, **VARIANTS[variant](model)}) as opened:
        assert different(reference, alone(opened, [max(model.lengths)])) == []
        if variant == "other buckets":
            assert not opened.runner.graphs.unwarmed_shapes & reference.shapes, (
                "the variant runs the reference's shapes"
            )
        assert different(reference, together(opened, model.lengths)) == []


@pytest.fixture(scope="module")
def exact_reference(reference) -> Reference:
    """The same prompts alone, in one chunk, in a host's mode: which kernel its products take depends on the machine, so
    their last bits may not be those of the other mode.
    """
    model = reference.model
    made = Reference(model, reference.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_GAUDI_EXECUTION_MODE", "host")
        with made.open(max_num_batched_tokens=WHOLE) as opened:
            assert opened.runner.mode.exact_shapes
            made.results = alone(opened, model.lengths)
    return made


@pytest.mark.parametrize("chunks", [None, 1, 5])
def test_exact_shapes_change_no_bit_whatever_the_budget(exact_reference, chunks, monkeypatch):
    monkeypatch.setenv("VLLM_GAUDI_EXECUTION_MODE", "host")
    model = exact_reference.model
    with exact_reference.open(max_num_batched_tokens=chunks * model.chunk if chunks else WHOLE) as opened:
        assert opened.runner.mode.exact_shapes
        cut = watch_gemm_slices(opened)
        for run in (together, one_by_one):
            assert different(exact_reference, run(opened, model.lengths)) == []
        assert bool(cut) == (model.name != "qwen3" and model.chunk == 64)
        shapes = opened.runner.graphs.unwarmed_shapes
        rows = {rows for kind, rows, *_ in shapes if kind == "prefill"}
        assert chunks or rows - {64, 128, 256, 512}, "a length that no buckets has"
        decodes = {batch for kind, _, batch, *_ in shapes if kind == "decode"}
        assert decodes >= {1, 2} and (chunks == 1 or decodes >= {3, 6})


# Below one chunk the grid is out of reach


@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "long_prefill_token_threshold"])
@pytest.mark.parametrize(
    "model",
    [Model("q35_dense", "float32", 128, 64), Model("q35_vl", "float32", 128, 64, {"language_model_only": True})],
    ids=str,
)
def test_a_budget_below_one_chunk_stays_near(model, limit, checkpoint, schedule_of):
    path = checkpoint(model.name)
    made = Reference(model, path)
    lengths = [length for length in model.lengths if length >= model.chunk]
    with made.open(max_num_batched_tokens=WHOLE) as opened:
        made.results = alone(opened, lengths)
    with made.open(**{"max_num_batched_tokens": WHOLE, limit: 17}) as opened:
        ends = watch_chunks(opened, schedule_of)
        for run in (alone, one_by_one):
            results = run(opened, lengths)
            assert any(end % model.chunk for end in ends())
            points = range(model.chunk, max(lengths) - 17, model.chunk)  # a prompt's last chunk may run over one
            assert set(points) <= set(ends()), "a chunk ran over a grid point"
            for length, result in results.items():
                want = made.results[length]
                assert result.tokens == want.tokens
                assert (result.logits - want.logits).abs().max() <= NEAR


# The comparison can fail


@pytest.fixture(scope="module")
def fp32_reference(checkpoint) -> Reference:
    made = Reference(MODELS[1], checkpoint(MODELS[1].name))
    with made.open(max_num_batched_tokens=WHOLE) as opened:
        made.results = alone(opened, made.model.lengths)
    return made


def prompts_that_differ(reference: Reference) -> list[int]:
    with reference.open(max_num_batched_tokens=100) as opened:
        return different(reference, together(opened, reference.model.lengths))


def test_the_comparison_is_quiet_on_the_product_itself(fp32_reference):
    assert prompts_that_differ(fp32_reference) == []


def test_bits_differ_without_the_chunk_grid(fp32_reference, monkeypatch):
    monkeypatch.setattr(hpu_scheduler, "chunk_end_on_grid", lambda start, end, *rest: end)
    assert prompts_that_differ(fp32_reference)


def test_bits_differ_where_one_run_cuts_a_prompts_last_tile_and_another_does_not(checkpoint, monkeypatch):
    """In products long enough that a BLAS sums them up differently for 16 and 64 rows, where this machine's does."""
    rows, weight = torch.randn(64, 8192), torch.randn(512, 8192)
    sums_by_rows = not torch.equal(F.linear(rows, weight)[:16], F.linear(rows[:16], weight))
    monkeypatch.setenv("VLLM_GAUDI_EXECUTION_MODE", "host")
    made = Reference(Model("q35_small", "float32", 0, 64), checkpoint("q35_small"))
    flags = {"block_size": None, "max_num_batched_tokens": WHOLE, "num_gpu_blocks_override": 16}
    with made.open(**flags) as opened:
        assert opened.chunk == 64
        made.results = alone(opened, [80])
        assert different(made, alone(opened, [80])) == []
    monkeypatch.setattr(InputBuilder, "_prefill_gemm_rows", lambda self, tiles, *_: GemmRows(tiles.prefill))
    with made.open(**flags) as opened:
        assert different(made, alone(opened, [80])) == ([80] if sums_by_rows else [])


def test_bits_differ_with_as_many_rows_as_there_are_sequences(fp32_reference, monkeypatch):
    """Neither row tiles nor the least number of rows: a decode of one request is a product of one row."""
    monkeypatch.setenv("VLLM_GAUDI_ROW_TILES", "0")
    monkeypatch.setattr(grid, "MIN_ROWS", 1)
    assert prompts_that_differ(fp32_reference)
