# SPDX-License-Identifier: Apache-2.0
"""How much memory the block pool gets, what is taken off first, and what the operator is told.

Owns: the three flags that size the pool, the budget against what is really allocated, refusal of an impossible budget,
and the start-up line.
Never: the worker's own sums as the truth: bytes are counted on the tensors that an engine holds.

Ordering rule: none; each test starts the engines that it needs.
"""

from __future__ import annotations

import ctypes
import logging
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_gaudi.testing.engine import Engine, engine, greedy
from vllm_gaudi.v1.worker.bucketed_sampling import BucketedSampler
from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner
from vllm_gaudi.v1.worker.hpu_worker import HPUWorker
from vllm_gaudi.v1.worker.kv_cache import KVCaches
from vllm_gaudi.v1.worker.prompt_logprobs import PromptLogprobsWorker
from vllm_gaudi.v1.worker.sampling import SamplingState
from vllm_gaudi.v1.worker.step import StepRunner

MIB = 2**20
GIVEN = 24 * MIB
HOST = 0.25  # GiB; the weights of a tiny model are a few MiB


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a device that a few seconds can fill with blocks."""
    monkeypatch.setenv("VLLM_GAUDI_HOST_MEMORY_GIB", str(HOST))
    return int(HOST * 2**30)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the peak bytes of each profile run."""
    found: list[int] = []
    profile = HPUWorker._profile

    def watched(self: HPUWorker, *args: Any) -> int:
        found.append(profile(self, *args))
        return found[-1]

    monkeypatch.setattr(HPUWorker, "_profile", watched)
    return found


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the worker logs from INFO up."""
    logger = logging.getLogger("vllm.vllm_gaudi.worker")
    handler, level = Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.setLevel(level)
    logger.removeHandler(handler)


def size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Held:
    """Bytes of the tensors that an engine holds."""

    def __init__(self, opened: Engine):
        caches = opened.runner.step.caches
        kernel_blocks = caches.geometry.num_blocks * caches.geometry.kernel_blocks_per_block
        pages = size((*caches.k, *caches.v))
        self.blocks = caches.geometry.num_blocks
        self.spare = pages // (kernel_blocks + 1)
        self.pool = pages - self.spare
        self.block = self.pool // self.blocks
        self.state = size((*caches.conv_states, *caches.ssm_states))
        self.weights = size(opened.runner.model.parameters())

    def __repr__(self) -> str:
        return str(vars(self))


def blocks_of_scheduler(opened: Engine) -> int:
    return opened.scheduler.kv_cache_manager.block_pool.num_gpu_blocks


# The three flags


@pytest.mark.parametrize("name", ["q35_dense", "llama"])
def test_the_override_is_the_number_of_blocks(name, checkpoint):
    for blocks in (57, 200):
        with engine(checkpoint(name), num_gpu_blocks_override=blocks) as opened:
            assert Held(opened).blocks == blocks_of_scheduler(opened) == blocks
            assert opened.runner.step.caches.k[0].shape[0] == opened.runner.step.caches.geometry.kernel_block * (
                blocks + 1
            )


@pytest.mark.parametrize("max_num_seqs", [8, 256])
@pytest.mark.parametrize(
    ("name", "dtype", "block"),
    [
        ("q35_dense", "float32", 16),
        ("next_moe", "bfloat16", 128),
        ("q35_moe", "float32", 32),
        ("llama", "bfloat16", 128),
    ],
)
def test_given_bytes_hold_slots_and_as_many_blocks_as_fit(name, dtype, block, max_num_seqs, checkpoint):
    with engine(
        checkpoint(name, dtype),
        dtype=dtype,
        block_size=block,
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=GIVEN,
        max_num_seqs=max_num_seqs,
    ) as opened:
        held = Held(opened)
        assert held.blocks == blocks_of_scheduler(opened) == (GIVEN - held.state - held.spare) // held.block
        assert 0.97 * GIVEN < held.pool + held.spare + held.state <= GIVEN
        for tensor in (*opened.runner.step.caches.conv_states, *opened.runner.step.caches.ssm_states):
            assert tensor.shape[0] == max_num_seqs + 2 + opened.runner.step.grid.num_staging


def test_more_slots_cost_exactly_their_bytes_in_blocks(checkpoint):
    found = {}
    for max_num_seqs in (8, 256):
        with engine(
            checkpoint("q35_dense"),
            num_gpu_blocks_override=None,
            kv_cache_memory_bytes=GIVEN,
            max_num_seqs=max_num_seqs,
        ) as opened:
            found[max_num_seqs] = Held(opened)
            staging = opened.runner.step.grid.num_staging
    few, many = found[8], found[256]
    row = few.state // (10 + staging)
    assert few.state == (10 + staging) * row and many.state == (258 + staging) * row
    assert few.block == many.block
    lost = few.blocks - many.blocks
    assert lost in (248 * row // few.block, -(-248 * row // few.block)) and lost > 0


@pytest.mark.parametrize("name", ["q35_dense", "llama"])
def test_the_share_of_the_device_is_used_and_not_exceeded(name, checkpoint, small_host, peaks):
    blocks = {}
    for share in (0.4, 0.9):
        with engine(checkpoint(name), num_gpu_blocks_override=None, gpu_memory_utilization=share) as opened:
            held, budget = Held(opened), int(small_host * share)
            used = held.pool + held.spare + held.state + held.weights + peaks[-1]
            assert 0.97 * budget < used <= budget, (held, peaks[-1])
            blocks[share] = held.blocks
            assert blocks_of_scheduler(opened) == held.blocks
            opened.generate([[11] * 100])
    assert blocks[0.9] > 2 * blocks[0.4]


def test_a_larger_budget_of_tokens_is_profiled_and_leaves_fewer_blocks(checkpoint, small_host, peaks):
    blocks = []
    for tokens in (64, 4096):
        # Memory that this process has freed but not given back would hide the peak.
        ctypes.CDLL(None).malloc_trim(0)
        flags = {"max_num_batched_tokens": tokens, "max_model_len": 4096, "gpu_memory_utilization": 0.9}
        with engine(checkpoint("q35_dense"), num_gpu_blocks_override=None, **flags) as opened:
            blocks.append(Held(opened).blocks)
    hidden_and_logits = 4096 * 64 * 4
    assert peaks[1] > peaks[0] + hidden_and_logits
    assert blocks[1] < blocks[0]


@pytest.mark.parametrize("name", ["q35_dense", "llama"])
def test_the_profile_runs_tensors_are_gone_before_the_engines_own_are_made(name, checkpoint, monkeypatch, small_host):
    """A device that is nearly full cannot hold the states of all slots twice."""
    made: list[list[weakref.ref]] = []
    alive: list[int] = []
    build = KVCaches.__init__

    def watched(self, *args, **kwargs):
        alive.append(sum(ref() is not None for refs in made for ref in refs))
        build(self, *args, **kwargs)
        made.append([weakref.ref(t) for t in (*self.k, *self.v, *self.conv_states, *self.ssm_states)])

    profiled = []
    profile_run = HPUModelRunner.profile_run
    monkeypatch.setattr(HPUModelRunner, "profile_run", lambda self: profiled.append(profile_run(self)))
    monkeypatch.setattr(KVCaches, "__init__", watched)
    with engine(checkpoint(name), num_gpu_blocks_override=None):
        assert len(profiled) == 1
        assert alive == [0, 0] and len(made) == 2 and made[0]


@pytest.mark.parametrize("given", [{"kv_cache_memory_bytes": GIVEN}, {"num_gpu_blocks_override": 60}], ids=str)
def test_a_host_with_a_given_pool_starts_without_a_profile_run(given, checkpoint, monkeypatch, peaks, said):
    monkeypatch.setattr(HPUModelRunner, "profile_run", lambda _: pytest.fail("profiled"))
    with engine(checkpoint("q35_dense"), **{"num_gpu_blocks_override": None, **given}) as opened:
        assert peaks == [None] and opened.generate([[11] * 100])[0].tokens
    assert any("profile peak not measured" in line for line in said)


def test_a_profile_run_leaves_nothing_behind(checkpoint):
    """The layers read the engine's own pool, not the one of one block that the profile run used."""
    with engine(checkpoint("q35_dense")) as opened:
        runner = opened.runner
        pages = {id(cache) for cache in (*runner.step.caches.k, *runner.step.caches.v)}
        bound = [
            layer.kv_cache
            for name, layer in runner.layers.items()
            if name in runner.step.caches.geometry.attention_layers
        ]
        assert {id(tensor) for pair in bound for tensor in pair} == pages
        states = {id(state) for state in (*runner.step.caches.conv_states, *runner.step.caches.ssm_states)}
        gdn = [layer.kv_cache for name, layer in runner.layers.items() if hasattr(layer, "bind_state")]
        assert {id(tensor) for pair in gdn for tensor in pair} == states
        assert runner.graphs.warmed_shapes == runner.graphs.unwarmed_shapes == set()


# A budget that cannot be


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (
            {"kv_cache_memory_bytes": 100_000},
            ["--kv-cache-memory-bytes 100000", "GDN states of 8 slots", "--max-num-seqs"],
        ),
        (
            {"kv_cache_memory_bytes": 3 * MIB, "max_num_seqs": 256},
            ["--kv-cache-memory-bytes 3145728", "GDN states of 256 slots", "--max-num-seqs"],
        ),
        (
            {"gpu_memory_utilization": 0.005},
            ["--gpu-memory-utilization 0.005 of 0.25 GiB", "weights take", "VLLM_GAUDI_HOST_MEMORY_GIB"],
        ),
    ],
    ids=str,
)
def test_an_impossible_budget_is_refused_by_the_names_of_its_flags(flags, named, checkpoint, small_host):
    with pytest.raises(RuntimeError, match="no memory is left for the block pool") as refused:
        Engine(checkpoint("q35_dense"), **{"num_gpu_blocks_override": None, **flags})
    for words in [*named, "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--max-num-batched-tokens"]:
        assert words in str(refused.value)


def test_a_pool_too_small_for_one_conversation_is_refused(checkpoint):
    with pytest.raises(ValueError, match="max_model_len") as refused:
        Engine(checkpoint("q35_dense"), num_gpu_blocks_override=None, kv_cache_memory_bytes=MIB, max_model_len=8192)
    assert "gpu_memory_utilization" in str(refused.value)


def test_an_engine_starts_after_one_that_was_refused(checkpoint):
    with pytest.raises(RuntimeError):
        Engine(checkpoint("q35_dense"), num_gpu_blocks_override=None, kv_cache_memory_bytes=100_000)
    with engine(checkpoint("q35_dense")) as opened:
        assert len(opened.generate([[11] * 20])[0].tokens) == 16


# What the operator reads

LINE = re.compile(
    r"vllm_gaudi on (?P<device>\w+): B = (?P<block>\d+) tokens, (?P<groups>\d+) GDN group\(s\) \+ 1 attention group, "
    r"(?P<blocks>\d+) blocks; pool (?P<pool>[\d.]+ .iB), (?P<slots>\d+) slots and "
    r"(?P<staging>\d+) staging rows (?P<state>[\d.]+ .iB), "
    r"weights (?P<weights>[\d.]+ .iB); maximum concurrency for (?P<length>[\d,]+) tokens per request: (?P<fits>[\d.]+)x"
)


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"MiB": MIB, "GiB": 2**30}[unit]


@pytest.mark.parametrize(
    ("name", "block", "groups"), [("q35_dense", 16, 3), ("q35_dense", 128, 3), ("next_moe", 64, 3), ("llama", 16, 0)]
)
def test_the_start_up_line_tells_what_was_built(name, block, groups, checkpoint, said):
    with engine(checkpoint(name), block_size=block, max_num_seqs=20, num_gpu_blocks_override=90) as opened:
        held = Held(opened)
    lines = [match for match in map(LINE.fullmatch, said) if match]
    assert len(lines) == 1, said
    (line,) = lines
    assert line["device"] == "cpu"
    assert [int(line[key]) for key in ("block", "groups", "blocks", "slots", "length")] == [block, groups, 90, 20, 512]
    assert int(line["staging"]) == {16: 16, 64: 4, 128: 4}[block] * bool(groups)  # of 256 tokens, in 1 to 4 prompts
    for key in ("pool", "state", "weights"):
        assert in_bytes(line[key]) == pytest.approx(getattr(held, key), abs=0.006 * MIB)


@pytest.mark.parametrize("name", ["q35_dense", "llama"])
def test_as_many_conversations_fit_as_the_line_says(name, checkpoint, said, preemptions_of):
    """With blocks for exactly two conversations two run to the end together; with one block less they do not."""
    each = 128 // 16
    preempted = {}
    for blocks in (2 * each + 1, 2 * each):
        flags = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 4}
        flags["num_gpu_blocks_override"] = blocks
        with engine(checkpoint(name), enable_prefix_caching=False, async_scheduling=False, **flags) as opened:
            stopped = preemptions_of(opened)
            results = opened.generate([[11] * 100, [12] * 100], greedy(28))
            assert [len(result.tokens) for result in results] == [28, 28]
            preempted[blocks] = len(stopped)
    told = [float(match["fits"]) for match in map(LINE.fullmatch, said) if match]
    assert told == [2.0, round((2 * each - 1) / each, 2)]
    assert preempted[2 * each + 1] == 0 < preempted[2 * each]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What sampling is asked for, by size: rows, penalties or not, tokens of the texts that they read, logprobs."""
    found: list[tuple[Any, ...]] = []
    forward, logprobs = BucketedSampler.forward, PromptLogprobsWorker._logprobs

    def watched(self: Any, logits: Any, sampling_metadata: Any) -> Any:
        asks = sampling_metadata
        texts = 0 if asks.no_penalties else asks.prompt_token_ids.shape[1]
        found.append(("sampled", len(logits), not asks.no_penalties, texts, asks.max_num_logprobs or 0))
        return forward(self, logits=logits, sampling_metadata=asks)

    def watched_logprobs(self: Any, logits: Any, targets: Any, num_logprobs: int) -> Any:
        found.append(("prompt", len(logits), num_logprobs))
        return logprobs(self, logits, targets, num_logprobs)

    monkeypatch.setattr(BucketedSampler, "forward", watched)
    monkeypatch.setattr(PromptLogprobsWorker, "_logprobs", watched_logprobs)
    return found


@pytest.mark.parametrize(
    "fault",
    [None, (SamplingState, "profile"), (StepRunner, "profile_prompt_logprobs")],
    ids=["", "sampling", "prompts"],
)
def test_the_profile_covers_what_a_request_may_ask_of_sampling(checkpoint, small_host, asked, monkeypatch, fault):
    """The most requests, the longest texts, all logprobs that are allowed: the profile has run as much at once."""
    if fault is not None:
        monkeypatch.setattr(*fault, lambda *_: None)
    with engine(checkpoint("q35_dense"), num_gpu_blocks_override=None) as it:
        profiled = list(asked)
        asked.clear()
        it.generate([list(range(20, 320))], greedy(1, prompt_logprobs=20))
        penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
        prompts = [list(range(20 + n, 420 + n % 60)) for n in range(it.runner.max_num_seqs)]
        it.generate(prompts, greedy(9, **penalties, logprobs=20))
    largest = [ask for ask in asked if ask[:2] in (("sampled", 8), ("prompt", 128))]
    assert {ask[0] for ask in largest} == {"sampled", "prompt"}

    def is_covered(ask: tuple[Any, ...]) -> bool:
        return any(p[0] == ask[0] and all(a <= b for a, b in zip(ask[1:], p[1:], strict=True)) for p in profiled)

    assert all(map(is_covered, asked)) is (fault is None)
