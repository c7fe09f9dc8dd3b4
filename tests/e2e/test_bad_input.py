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

import numpy as np
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
    "negative-token": ([5, -1], "-1"),
    "huge-token": ([5, 10**9], "1000000000"),
    "first-token-beyond": ([5, VOCAB_SIZE], f"token id {VOCAB_SIZE} is not one .* 0 to {VOCAB_SIZE - 1}"),
    "token-beyond-64-bits": ([5, 10**30], "0 to 511"),
    "fraction": ([5, 1.5], "token id 1.5"),
    "boolean": ([5, True], "token id True"),
    "text-in-tokens": ([5, "a"], "."),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_bad_prompt(opened, name):
    tokens, pattern = PROMPTS[name]
    refuse(opened, pattern, lambda: opened.add(tokens, greedy(4)))


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
    # What vLLM lets pass, and a step would raise over.
    "seed-above-64-bits": ({"temperature": 1.0, "seed": 2**64}, f"seed must be from .* to {2**64 - 1}"),
    "seed-below-64-bits": ({"temperature": 1.0, "seed": -(2**63) - 1}, f"seed must be from {-(2**63)}"),
    "seed-of-the-last": ({"temperature": 1.0, "seed": 2**64 - 2, "n": 3}, f"to {2**64 - 3}, got"),
    "seed-text": ({"temperature": 1.0, "seed": "a"}, r"`\$.seed`"),
    "seed-fraction": ({"temperature": 1.0, "seed": 1.5}, r"`\$.seed`"),
    "seed-numpy": ({"temperature": 1.0, "seed": np.int64(3)}, "pass 3"),
    "bias-text": ({"logit_bias": {5: "x"}}, "logit_bias"),
    "bias-nan": ({"logit_bias": {5: math.nan}}, "logit_bias must be a number, got nan for token id 5"),
    "max-tokens-fraction": ({"max_tokens": 2.5}, r"`\$.max_tokens`"),
    "max-tokens-beyond-64-bits": ({"max_tokens": 10**30}, "ints"),
    "min-tokens-fraction": ({"min_tokens": 0.5}, r"`\$.min_tokens`"),
    "flag-text": ({"ignore_eos": "yes"}, r"`\$.ignore_eos`"),
    "stop-tokens-text": ({"stop_token_ids": ["a"]}, "."),
    "bad-words-number": ({"bad_words": [5]}, "."),
}


@pytest.mark.parametrize("name", VALUES)
def test_bad_sampling_value(opened, name):
    values, pattern = VALUES[name]
    refuse(opened, pattern, lambda: opened.add(PROMPT, SamplingParams(**{"temperature": 0, **values})))


@pytest.mark.parametrize("seed", [0, -5, 2**63, 2**64 - 1, -(2**63)])
def test_the_extreme_seeds_are_served(opened, seed):
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=4, ignore_eos=True)
    first, second = opened.generate([PROMPT, PROMPT], params)
    assert first.tokens == second.tokens


# What gets past the front end


@pytest.mark.parametrize(
    ("prompt", "values"),
    [([5, VOCAB_SIZE], {}), ([5, -1], {}), (PROMPT, {"seed": 2**64}), (PROMPT, {"max_tokens": 2.5})],
    ids=["token", "negative-token", "seed", "max-tokens"],
)
def test_a_ready_made_request_that_no_step_could_serve_ends_alone(opened, prompt, values):
    """``AsyncLLM.generate`` takes an ``EngineCoreRequest`` as it is, and nobody has looked at it."""
    engine = opened.vllm_engine
    request = engine.input_processor.process_inputs("bad", {"prompt_token_ids": PROMPT}, greedy(4), ("generate",))
    request.external_req_id = "bad"
    request.prompt_token_ids = prompt
    for name, value in values.items():
        setattr(request.sampling_params, name, value)
    engine.output_processor.add_request(request, None, None, 0)
    engine.engine_core.add_request(request)
    for _ in range(9):
        for output in engine.step():
            if output.request_id == "bad":
                assert output.outputs[0].finish_reason == "error" and not output.outputs[0].token_ids
                return
    raise AssertionError("nobody hears of the request")


@pytest.mark.parametrize("method", ["_state_of", "_rewind_generator"])
@pytest.mark.parametrize("step", [0, 3])
def test_a_step_that_raises_for_one_request_serves_the_others(opened, monkeypatch, method, step):
    """The fault: whatever the worker prepares for a request's sampling raises, at its first token or at a later one."""
    it, sampling = opened, opened.runner.sampling
    params = [greedy(9), SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True), greedy(9)]
    alone = [it.generate([PROMPT[n:]], p)[0] for n, p in enumerate(params)]
    req_ids = [it.add(PROMPT[n:], p) for n, p in enumerate(params)]
    victim = req_ids[1]
    for _ in range(step):
        it.step()
    if step:  # its row is made anew, as after a preemption
        assert it.vllm_engine.reset_prefix_cache(reset_running_requests=True)
    original = getattr(sampling, method)

    def raises_for_one(request):
        if request.req_id.startswith(victim):
            raise IndexError("index out of range in self")
        return original(request)

    monkeypatch.setattr(sampling, method, raises_for_one)
    it.run(req_ids)
    results = [it.take(req_id) for req_id in req_ids]
    is_reached = method == "_state_of" or step > 0  # a new request's generator is nowhere to rewind to
    assert results[1].finish_reason == ("error" if is_reached else "length")
    for n in (0, 2):
        assert results[n].tokens == alone[n].tokens
        if step == 0:  # a reset has the others compute some tokens in another form
            assert torch.equal(results[n].logits, alone[n].logits)


def test_parameters_that_the_sampling_batch_cannot_hold_end_their_request_alone(opened, monkeypatch):
    """The fault: vLLM's batch raises half-way through a row, and its processors have heard of the parameters."""
    it, batch = opened, opened.runner.sampling._batch
    alone = [it.generate([PROMPT[n:]], greedy(9))[0] for n in range(3)]
    req_ids = [it.add(PROMPT[n:], greedy(9, logit_bias={7: 1.0, 9: 2.0} if n == 1 else None)) for n in range(3)]
    add_request = batch.add_request

    def raises_half_way(request):
        row = add_request(request)
        if request.req_id.startswith(req_ids[1]):
            raise RuntimeError("no room for that")
        return row

    monkeypatch.setattr(batch, "add_request", raises_half_way)
    it.run(req_ids)
    results = [it.take(req_id) for req_id in req_ids]
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    for n in (0, 2):
        assert results[n].tokens == alone[n].tokens and torch.equal(results[n].logits, alone[n].logits)


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
