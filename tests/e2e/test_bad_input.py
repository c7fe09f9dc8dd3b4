# SPDX-License-Identifier: Apache-2.0
"""Bad requests and bad starts: a clear error, early, and whoever is in order is served as if nothing had happened.

A bad request must be refused when it is added, before scheduler and worker have seen it: what the worker finds out in a
step ends a multi-process engine for everybody.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from vllm_gaudi.testing.checkpoints import VOCAB_SIZE
from vllm_gaudi.testing.engine import Engine, engine, greedy

PROMPT = [10 + (i * i * 7 + i * 13) % 480 for i in range(50)]
REFUSED = (VLLMValidationError, ValueError, TypeError)


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def is_async(request):
    return request.param


@pytest.fixture
def opened(shelf, is_async) -> Iterator[Engine]:
    """An engine that must say the same before and after, alone and beside a running request."""
    it = shelf("q35_dense", skip_tokenizer_init=False, async_scheduling=is_async)
    before = it.generate([PROMPT], greedy(3))[0].tokens
    beside = it.add(PROMPT, greedy(5))
    it.step()
    yield it
    it.run([beside])
    assert it.take(beside).tokens[:3] == before
    assert it.generate([PROMPT], greedy(3))[0].tokens == before


def refuse_and_serve(shelf: Any, is_async: bool, pattern: str, prompt: list[int], params: SamplingParams) -> None:
    """As ``refuse``, on an engine that is given up afterwards, since today the bad request gets into a step."""
    it = shelf("q35_dense", skip_tokenizer_init=False, async_scheduling=is_async)
    try:
        refuse(it, pattern, lambda: it.generate([prompt], params))
        assert len(it.generate([PROMPT], greedy(3))[0].tokens) == 3
    finally:
        shelf.clear()


def refuse(it: Engine, pattern: str, add: Callable[[], Any]) -> None:
    """``add`` raises at once, and the scheduler has never heard of it."""
    known = set(it.scheduler.requests)
    with pytest.raises(REFUSED, match=pattern):
        add()
    assert set(it.scheduler.requests) == known


# Requests

PROMPTS: dict[str, tuple[list[int], str]] = {
    "empty": ([], "cannot be empty"),
    "no-room-for-an-answer": ([5] * 512, "longer than the maximum model length of 512"),
    "too-long": ([5] * 600, "maximum context length is 512"),
    "negative-token": ([5, -1], "Token id -1 is out of vocabulary"),
    "huge-token": ([5, 10**9], "Token id 1000000000 is out of vocabulary"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_bad_prompt(opened, name):
    tokens, pattern = PROMPTS[name]
    refuse(opened, pattern, lambda: opened.add(tokens, greedy(4)))


@pytest.mark.xfail(
    strict=True,
    reason="fault of vLLM's bound (the tokenizer's size, not the largest id): the first id beyond the vocabulary gets "
    "to the worker and ends the engine with 'index out of range in self'",
)
def test_the_first_token_id_beyond_the_vocabulary(shelf, is_async):
    refuse_and_serve(shelf, is_async, "vocabulary", [5, VOCAB_SIZE], greedy(2))


def test_the_longest_prompt_is_read(opened):
    result = opened.generate([[5] * 511], greedy(4))[0]
    assert (len(result.tokens), result.finish_reason) == (1, "length")


VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "temperature-negative": ({"temperature": -1}, "temperature must be non-negative"),
    "temperature-high": ({"temperature": 3}, r"temperature must be in \[0, 2\]"),
    "temperature-nan": ({"temperature": math.nan}, "temperature must be a finite number"),
    "temperature-inf": ({"temperature": math.inf}, "temperature must be a finite number"),
    "temperature-text": ({"temperature": "hot"}, "."),
    "top-p-zero": ({"top_p": 0.0}, "top_p must be in"),
    "top-p-high": ({"top_p": 1.5}, "top_p must be in"),
    "top-p-nan": ({"top_p": math.nan}, "top_p must be in"),
    "top-k-negative": ({"top_k": -2}, "top_k must be"),
    "top-k-fraction": ({"top_k": 1.5}, "top_k must be an integer"),
    "min-p": ({"min_p": 2.0}, "min_p must be in"),
    "max-tokens-zero": ({"max_tokens": 0}, "max_tokens must be at least 1"),
    "min-above-max-tokens": ({"min_tokens": 9, "max_tokens": 4}, "min_tokens must be less than or equal to"),
    "min-tokens-negative": ({"min_tokens": -1}, "min_tokens must be"),
    "n-zero": ({"n": 0}, "n must be at least 1"),
    "n-greedy": ({"n": 2}, "n must be 1 when using greedy"),
    "n-huge": ({"n": 10**6, "temperature": 1.0}, "n must be at most"),
    "presence": ({"presence_penalty": 3.0}, "presence_penalty must be in"),
    "frequency": ({"frequency_penalty": -3.0}, "frequency_penalty must be in"),
    "repetition-zero": ({"repetition_penalty": 0.0}, "repetition_penalty must be greater than zero"),
    "repetition-nan": ({"repetition_penalty": math.nan}, "repetition_penalty must be a finite number"),
    "logprobs-many": ({"logprobs": 21}, "greater than max allowed: 20"),
    "logprobs-negative": ({"logprobs": -2}, "logprobs must be non-negative or -1"),
    "prompt-logprobs-many": ({"prompt_logprobs": 21}, "greater than max allowed: 20"),
    "logprob-token": ({"logprob_token_ids": [VOCAB_SIZE]}, "out-of-vocab"),
    "stop-token": ({"stop_token_ids": [VOCAB_SIZE]}, "out-of-vocab"),
    "stop-empty": ({"stop": [""]}, "stop cannot contain an empty string"),
    "stop-without-text": ({"stop": ["x"], "detokenize": False}, "detokenize"),
    "bias-token": ({"logit_bias": {VOCAB_SIZE: 1.0}}, "out-of-vocab"),
    "allowed-empty": ({"allowed_token_ids": []}, "empty"),
    "allowed-token": ({"allowed_token_ids": [-1]}, "out-of-vocab"),
    "bad-words-empty": ({"bad_words": [""]}, "bad_words cannot contain an empty string"),
    "thinking-budget": ({"thinking_token_budget": 3}, "--reasoning-config"),
    "trace": ({"trace_decode_token_ids": [4]}, "--enable-trace-replay"),
    "unknown-name": ({"nonsense": 1}, "nonsense"),
}


@pytest.mark.parametrize("name", VALUES)
def test_bad_sampling_value(opened, name):
    values, pattern = VALUES[name]
    refuse(opened, pattern, lambda: opened.add(PROMPT, SamplingParams(**{"temperature": 0, **values})))


REACHES_THE_WORKER: dict[str, dict[str, Any]] = {
    "seed-above-64-bits": {"temperature": 1.0, "seed": 2**64},
    "seed-below-64-bits": {"temperature": 1.0, "seed": -(2**63) - 1},
    "seed-text": {"temperature": 1.0, "seed": "a"},
    "seed-fraction": {"temperature": 1.0, "seed": 1.5},
    "bias-text": {"logit_bias": {5: "x"}},
    "max-tokens-fraction": {"max_tokens": 2.5},
}


@pytest.mark.parametrize("name", REACHES_THE_WORKER)
@pytest.mark.xfail(
    strict=True, reason="fault: neither vLLM nor validate_request looks at it, and the worker raises inside a step"
)
def test_bad_sampling_value_that_reaches_the_worker(shelf, is_async, name):
    params = SamplingParams(**{"temperature": 0, "detokenize": False, **REACHES_THE_WORKER[name]})
    refuse_and_serve(shelf, is_async, ".", PROMPT, params)


@pytest.mark.parametrize("seed", [0, -5, 2**63, 2**64 - 1, -(2**63)])
def test_the_extreme_seeds_are_served(opened, seed):
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=4, ignore_eos=True)
    first, second = opened.generate([PROMPT, PROMPT], params)
    assert first.tokens == second.tokens


STRUCTURES: dict[str, tuple[dict[str, Any], str]] = {
    "json-broken": ({"json": '{"type": '}, "Invalid JSON grammar"),
    "json-type": ({"json": {"type": "objectt"}}, "Invalid type: objectt"),
    "json-reference": ({"json": {"$ref": "#/nope"}}, "does not exist"),
    "json-unsatisfiable": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
    "regex": ({"regex": "["}, "invalid regex"),
    "grammar": ({"grammar": "???"}, "Invalid grammar"),
    "choice-empty": ({"choice": []}, "empty list"),
    "two-at-once": ({"regex": "a", "choice": ["a"]}, "only use one kind"),
    "none-at-all": ({}, "must use one kind"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_bad_structure(opened, name):
    kwargs, pattern = STRUCTURES[name]
    refuse(
        opened,
        pattern,
        lambda: opened.add(PROMPT, SamplingParams(structured_outputs=StructuredOutputsParams(**kwargs))),
    )


def test_a_structure_needs_a_tokenizer(shelf):
    it = shelf("q35_dense", skip_tokenizer_init=True)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]), detokenize=False)
    refuse(it, "tokenizer", lambda: it.add(PROMPT, params))
    assert len(it.generate([PROMPT], greedy(3))[0].tokens) == 3


@pytest.mark.parametrize(
    ("inputs", "pattern"),
    [
        ({"prompt_token_ids": PROMPT, "multi_modal_data": {"image": 1}}, "(?i)multi-?modal"),
        ({"prompt_embeds": torch.zeros(4, 64)}, "prompt.embed"),
        ("", "cannot be empty"),
        ("word " * 4000, "maximum context length is 512"),
        (None, "Prompt should be"),
    ],
    ids=["image", "embeddings", "empty-text", "long-text", "nothing"],
)
def test_bad_kind_of_prompt(opened, inputs, pattern):
    refuse(opened, pattern, lambda: opened.vllm_engine.add_request("bad", inputs, greedy(3)))


def test_requests_for_what_the_engine_was_not_started_for(opened):
    adapter = LoRARequest("adapter", 1, "/nonexistent")
    refuse(opened, "LoRA is not enabled", lambda: opened.add(PROMPT, greedy(3), lora_request=adapter))
    prompt = {"prompt_token_ids": PROMPT}
    refuse(opened, "pooling", lambda: opened.vllm_engine.add_request("bad", prompt, PoolingParams()))


# Starts


@pytest.fixture
def altered(checkpoint, tmp_path) -> Callable[..., Path]:
    """``altered(change)``: a copy of the checkpoint after ``change(directory)``."""

    def make(change: Callable[[Path], Any]) -> Path:
        directory = tmp_path / "checkpoint"
        shutil.copytree(checkpoint("q35_dense"), directory)
        change(directory)
        return directory

    return make


def config(**values: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def truncate(keep: float) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])

    return change


def leave_out(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        weights = load_file(path)
        assert weights.pop(name) is not None
        save_file(weights, path, metadata={"format": "pt"})

    return change


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no-config": (lambda d: (d / "config.json").unlink(), "Invalid repository ID or local directory"),
    "broken-config": (lambda d: (d / "config.json").write_text("{"), "not a valid JSON file"),
    "unsupported-architecture": (
        config(architectures=["Qwen2ForCausalLM"]),
        "vllm_gaudi refuses.*Qwen2ForCausalLM is not supported; pass --model",
    ),
    "unknown-architecture": (config(architectures=["NoSuchModel"]), "NoSuchModel"),
    "unknown-model-type": (config(model_type="no_such_type"), "no_such_type"),
    "half-the-weights": (truncate(0.5), "(?i)deserializing header"),
    "a-few-bytes-of-weights": (truncate(0.0001), "(?i)deserializing header"),
    "empty-weights": (truncate(0), "(?i)deserializing header"),
    "garbage": (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 5000), "(?i)deserializing header"),
    "no-weights": (lambda d: (d / "model.safetensors").unlink(), "Cannot find any model weights"),
    "a-missing-tensor": (leave_out("model.layers.2.linear_attn.A_log"), "layers.2.linear_attn.A_log"),
    "a-missing-norm": (leave_out("model.norm.weight"), "model.norm.weight"),
    "wrong-heads": (config(linear_num_value_heads=3), "3 value heads cannot share 2 key heads"),
}


def start(path: str | Path, **flags: Any) -> None:
    with engine(path, **flags):
        pass


@pytest.mark.parametrize("name", CHANGES)
def test_bad_checkpoint(altered, shelf, name):
    shelf.clear()
    change, pattern = CHANGES[name]
    with pytest.raises(Exception, match=pattern):
        start(altered(change))


@pytest.mark.parametrize("path", ["/nonexistent/model", "no-such-org/no-such-model"])
def test_missing_model_path(shelf, path):
    shelf.clear()
    with pytest.raises((OSError, ValueError), match=f"{path}|cached snapshot"):
        start(path)


FREE: dict[str, Any] = {"num_gpu_blocks_override": None}
STARTS: dict[str, tuple[dict[str, Any], str]] = {
    "no-memory": (
        {**FREE, "kv_cache_memory_bytes": 1000},
        "no memory is left for the block pool: --kv-cache-memory-bytes 1000 .* raise --gpu-memory-utilization",
    ),
    "little-memory": (
        {**FREE, "gpu_memory_utilization": 1e-5},
        "no memory is left for the block pool: --gpu-memory-utilization 1e-05 .*VLLM_GAUDI_HOST_MEMORY_GIB",
    ),
    "no-room-for-one-request": ({"num_gpu_blocks_override": 35}, "To serve at least one request .*max seq len"),
    "no-blocks": ({"num_gpu_blocks_override": 0}, "No available memory for the cache blocks"),
    "utilization": ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    "too-long-a-context": ({"max_model_len": 10**5}, "max_model_len"),
    "more-sequences-than-tokens": ({"max_num_seqs": 300, "max_num_batched_tokens": 200}, "max_num_seqs"),
    "heads-over-three-ranks": ({"tensor_parallel_size": 3}, "divisible by tensor parallel size"),
    "bucket-text": ({"additional_config": {"decode_batch_buckets": "x"}}, "decode_batch_buckets is 'x'"),
    "bucket-zero": ({"additional_config": {"decode_batch_buckets": [0]}}, "decode_batch_buckets has 0"),
    "bucket-fraction": ({"additional_config": {"decode_block_buckets": [1.5]}}, "decode_block_buckets has 1.5"),
    "bucket-off-the-grid": (
        {"additional_config": {"prefill_query_buckets": [7]}},
        "prefill_query_buckets has 7; every step must be a positive multiple of 64",
    ),
    "bucket-number": ({"additional_config": {"decode_batch_buckets": 4}}, "decode_batch_buckets is 4"),
}


@pytest.mark.parametrize("name", STARTS)
def test_bad_start(checkpoint, shelf, name):
    shelf.clear()
    flags, pattern = STARTS[name]
    with pytest.raises((RuntimeError, ValueError), match=pattern):
        start(checkpoint("q35_dense"), **flags)


ENVIRONMENT: dict[str, tuple[str, str, str]] = {
    "memory-text": ("VLLM_GAUDI_HOST_MEMORY_GIB", "abc", "VLLM_GAUDI_HOST_MEMORY_GIB='abc' is not a positive number"),
    "memory-negative": ("VLLM_GAUDI_HOST_MEMORY_GIB", "-1", "VLLM_GAUDI_HOST_MEMORY_GIB='-1' is not a positive number"),
    "memory-nan": ("VLLM_GAUDI_HOST_MEMORY_GIB", "nan", "VLLM_GAUDI_HOST_MEMORY_GIB='nan' is not"),
    "memory-inf": ("VLLM_GAUDI_HOST_MEMORY_GIB", "inf", "VLLM_GAUDI_HOST_MEMORY_GIB='inf' is not"),
    "warm-up": ("VLLM_SKIP_WARMUP", "maybe", "VLLM_SKIP_WARMUP='maybe' is not a switch; use one of 1, true, 0, false"),
    "compact": ("VLLM_COMPACT_GDN", "2", "VLLM_COMPACT_GDN='2' is not a switch"),
    "poison": ("VLLM_GAUDI_POISON", "x", "VLLM_GAUDI_POISON='x' is not a switch"),
    "lazy-mode": ("PT_HPU_LAZY_MODE", "x", "PT_HPU_LAZY_MODE='x' is not a switch"),
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_bad_variable(checkpoint, shelf, monkeypatch, name):
    shelf.clear()
    variable, value, pattern = ENVIRONMENT[name]
    monkeypatch.setenv(variable, value)
    with pytest.raises((RuntimeError, ValueError), match=pattern):
        start(checkpoint("q35_dense"), **FREE)


def test_after_all_that_an_engine_starts_and_serves(shelf):
    assert len(shelf("q35_dense", skip_tokenizer_init=False).generate([PROMPT], greedy(6))[0].tokens) == 6
