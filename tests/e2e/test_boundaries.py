# SPDX-License-Identifier: Apache-2.0
"""Every boundary has its checkpoint, whatever the budget; a pool holds what can be reused, and nothing is pinned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

from tests.support.checkpoint_witness import CheckpointWitness
from vllm_gaudi.testing.engine import Engine, Result, engine, greedy


def blocks_of(serving: Engine, tokens: int) -> list[tuple[int, ...]]:
    """Block ids of the published checkpoints, per boundary in ascending order, of the only request served so far."""
    ledger = serving.scheduler._ledger
    found = sorted(ledger._by_key.values(), key=lambda checkpoint: checkpoint.boundary)
    assert [checkpoint.boundary for checkpoint in found] == list(range(1, tokens // serving.block_size + 1))
    return [tuple(block.block_id for block in checkpoint.blocks) for checkpoint in found]


def states_at(serving: Engine, blocks: tuple[int, ...]) -> list[torch.Tensor]:
    return [words for group, block in enumerate(blocks) for words in serving.runner.step.store.read(group, block)]


def forget(serving: Engine) -> None:
    serving.drain()
    assert serving.vllm_engine.reset_prefix_cache()


def staged_per_step(serving: Engine) -> list[int]:
    """Filled, step by step, with the number of checkpoints that a forward has left in staging rows."""
    counts: list[int] = []
    save = serving.runner.step.store.save

    def counted(copies: Any) -> None:
        counts.append(int((copies.rows >= serving.runner.step.caches.first_staging_row).sum()))
        save(copies)

    serving.runner.step.store.save = counted
    return counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "block_size"), [("q35_dense", 16), ("q35_dense", 128), ("q35_moe", 48), ("next_moe", 16)]
)
def test_one_step_over_nine_blocks_leaves_nine_checkpoints_equal_to_solo_runs(
    model: str, block_size: int, dtype: str, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    flags = {"dtype": dtype, "block_size": block_size, "max_model_len": 24 * block_size, "max_num_seqs": 4}
    budget = 20 * block_size
    path = checkpoint(model, dtype)
    with engine(path, enable_prefix_caching=True, max_num_batched_tokens=budget, **flags) as serving:
        size = serving.block_size
        assert size in (block_size, 2 * block_size)  # a bf16 page holds the same state in twice as many tokens
        text = prompt(9 * size)
        solo = []
        for boundary in range(1, 10):
            serving.generate([text[: boundary * size]], greedy(1))
            solo.append(states_at(serving, blocks_of(serving, boundary * size)[-1]))
            forget(serving)
        staged = staged_per_step(serving)
        serving.generate([text], greedy(1))
        assert max(staged) == 8, "eight boundaries on the way, one at the end"
        for boundary, blocks in enumerate(blocks_of(serving, 9 * size), 1):
            found, wanted = states_at(serving, blocks), solo[boundary - 1]
            assert any(words.any() for words in found)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), f"boundary {boundary}"


def test_ragged_prompts_of_one_forward_leave_what_solo_runs_leave(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    with engine(checkpoint("q35_dense"), enable_prefix_caching=True, max_num_batched_tokens=256) as serving:
        size = serving.block_size
        texts = [prompt(length) for length in (3 * size + 5, 4 * size, size - 1)]
        solo = {}
        for n, text in enumerate(texts):
            serving.generate([text], greedy(1))
            solo[n] = [states_at(serving, blocks) for blocks in blocks_of(serving, len(text))]
            forget(serving)
        staged = staged_per_step(serving)
        serving.generate(texts, greedy(1))
        assert max(staged) == 6, "one forward, three boundaries on the way in each of two sequences"
        by_key = serving.scheduler._ledger._by_key
        assert len(by_key) == 7
        wanted = [words for states in solo.values() for words in states]
        for held in by_key.values():
            found = states_at(serving, tuple(block.block_id for block in held.blocks))
            assert any(all(torch.equal(a, b) for a, b in zip(found, words, strict=True)) for words in wanted)


@pytest.mark.parametrize("budget", [24, 32, 40, 48, 112, 160, 250])
def test_a_prompt_gets_the_whole_budget(
    budget: int, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    """B = 48, C = 16: chunks end on the GDN grid, not on blocks, and the prompt's rest takes no step of its own."""
    with engine(
        checkpoint("q35_moe"), enable_prefix_caching=True, block_size=48, max_num_batched_tokens=budget
    ) as serving:
        assert (serving.block_size, serving.chunk) == (48, 16)
        text = prompt(7 * 48 + 11)
        name = serving.add(text, greedy(1))
        scheduled = []
        schedule = serving.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            scheduled.extend(output.num_scheduled_tokens.values())
            return output

        serving.scheduler.schedule = watched
        serving.run([name])
        used = budget // 16 * 16
        assert scheduled == [used] * (len(text) // used) + ([len(text) % used] if len(text) % used else [])
        assert serving.generate([text], greedy(1))[0].cached_tokens == 7 * 48


def grouped_prompts(prompt: Callable[[int], list[int]], size: int) -> list[list[list[int]]]:
    """Eight groups of eight: a shared prefix of 2.84 B tokens, a suffix of 1.33 B of each prompt's own."""
    prefixes = [prompt(round(2.84 * size)) for _ in range(8)]
    return [[prefix + prompt(round(1.33 * size)) for _ in range(8)] for prefix in prefixes]


@pytest.mark.parametrize("retention", ["default", None])
@pytest.mark.parametrize("budget", [0.5, 1, 2.3, 9])
def test_reuse_of_a_shared_prefix_does_not_depend_on_the_budget(
    budget: float, retention: Any, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    flags = {} if retention == "default" else {"prefix_cache_retention_interval": retention}
    size = 64
    with engine(
        checkpoint("q35_dense"),
        enable_prefix_caching=True,
        block_size=size,
        max_num_batched_tokens=int(budget * size),
        num_gpu_blocks_override=900,
        **flags,
    ) as serving:
        assert serving.block_size == size
        for order in ("one after the other", "all at once"):
            groups = grouped_prompts(prompt, size)
            if order == "all at once":
                results = serving.generate([text for texts in zip(*groups, strict=True) for text in texts], greedy(1))
            else:
                results = [serving.generate([text], greedy(1))[0] for texts in groups for text in texts]
            hits = [result.cached_tokens for result in results]
            assert hits.count(2 * size) >= 56 and hits.count(0) <= 8, f"{order}: {hits}"


def test_the_second_request_with_a_shared_system_prompt_hits(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    with engine(checkpoint("q35_dense"), enable_prefix_caching=True) as serving:
        size = serving.block_size
        system = prompt(3 * size + 4)
        first, second = (serving.generate([system + prompt(2 * size)], greedy(4))[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 3 * size)


def test_twins_wait_for_one_step_at_most(checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]) -> None:
    """The first of the twins takes several steps; the others start behind its first chunk, and again no later."""
    with engine(
        checkpoint("q35_dense"), enable_prefix_caching=True, max_num_batched_tokens=96, async_scheduling=False
    ) as serving:
        size = serving.block_size
        serving.scheduler.scheduler_config.long_prefill_token_threshold = 2 * size
        text = prompt(6 * size + 3)
        names = [serving.add(text, greedy(2)) for _ in range(2)]
        admitted: list[int] = []
        while serving.vllm_engine.has_unfinished_requests():
            serving.step()
            admitted.append(len(serving.scheduler.running))
        assert admitted[:2] == [1, 2]
        results = [serving.take(name) for name in names]
        assert [result.cached_tokens for result in results] == [0, 2 * size]
        assert results[0].tokens == results[1].tokens


def align_mode_requests(serving: Engine, num_tokens: int, limit: int) -> int:
    """How many requests of ``num_tokens`` vLLM's own Mamba manager (align mode) takes into this engine's pool."""
    config = serving.scheduler.kv_cache_config
    groups = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            spec = MambaSpec(**{name: getattr(spec, name) for name in spec.__dataclass_fields__})
        groups.append(KVCacheGroupSpec(group.layer_names, spec))
    size = serving.block_size
    manager = KVCacheManager(
        KVCacheConfig(config.num_blocks, config.kv_cache_tensors, groups), 512, size, hash_block_size=size
    )
    for n in range(limit):
        request = Request(f"align-{n}", list(range(num_tokens)), greedy(4), None)
        if manager.allocate_slots(request, num_tokens) is None:
            return n
    return limit


def test_a_running_request_takes_its_attention_blocks_and_no_more(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    num_blocks = 25
    with engine(
        checkpoint("q35_dense"),
        enable_prefix_caching=True,
        num_gpu_blocks_override=num_blocks,
        max_num_seqs=64,
        max_model_len=64,
        max_num_batched_tokens=512,
    ) as serving:
        witness = CheckpointWitness(serving.scheduler)
        size = serving.block_size
        tokens = int(0.9 * size)
        for _ in range(40):
            serving.add(prompt(tokens), greedy(size - tokens))
        most = 0
        while serving.vllm_engine.has_unfinished_requests():
            serving.step()
            witness.check()
            most = max(most, len(serving.scheduler.running))
        align = align_mode_requests(serving, tokens, 40)
        print(f"{num_blocks} blocks, requests of 0.9 B: {most} at once, align mode {align}")
        assert most == num_blocks - 1
        assert align <= (num_blocks - 1) // 4


def test_a_checkpoint_never_preempts_anybody(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    """The pool is exactly what the requests' attention needs; they cross boundaries, and none is preempted."""
    with engine(
        checkpoint("q35_dense"),
        enable_prefix_caching=True,
        num_gpu_blocks_override=1 + 4 * 6,
        max_num_seqs=4,
        max_model_len=128,
    ) as serving:
        witness = CheckpointWitness(serving.scheduler)
        size = serving.block_size
        results = serving.generate([prompt(3 * size) for _ in range(4)], greedy(3 * size))
        assert [len(result.tokens) for result in results] == [3 * size] * 4
        witness.check()
        assert witness.num_skipped > 0
        assert all(request.num_preemptions == 0 for request, _ in witness._reached.values())


def conversation(
    serving: Engine, history: Sequence[int], new: Sequence[int], answer: int
) -> tuple[list[int], Result, int]:
    """One turn: history after it, its result, and the tokens that an unlimited cache would have reused."""
    text = [*history, *new]
    result = serving.generate([text], greedy(answer))[0]
    computed = len(history) - 1 if history else 0  # the last token of an answer is never read
    return text + result.tokens, result, computed // serving.block_size * serving.block_size


@pytest.mark.parametrize("spare", [6, 40])
def test_alternating_conversations_that_fit_are_kept(
    spare: int, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    """Two conversations of 25 blocks, and G blocks for the end of each, fit with next to nothing to spare."""
    with engine(
        checkpoint("q35_dense"), enable_prefix_caching=True, num_gpu_blocks_override=1 + 2 * (25 + 3) + spare
    ) as serving:
        size = serving.block_size
        histories: list[list[int]] = [[], []]
        reused = reachable = 0
        for turn in range(7):
            for n in range(2):
                histories[n], result, could = conversation(serving, histories[n], prompt(2 * size + 5), size + 3)
                if turn:
                    reused += result.cached_tokens
                    reachable += could
        assert len(histories[0]) <= 25 * size
        print(f"{spare} blocks to spare: {reused} of {reachable} reachable tokens reused")
        assert reachable > 0 and reused >= 0.95 * reachable
