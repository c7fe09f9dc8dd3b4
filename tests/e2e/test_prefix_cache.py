# SPDX-License-Identifier: Apache-2.0
"""A cache hit on a GDN hybrid equals a cold run: bitwise for checkpoints made by prefill, within 1e-4 for decode-made.

Reach comes first: a comparison counts only after the hit has reported the tokens that it must reuse. A cold run is the
same prompt under a cache salt of its own, in the same engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.share import share_of
from tests.support import faults
from vllm_gaudi.testing.engine import Engine, Result, engine, greedy

pytestmark = pytest.mark.execution_mode("host", "hpu_like")

TOLERANCE = 1e-4

MODELS = {
    "q35_dense": {},
    "q35_moe": {},
    "next_moe": {},
    "q35_vl": {"language_model_only": True},
    "q35_moe_vl": {"language_model_only": True},
}

_salts = iter(range(10**9))


def cold(serving: Engine, prompt: Sequence[int], **kwargs: Any) -> Result:
    """The prompt under a salt that nobody else has: nothing can be reused, in either direction."""
    result = serving.generate([prompt], cache_salt=f"cold-{next(_salts)}", **kwargs)[0]
    assert result.cached_tokens == 0
    return result


def reachable(prompt: Sequence[int], block_size: int) -> int:
    """Tokens that a repeat of ``prompt`` reuses."""
    return (len(prompt) - 1) // block_size * block_size


def same_bits(one: Result, other: Result) -> bool:
    return one.tokens == other.tokens and torch.equal(one.logits, other.logits)  # type: ignore[arg-type]


def check_hit(result: Result, wanted: int, reference: Result, what: str) -> None:
    assert result.cached_tokens == wanted, f"{what}: reused {result.cached_tokens} tokens instead of {wanted}"
    assert same_bits(result, reference), f"{what}: differs from the cold run"


@pytest.mark.parametrize(
    ("model", "dtype", "is_async"),
    share_of(
        itertools.product(MODELS, ("float32", "bfloat16"), (False, True)),
        lambda model, dtype, is_async: is_async == (dtype == "float32"),
    ),
)
def test_a_repeat_hits_its_last_boundary_and_equals_cold(
    model: str, dtype: str, is_async: bool, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    flags = {**MODELS[model], "dtype": dtype, "async_scheduling": is_async}
    with engine(checkpoint(model, dtype), enable_prefix_caching=True, **flags) as serving:
        size = serving.block_size
        for length in (size - 1, size, size + 1, size + 2, size + 3, 2 * size, 3 * size + 5, 5 * size):
            text = prompt(length)
            reference = cold(serving, text, params=greedy(5))
            first, second, third = (serving.generate([text], greedy(5))[0] for _ in range(3))
            assert first.cached_tokens == 0 and same_bits(first, reference)
            for hit in (second, third):
                check_hit(hit, reachable(text, size), reference, f"{length} tokens")


@pytest.mark.parametrize("budget", ["B - 1", "B", "B / 2", "17", "1.3 B", "2 B - 1", "2.3 B", "9 B"])
@pytest.mark.parametrize("block_size", share_of([16, 64, 128], lambda size: size != 64))
def test_every_budget_gives_the_same_hits_and_bits(
    budget: str, block_size: int, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    tokens = {"B - 1": block_size - 1, "B / 2": block_size // 2, "17": 17, "2 B - 1": 2 * block_size - 1}.get(budget)
    tokens = tokens or int(float(budget.replace("B", "").strip() or 1) * block_size)
    flags = {"block_size": block_size, "max_model_len": 12 * block_size, "enable_prefix_caching": True}
    with engine(checkpoint("q35_dense"), max_num_batched_tokens=tokens, **flags) as serving:
        assert serving.block_size == block_size
        on_grid = tokens >= serving.chunk
        for blocks in (1.0, 2.4, 3.0):
            text = prompt(int(blocks * block_size))
            reference = cold(serving, text, params=greedy(4))
            serving.generate([text], greedy(4))
            hit = serving.generate([text], greedy(4))[0]
            assert hit.cached_tokens == reachable(text, block_size)
            if on_grid:
                assert same_bits(hit, reference)
            else:  # below one chunk the grid is out of reach
                assert hit.tokens == reference.tokens
                assert (hit.logits - reference.logits).abs().max() < TOLERANCE


def test_hits_in_a_ragged_batch_equal_cold_solo_runs(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    with engine(checkpoint("q35_dense"), enable_prefix_caching=True, max_num_batched_tokens=64) as serving:
        size = serving.block_size
        texts = [prompt(length) for length in (3 * size + 1, size + 2, 2 * size, 5 * size + 7, 9, 4 * size + 15)]
        references = [cold(serving, text) for text in texts]
        for text in texts:
            serving.generate([text])
        for order in (texts, texts[::-1]):
            new = prompt(2 * size + 3)  # a cold row among the hits
            results = serving.generate([*order, new])
            for text, result in zip(order, results, strict=False):
                check_hit(
                    result, reachable(text, size), references[texts.index(text)], f"{len(text)} tokens in a batch"
                )
            assert results[-1].cached_tokens == 0 and same_bits(results[-1], cold(serving, new))


def test_a_checkpoint_of_a_longer_prompt_and_of_a_sibling_serves(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    with engine(checkpoint("q35_dense"), enable_prefix_caching=True, max_num_batched_tokens=256) as serving:
        size = serving.block_size
        shared = prompt(3 * size)
        siblings = [shared + prompt(length) for length in (5, size + 3, 2 * size + 1, 7)]
        references = [cold(serving, text) for text in siblings]
        results = [serving.generate([text])[0] for text in siblings]
        reused = [result.cached_tokens for result in results]
        assert reused == [0, 3 * size, 3 * size, 3 * size]
        for result, reference in zip(results, references, strict=True):
            assert same_bits(result, reference)
        # A prefix of a longer prompt, ending where that one was split.
        longer = siblings[3] + prompt(4 * size)
        serving.generate([longer])
        hit = serving.generate([longer[: 3 * size + 2]])[0]
        check_hit(hit, 3 * size, cold(serving, longer[: 3 * size + 2]), "prefix of a longer prompt")


@pytest.mark.execution_mode("host")
@pytest.mark.parametrize(
    ("model", "is_async"),
    share_of(
        itertools.product(("q35_dense", "next_moe"), (False, True)),
        lambda model, is_async: is_async == (model == "q35_dense"),
    ),
)
def test_the_next_turn_hits_to_the_last_boundary_of_prompt_and_answer(
    model: str, is_async: bool, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    with engine(checkpoint(model), enable_prefix_caching=True, async_scheduling=is_async) as serving:
        size = serving.block_size
        for answer in (size // 2, 3 * size, 3 * size + 1):
            history = prompt(2 * size + 3)
            for _ in range(3):
                turn = serving.generate([history], greedy(answer))[0]
                computed = len(history) + len(turn.tokens) - 1  # the last sampled token was never read
                history = history + turn.tokens + prompt(7)
                hit = serving.generate([history], greedy(16))[0]
                reference = cold(serving, history, params=greedy(16))
                assert hit.cached_tokens == computed // size * size
                assert hit.tokens == reference.tokens
                assert (hit.logits - reference.logits).abs().max() < TOLERANCE


@pytest.mark.execution_mode("host")
@pytest.mark.parametrize("is_full", [False, True], ids=["empty pool", "full pool"])
def test_retention_flag_of_vllm(
    is_full: bool, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    """Dense keeps every boundary; an interval its multiples; 0 the ends. Others only use blocks that hold nothing."""
    reused = {}
    for retention in (None, 0, 64):
        with engine(
            checkpoint("q35_dense"),
            enable_prefix_caching=True,
            prefix_cache_retention_interval=retention,
            max_num_batched_tokens=32,
            async_scheduling=False,
            num_gpu_blocks_override=120,
        ) as serving:
            if is_full:
                for _ in range(9):  # of 20 blocks each and their checkpoints
                    serving.generate([prompt(320)], greedy(1))
            text = prompt(150)
            serving.generate([text], greedy(40))
            reused[retention] = tuple(
                serving.generate([again], greedy(1))[0].cached_tokens
                for again in (text[:50], text[:66], text)  # 48 and 64 = 4 B lie inside the first prompt
            )
    # In a full pool the first of them leaves a checkpoint where it has run beside the cached blocks: 48.
    ends_only = (0, 48, 144) if is_full else (48, 64, 144)
    assert reused == {None: (48, 64, 144), 0: ends_only, 64: (ends_only[0], 64, 144)}


@pytest.mark.execution_mode("host")
@pytest.mark.parametrize("fault", sorted(faults.FAULTS))
def test_every_fault_turns_the_parity_gate_red(
    fault: str, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    with engine(checkpoint("q35_dense"), enable_prefix_caching=True) as serving:
        size = serving.block_size
        text = prompt(4 * size + 3)
        reference = cold(serving, text)
        faults.put_in(serving.runner, fault)
        results = []
        for _ in range(3):
            serving.generate([prompt(3 * size + 1)])  # other requests use slots and blocks in between
            results.append(serving.generate([text])[0])
        assert not all(same_bits(result, reference) for result in results)


@pytest.mark.execution_mode("host")
def test_off_costs_nothing_and_on_costs_its_staging_rows(checkpoint: Callable[..., Path]) -> None:
    blocks, states = {}, {}
    for caching in (False, True):
        flags = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 2**23, "enable_prefix_caching": caching}
        with engine(checkpoint("q35_dense"), **flags) as serving:
            runner = serving.runner
            geometry = runner.step.caches.geometry
            blocks[caching], states[caching] = geometry.num_blocks, runner.step.caches.state_bytes
            assert hasattr(runner.step.store, "layout") == caching
            rows = serving.runner.max_num_seqs + 2 + runner.step.grid.num_staging
            assert runner.step.caches.ssm_states[0].shape[0] == rows and (runner.step.grid.num_staging > 0) == caching
            block_bytes = geometry.page_bytes * len(geometry.attention_layers)
    staging = states[True] - states[False]
    assert blocks[False] > 100
    assert blocks[False] - blocks[True] in (staging // block_bytes, -(-staging // block_bytes))
