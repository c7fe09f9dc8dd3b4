# SPDX-License-Identifier: Apache-2.0
"""Warm-up and the buckets: after warm-up the model is given no shape that it has not seen.

Owns: the count of shapes, taken from what the model itself receives (a hook on its forward, and its logits product),
not from the runner's own books; buckets from the configuration; what warm-up may leave behind (nothing).
Never: bits across buckets (``test_determinism``), or the buckets arithmetic (unit tests of ``bucketing``).

Ordering rule: warm-up really runs here, so each engine has a small buckets.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.forward_context import get_forward_context

from vllm_gaudi.bucketing.grid import BucketGrid
from vllm_gaudi.testing.engine import Engine, engine, greedy
from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

pytestmark = pytest.mark.execution_mode("hpu_like")

SMALL = {"max_model_len": 192, "max_num_batched_tokens": 128, "max_num_seqs": 5, "num_gpu_blocks_override": 90}
"""A list of buckets of a few dozen shapes: three steps in each dimension."""


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_SKIP_WARMUP")


class Seen:
    """Shapes that reached the model's forward: (phase, token rows, sequences, block table or list), and logits rows."""

    def __init__(self, model: torch.nn.Module):
        self.forwards: set[tuple[Any, ...]] = set()
        self.logits_rows: set[int] = set()
        model.register_forward_pre_hook(self._forward, with_kwargs=True)
        logits = model.compute_logits

        def compute_logits(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
            self.logits_rows.add(hidden.shape[0])
            return logits(hidden, *args)

        model.compute_logits = compute_logits

    def _forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        attn = get_forward_context().attn_metadata
        rows = kwargs["input_ids"].shape[0]
        assert kwargs["positions"].shape[-1] == rows
        if attn.prefill is not None:
            table = tuple(attn.prefill.block_table.shape)
            assert table[0] == attn.batch and attn.slot_mapping.shape == (rows,)
            assert (
                attn.prefill.num_computed_tokens.shape
                == attn.prefill.query_lens.shape
                == attn.state_indices_in.shape
                == (attn.batch,)
            )
            kept = 0 if attn.intermediate is None else len(attn.intermediate.state_indices_out)
            assert attn.intermediate is None or attn.intermediate.offset.shape == (attn.batch,)
            self.forwards.add(("prefill", rows, attn.batch, table[1], kept))
        else:
            listed = attn.decode.block_list.shape[0]
            assert attn.decode.block_groups.shape == attn.decode.block_usage.shape == (listed,)
            assert (
                attn.decode.first_block.shape == attn.slot_mapping.shape == attn.state_indices_in.shape == (attn.batch,)
            )
            self.forwards.add(("decode", rows, attn.batch, listed, 0))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Filled with one ``Seen`` for each model that an engine loads in the test, from before its first forward."""
    found: list[Seen] = []
    init = HPUModelRunner.__init__

    def init_and_watch(self: HPUModelRunner, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        found.append(Seen(self.model))

    monkeypatch.setattr(HPUModelRunner, "__init__", init_and_watch)
    return found


def shapes_of(grid: BucketGrid) -> set[tuple[Any, ...]]:
    """What the grid says that it can ask for, as the model sees it."""
    prefill = {("prefill", b.batch * b.query, b.batch, b.blocks, b.batch * b.boundaries) for b in grid.all_prefill()}
    return prefill | {("decode", max(16, -(-b.batch // 16) * 16), b.batch, b.blocks, 0) for b in grid.all_decode()}


def random_load(opened: Engine, num_requests: int = 60, longest: int = 180) -> None:
    """Requests of mixed lengths arrive in bursts; some are aborted; the engine runs dry in between and at the end."""
    source = random.Random(5)
    waiting = num_requests
    running: list[str] = []
    while waiting:
        for _ in range(min(waiting, source.choice([0, 0, 1, 1, 2, 6]))):
            length = source.choice([1, 2, source.randrange(3, 40), source.randrange(40, longest - 8)])
            prompt = [source.randrange(10, 500) for _ in range(length)]
            running.append(opened.add(prompt, greedy(source.randrange(1, 9))))
            waiting -= 1
        for _ in range(source.choice([1, 1, 2, 5, 30])):
            opened.step()
        if running and source.random() < 0.1:
            opened.abort(running.pop(source.randrange(len(running))))
    opened.drain()


# The buckets is all there is


@pytest.mark.parametrize(
    ("name", "block", "is_async", "flags"),
    [
        ("q35_dense", 16, True, {}),
        ("q35_dense", 64, False, {"num_gpu_blocks_override": 30}),
        ("next_moe", 32, True, {"max_num_batched_tokens": 100, "num_gpu_blocks_override": 30}),
        ("llama", 16, True, {"num_gpu_blocks_override": 40, "enable_prefix_caching": True}),
        ("llama", 16, False, {"max_num_seqs": 17, "max_num_batched_tokens": 64}),
    ],
)
def test_a_random_load_gives_the_model_no_shape_that_warm_up_did_not(
    name, block, is_async, flags, checkpoint, seen, caplog
):
    with engine(checkpoint(name), **{**SMALL, "block_size": block, "async_scheduling": is_async, **flags}) as opened:
        (shapes,) = seen
        runner = opened.runner
        assert runner.graphs.warmed_shapes == shapes_of(runner.step.grid)
        warm = shapes_of(runner.step.grid)
        assert shapes.forwards >= warm
        shapes.forwards.clear()
        warm_logits = set(shapes.logits_rows)
        random_load(opened)
        assert shapes.forwards <= warm
        assert shapes.logits_rows <= warm_logits
        assert not runner.graphs.unwarmed_shapes
        assert "was not warmed-up" not in caplog.text
        assert len(shapes.forwards) > len(warm) // 4, "the load is too uniform to prove anything"


def test_a_shape_outside_the_ladder_would_be_noticed(checkpoint, seen):
    with engine(checkpoint("llama"), **SMALL) as opened:
        (shapes,) = seen
        warm = shapes_of(opened.runner.step.grid)
        shapes.forwards.clear()
        opened.runner.step.grid.prefill_queries = (48, *opened.runner.step.grid.prefill_queries)
        opened.generate([[11] * 40])
        assert shapes.forwards - warm == opened.runner.graphs.unwarmed_shapes != set()


def test_prompt_logprobs_bring_no_shape_beyond_the_query_ladder(checkpoint, seen):
    with engine(checkpoint("q35_dense"), **SMALL) as opened:
        (shapes,) = seen
        warm, warm_logits = set(shapes.forwards), set(shapes.logits_rows)
        results = opened.generate([[11] * length for length in (7, 33, 150)], greedy(2, prompt_logprobs=1))
        assert [len(result.prompt_logprobs) for result in results] == [7, 33, 150]
        assert shapes.forwards <= warm
        assert shapes.logits_rows <= warm_logits | set(opened.runner.step.grid.prefill_queries)


@pytest.mark.parametrize(("length", "budget"), [(128, 256), (100, 8192), (1024, 2048)])
def test_a_budget_above_the_longest_prompt_starts(length, budget, checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_SKIP_WARMUP", "1")
    with engine(checkpoint("llama"), max_model_len=length, max_num_batched_tokens=budget) as opened:
        (answer,) = opened.generate([[11] * (length - 8)], greedy(8))
        assert len(answer.tokens) == 8


# Buckets from --additional-config

USER_BUCKETS = {
    "prefill_batch_buckets": [1, 2],
    "prefill_query_buckets": [128],
    "prefill_block_buckets": [5, 9],
    "decode_batch_buckets": [2],
    "decode_block_buckets": [7, 20],
}


def test_a_configured_ladder_is_obeyed(checkpoint, seen):
    flags = {**SMALL, "max_num_batched_tokens": 192}
    with engine(checkpoint("q35_dense"), **flags, additional_config=USER_BUCKETS) as opened:
        (shapes,) = seen
        grid = opened.runner.step.grid
        # The top of each buckets is the engine's limit, whatever the configuration says.
        assert grid.prefill_batches == (1, 2, 4)
        assert grid.prefill_queries == (128, 192)
        assert grid.prefill_blocks == (5, 9, 12)
        assert grid.decode_batches == (2, 5)
        assert grid.decode_blocks == (7, 20, 60)
        assert opened.runner.graphs.warmed_shapes == shapes_of(grid)
        shapes.forwards.clear()
        random_load(opened)
        assert shapes.forwards <= shapes_of(grid)
        tables = {shape[3] for shape in shapes.forwards if shape[0] == "prefill"}
        assert {shape[2] for shape in shapes.forwards if shape[0] == "decode"} == {2, 5}
        assert tables == {5, 9, 12}


@pytest.mark.parametrize(
    "buckets",
    [
        {"prefill_batch_buckets": [2, 4]},
        {"prefill_batch_buckets": [3]},
        {"prefill_query_buckets": [128], "prefill_batch_buckets": [4]},
        {"prefill_query_buckets": []},
        {"prefill_block_buckets": [1, 2, 3]},
        {"decode_batch_buckets": [4], "decode_block_buckets": [1, 2]},
    ],
    ids=str,
)
def test_any_legal_ladder_starts_and_covers_the_load(buckets, checkpoint, seen):
    with engine(checkpoint("llama"), **SMALL, additional_config=buckets) as opened:
        (shapes,) = seen
        shapes.forwards.clear()
        random_load(opened, num_requests=20)
        assert shapes.forwards <= shapes_of(opened.runner.step.grid)
        assert not opened.runner.graphs.unwarmed_shapes


@pytest.mark.parametrize(
    ("buckets", "sentence"),
    [
        ({"prefill_query_buckets": [64, 100]}, "prefill_query_buckets has 100; .* positive multiple of 64"),
        ({"prefill_query_buckets": [0]}, "prefill_query_buckets has 0; .* positive multiple of 64"),
        ({"prefill_batch_buckets": [-1]}, "prefill_batch_buckets has -1; .* positive multiple of 1"),
        ({"decode_batch_buckets": [2.0]}, "decode_batch_buckets has 2.0; .* positive multiple of 1"),
        ({"decode_block_buckets": ["8"]}, "decode_block_buckets has '8'; .* positive multiple of 1"),
        ({"prefill_block_buckets": [True]}, "prefill_block_buckets has True; .* positive multiple of 1"),
        ({"prefill_block_buckets": 8}, "prefill_block_buckets is 8; it must be a list"),
        ({"prefill_block_buckets": "816"}, "prefill_block_buckets"),
        ({"prefil_block_buckets": [8]}, "unknown keys in --additional-config: .*prefil_block_buckets.*remove them"),
    ],
    ids=str,
)
def test_an_illegal_ladder_is_refused_with_a_sentence(buckets, sentence, checkpoint):
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        Engine(checkpoint("llama"), **SMALL, additional_config=buckets)


# Warm-up leaves no trace


@pytest.mark.parametrize(("name", "block"), [("q35_dense", 16), ("next_moe", 128)])
def test_warm_up_writes_to_no_block_and_no_slot(name, block, checkpoint):
    """Pages and slots start as NaN; after warm-up they still are, but for the rows of the pads, which are zero."""
    with engine(checkpoint(name), **{**SMALL, "block_size": block}) as opened:
        caches = opened.runner.step.caches
        geometry = caches.geometry
        null, spare = slice(geometry.block_size), slice(geometry.num_tokens, None)
        assert len(opened.runner.graphs.warmed_shapes) > 5
        for page in (*caches.k, *caches.v):
            assert page.shape[0] == (geometry.padding_block + 1) * geometry.kernel_block
            assert torch.isnan(page[null.stop : spare.start]).all()
            assert not page[spare].any() and not page[null].any()
        for state in (*caches.conv_states, *caches.ssm_states):
            assert state.shape[0] == SMALL["max_num_seqs"] + 2 + opened.runner.step.grid.num_staging
            assert torch.isnan(state[: SMALL["max_num_seqs"]]).all()
            assert not state[caches.zero_row].any() and not state[caches.trash_row].any()
        assert opened.runner.step.state_slots.num_taken == 0 and len(opened.runner.step.requests) == 0
        random_load(opened, num_requests=20)
        for state in (*caches.conv_states, *caches.ssm_states):
            assert not state[caches.zero_row].any(), "ZERO was written"
            assert torch.isfinite(state[caches.trash_row]).all()
        for page in (*caches.k, *caches.v):
            assert torch.isfinite(page[spare]).all()
            assert not page[null].any(), "the null block was written"


@pytest.mark.parametrize("name", ["q35_dense", "llama"])
def test_warm_up_changes_no_bit_of_an_answer(name, checkpoint, monkeypatch):
    source = random.Random(3)
    prompts = [[source.randrange(10, 500) for _ in range(length)] for length in (1, 17, 64, 130, 5)]
    answers = []
    for skip in ("0", "1"):
        monkeypatch.setenv("VLLM_SKIP_WARMUP", skip)
        with engine(checkpoint(name), **SMALL) as opened:
            assert bool(opened.runner.graphs.warmed_shapes) == (skip == "0")
            greedy_answers = opened.generate(prompts, greedy(8))
            sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, detokenize=False)
            answers.append(greedy_answers + opened.generate(prompts, sampled))
    for warm_answer, cold_answer in zip(*answers, strict=True):
        assert warm_answer.tokens == cold_answer.tokens
        assert torch.equal(warm_answer.logits, cold_answer.logits)
