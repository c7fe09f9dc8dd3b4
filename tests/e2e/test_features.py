# SPDX-License-Identifier: Apache-2.0
"""What vLLM offers around sampling: structured output, priorities, aborts, preemption, resets, Python front ends.

Whatever happens to one request, the others say what they say alone, and everything is given back afterwards:
``assert_all_returned`` looks at slots and blocks once the worker has heard of the last request.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import regex
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_gaudi.testing.checkpoints import CHAT_TEMPLATE, TOKEN_ID, VOCAB_SIZE
from vllm_gaudi.testing.engine import DEFAULTS, Engine, engine, greedy

EOS = TOKEN_ID["<|im_end|>"]
FLAGS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 128,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},  # or it is all line ends
}


UNCACHED: dict[str, Any] = {**FLAGS, "enable_prefix_caching": False}  # where steps or blocks are counted


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def is_async(request):
    return request.param


@pytest.fixture(scope="module")
def flags(is_async):
    """Async scheduling with prefix caching, which is what users run; sync without."""
    return {**FLAGS, "async_scheduling": is_async, "enable_prefix_caching": is_async}


@pytest.fixture
def opened(shelf, is_async, flags):
    it = shelf("q35_dense", **flags)
    assert it.runner.step.is_async is is_async
    return it


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Token ids that no special token is among; every salt another prompt."""
    return [10 + (i * i * 7 + i * 13 + salt * 101) % 480 for i in range(length)]


def assert_all_returned(it: Engine) -> None:
    """Once nothing is left to do, and the worker has heard so, all slots and all blocks but the null block are free."""
    it.drain()
    while it.scheduler.has_requests():
        it.step()
    pool = it.scheduler.kv_cache_manager.block_pool
    assert it.scheduler.requests == {}
    assert (it.runner.step.state_slots.num_taken, len(it.runner.step.requests)) == (0, 0)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


# Structured output


def pieces(it: Engine) -> list[str | None]:
    """Text of every token id; None for special tokens and for parts of a character."""
    tokenizer = it.vllm_engine.renderer.get_tokenizer()
    texts = [tokenizer.decode([i]) for i in range(VOCAB_SIZE)]
    return [None if i in TOKEN_ID.values() or "\ufffd" in text else text for i, text in enumerate(texts)]


def constrained(it: Engine, logits: torch.Tensor, pattern: str) -> list[int]:
    """Greedy tokens when the text must stay the beginning of a match of ``pattern``; our own, token by token."""
    texts = pieces(it)
    said, tokens = "", []
    for row in logits:
        legal = [i for i, t in enumerate(texts) if t and regex.fullmatch(pattern, said + t, partial=True)]
        if regex.fullmatch(pattern, said):
            legal.append(EOS)
        tokens.append(max(legal, key=lambda i: float(row[i])))
        said += texts[tokens[-1]] or ""
    return tokens


CHOICES = ["yes", "no", "not at all", "maybe so"]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["colour", "count", "flags"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= number (" " operator " " number){2}
operator ::= "plus" | "minus"
number ::= [1-9] [0-9]
"""


def is_the_object(text: str) -> bool:
    found = json.loads(text)
    return (
        set(found) == set(SCHEMA["properties"])
        and found["colour"] in ("red", "green")
        and 0 <= found["count"] <= 99
        and 2 <= len(found["flags"]) <= 3
        and all(isinstance(flag, bool) for flag in found["flags"])
    )


# name -> constraint, and whether a text satisfies it
STRUCTURES: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "regex": ({"regex": r"[a-f]{3}-[0-9]{2,4}"}, lambda t: bool(regex.fullmatch(r"[a-f]{3}-[0-9]{2,4}", t))),
    "choice": ({"choice": CHOICES}, lambda t: t in CHOICES),
    "json": ({"json": SCHEMA}, is_the_object),
    "json-text": ({"json": json.dumps(SCHEMA)}, is_the_object),
    "grammar": (
        {"grammar": GRAMMAR},
        lambda t: bool(regex.fullmatch(r"[1-9][0-9]( (plus|minus) [1-9][0-9]){2}", t)),
    ),
}


def structured(name: str, **kwargs: Any) -> SamplingParams:
    values = {"temperature": 0, "max_tokens": 80, **kwargs}
    return SamplingParams(**values, structured_outputs=StructuredOutputsParams(**STRUCTURES[name][0]))


def text_of(it: Engine, tokens: list[int]) -> str:
    return it.vllm_engine.renderer.get_tokenizer().decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structured_output_is_what_was_asked_for(opened, name):
    for kwargs in ({}, {"temperature": 1.2, "seed": 4}):
        result = opened.generate([prompt_of(30)], structured(name, **kwargs))[0]
        assert STRUCTURES[name][1](text_of(opened, result.tokens))
        assert (result.tokens[-1], result.finish_reason) == (EOS, "stop")


@pytest.mark.parametrize(
    ("name", "pattern"), [("regex", r"[a-f]{3}-[0-9]{2,4}"), ("choice", "|".join(CHOICES))], ids=["regex", "choice"]
)
def test_structured_output_takes_the_likeliest_legal_token(opened, name, pattern):
    result = opened.generate([prompt_of(50, salt=2)], structured(name))[0]
    assert result.tokens == constrained(opened, result.logits, pattern)


def test_structured_output_beside_free_requests(opened):
    """More requests than rows, coming and going: a bitmask in the wrong row would bind the free or free the bound."""
    names = list(STRUCTURES)
    free = [opened.generate([prompt_of(40, salt=s)], greedy(25))[0] for s in range(5)]
    asked: list[tuple[str, str | int]] = []
    for number in range(15):
        if number % 3 == 0:
            asked.append((opened.add(prompt_of(40, salt=number // 3), greedy(25)), number // 3))
        else:
            name = names[number % len(names)]
            kwargs = {"temperature": 1.0, "seed": number} if number % 2 else {}
            asked.append((opened.add(prompt_of(150 - 9 * number, salt=number), structured(name, **kwargs)), name))
        opened.step()
    opened.run()
    for req_id, what in asked:
        result = opened.take(req_id)
        if isinstance(what, int):
            assert result.tokens == free[what].tokens
        else:
            assert STRUCTURES[what][1](text_of(opened, result.tokens)), what
    assert_all_returned(opened)


def test_structured_output_survives_preemption(shelf, is_async, preemptions_of):
    flags = {**UNCACHED, "max_model_len": 176, "num_gpu_blocks_override": 15, "async_scheduling": is_async}
    names = ["json", "grammar", "json-text"]
    it = shelf("q35_dense", **flags)
    prompts = [prompt_of(100, salt=s) for s in range(4)]
    alone = [it.generate([p], structured(n))[0].tokens for p, n in zip(prompts, names, strict=False)]
    preempted = preemptions_of(it)
    first = it.add(prompts[3], greedy(40))
    req_ids = [it.add(p, structured(n)) for p, n in zip(prompts, names, strict=False)]
    it.run()
    assert preempted.keys() & set(req_ids)
    assert [it.take(r).tokens for r in req_ids] == alone
    assert len(it.take(first).tokens) == 40
    assert_all_returned(it)


# Schedules


def mixed_workload(it: Engine) -> list[list[int]]:
    """Tokens of requests of every kind that arrive while others run."""
    params = [
        greedy(30),
        SamplingParams(temperature=0.9, seed=5, top_p=0.8, max_tokens=25, ignore_eos=True),
        greedy(12, frequency_penalty=1.1),
        structured("json"),
        SamplingParams(temperature=1.1, seed=6, min_p=0.05, repetition_penalty=1.2, max_tokens=40, ignore_eos=True),
        greedy(20, logprobs=3, min_tokens=4),
    ]
    req_ids = []
    for number in range(18):
        req_ids.append(it.add(prompt_of(1 + 31 * number % 290, salt=number), params[number % len(params)]))
        it.step()
    it.run()
    return [it.take(req_id).tokens for req_id in req_ids]


def test_async_and_sync_scheduling_say_the_same(shelf):
    said = []
    for is_async in (True, False):
        it = shelf("q35_dense", **UNCACHED, async_scheduling=is_async)
        said.append(mixed_workload(it))
        assert_all_returned(it)
    assert said[0] == said[1]


def test_priority_goes_first(shelf, is_async):
    flags = {**UNCACHED, "max_num_seqs": 2, "scheduling_policy": "priority", "async_scheduling": is_async}
    it = shelf("q35_dense", **flags)
    prompts = [prompt_of(30, salt=s) for s in range(6)]
    alone = [it.generate([p], greedy(10))[0].tokens for p in prompts]
    order: list[str] = []
    priority = [5, 5, 5, 1, 9, 0]
    req_ids = [it.add(p, greedy(10), priority=n) for p, n in zip(prompts, priority, strict=True)]
    while it.scheduler.has_requests():
        order += it.step()
    assert [req_ids.index(r) for r in order] == [5, 3, 0, 1, 2, 4]
    assert [it.take(r).tokens for r in req_ids] == alone
    assert_all_returned(it)


def test_priority_decides_who_is_preempted(shelf, is_async, preemptions_of):
    """Of two that run, the less urgent gives its blocks up, although it came first."""
    flags = {**UNCACHED, "scheduling_policy": "priority", "max_model_len": 176, "num_gpu_blocks_override": 15}
    it = shelf("q35_dense", **flags, async_scheduling=is_async)
    prompts = [prompt_of(80, salt=s) for s in range(2)]
    alone = [it.generate([p], greedy(60))[0].tokens for p in prompts]
    preempted = preemptions_of(it)
    patient = it.add(prompts[0], greedy(60), priority=3)
    urgent = it.add(prompts[1], greedy(60), priority=1)
    finished: list[str] = []
    while not finished:
        finished = it.step()
    assert finished == [urgent] and preempted[patient]
    it.run()
    assert [it.take(patient).tokens, it.take(urgent).tokens] == alone
    assert_all_returned(it)


def scheduled_counts(it: Engine) -> list[dict[str, int]]:
    """A list that grows by one entry per step from now on: tokens by request."""
    counts: list[dict[str, int]] = []
    execute = it.runner.execute_model

    def spy(output: Any) -> Any:
        counts.append({r.rsplit("-", 1)[0]: n for r, n in output.num_scheduled_tokens.items()})
        return execute(output)

    it.runner.execute_model = spy
    return counts


def test_a_request_that_skips_a_step_goes_on_as_if_nothing_had_happened(shelf, is_async):
    """The last piece of a long prompt takes the whole budget of 40, so nobody decodes in that step."""
    flags = {**UNCACHED, "max_num_batched_tokens": 40, "async_scheduling": is_async}
    each = [
        greedy(20, frequency_penalty=1.2),
        SamplingParams(temperature=1.0, seed=9, max_tokens=20, ignore_eos=True),
        greedy(20, logprobs=2),
    ]
    it = shelf("q35_dense", **flags)
    prompts = [prompt_of(3 + s, salt=s) for s in range(3)]
    alone = it.generate(prompts, each)
    counts = scheduled_counts(it)
    long = it.add(prompt_of(32 * 4 + 40, salt=7), greedy(5))
    it.step()
    req_ids = [it.add(p, e) for p, e in zip(prompts, each, strict=True)]
    it.run()
    whole = next(i for i, step in enumerate(counts) if step.get(long) == 40)
    assert list(counts[whole]) == [long]
    assert set(req_ids) & set(counts[whole - 1]) and set(req_ids) <= set(counts[whole + 1])
    results = [it.take(r) for r in req_ids]
    assert [r.tokens for r in results] == [r.tokens for r in alone]
    for mine, theirs in zip(results, alone, strict=True):
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=0, atol=1e-4)
    assert_all_returned(it)


# Abort

LONG = 300  # tokens: three steps of the budget


def abort_waiting(it: Engine) -> str:
    req_id = it.add(prompt_of(LONG, salt=30), greedy(20))
    it.abort(req_id)
    return req_id


def abort_in_the_queue(it: Engine) -> str:
    queue = [it.add(prompt_of(20, salt=31 + n), greedy(4)) for n in range(8)]
    req_id = it.add(prompt_of(20, salt=30), greedy(20))
    it.step()
    assert len(it.scheduler.waiting) >= 1
    it.abort(req_id)
    it.run(queue)
    return req_id


def abort_mid_prefill(it: Engine) -> str:
    req_id = it.add(prompt_of(LONG, salt=30), greedy(20))
    it.step()
    it.step()
    assert not it._results[req_id].tokens
    it.abort(req_id)
    return req_id


def abort_just_scheduled(it: Engine) -> str:
    req_id = it.add(prompt_of(20, salt=30), greedy(20))
    it.step()
    it.abort(req_id)
    return req_id


def abort_decoding(it: Engine) -> str:
    req_id = it.add(prompt_of(20, salt=30), greedy(20))
    for _ in range(7):
        it.step()
    assert 4 <= len(it._results[req_id].tokens) <= 7
    it.abort(req_id)
    return req_id


def abort_before_its_last_token(it: Engine) -> str:
    """With async scheduling its last token is computed and on its way; with sync it is never computed."""
    req_id = it.add(prompt_of(20, salt=30), greedy(6))
    while len(it._results[req_id].tokens) < 5:
        it.step()
    it.abort(req_id)
    return req_id


def abort_in_the_step_in_which_it_finishes(it: Engine) -> str:
    """The abort waits in the core's queue while the last step runs, and is handled before that step's tokens."""
    req_id = it.add(prompt_of(20, salt=30), greedy(6))
    while len(it._results[req_id].tokens) < 5:
        it.step()
    internal = next(i for i in it.scheduler.requests if i.rsplit("-", 1)[0] == req_id)
    it.core.aborts_queue.put_nowait([internal])
    it.step()
    it.vllm_engine.output_processor.abort_requests([req_id], internal=False)
    return req_id


def abort_preempted(it: Engine) -> str:
    req_id = it.add(prompt_of(20, salt=30), greedy(20))
    for _ in range(4):
        it.step()
    assert it.vllm_engine.reset_prefix_cache(reset_running_requests=True)
    it.abort(req_id)
    return req_id


def abort_twice_and_someone_unknown(it: Engine) -> str:
    req_id = abort_decoding(it)
    it.vllm_engine.abort_request([req_id, "never-heard-of"])
    return req_id


PHASES = [
    abort_waiting,
    abort_in_the_queue,
    abort_mid_prefill,
    abort_just_scheduled,
    abort_decoding,
    abort_before_its_last_token,
    abort_in_the_step_in_which_it_finishes,
    abort_preempted,
    abort_twice_and_someone_unknown,
]


@pytest.fixture(scope="module")
def bystander(shelf, flags):
    return shelf("q35_dense", **flags).generate([prompt_of(60, salt=20)], greedy(24))[0].tokens


@pytest.mark.parametrize("phase", PHASES, ids=lambda f: f.__name__)
def test_abort(opened, bystander, phase):
    """The aborted request takes nothing along: who runs beside it, and who takes its slot, say what they say alone."""
    beside = opened.add(prompt_of(60, salt=20), greedy(24))
    opened.step()
    aborted = phase(opened)
    after = opened.add(prompt_of(60, salt=20), greedy(24))
    opened.run([beside, after])
    assert [opened.take(beside).tokens, opened.take(after).tokens] == [bystander, bystander]
    opened.take(aborted)
    assert_all_returned(opened)


def test_abort_of_one_structured_and_one_many_output_request(opened, bystander):
    bound = opened.add(prompt_of(30), structured("json", max_tokens=80))
    many = opened.add(prompt_of(30, salt=1), SamplingParams(n=4, temperature=1.0, max_tokens=50, ignore_eos=True))
    for _ in range(5):
        opened.step()
    opened.abort(bound)
    opened.abort(many)
    assert opened.generate([prompt_of(60, salt=20)], greedy(24))[0].tokens == bystander
    for req_id in (bound, many):
        opened.take(req_id)
    assert_all_returned(opened)


# Preemption, and resets of the prefix cache


@pytest.mark.parametrize(
    ("name", "is_cached", "blocks"),
    [("q35_dense", False, 15), ("q35_dense", True, 15), ("qwen3", False, 18)],
    ids=["hybrid", "hybrid-cached", "plain"],
)
def test_preempted_requests_say_what_they_say_alone(shelf, is_async, name, is_cached, blocks, preemptions_of):
    flags = {**FLAGS, "max_model_len": 176, "num_gpu_blocks_override": blocks, "enable_prefix_caching": is_cached}
    it = shelf(name, **flags, async_scheduling=is_async)
    prompts = [prompt_of(70, salt=s) for s in range(5)]
    alone = [it.generate([p], greedy(60))[0] for p in prompts]
    preempted = preemptions_of(it)
    req_ids = [it.add(p, greedy(60)) for p in prompts]
    it.run()
    results = [it.take(r) for r in req_ids]
    assert len(preempted) >= 2
    for result, solo in zip(results, alone, strict=True):
        assert result.tokens == solo.tokens
        torch.testing.assert_close(result.logits, solo.logits, rtol=0, atol=1e-4)
    assert_all_returned(it)


def test_reset_prefix_cache(opened, bystander):
    it = opened
    assert it.vllm_engine.reset_prefix_cache() is True
    req_id = it.add(prompt_of(60, salt=20), greedy(24))
    for _ in range(6):
        it.step()
    assert it.vllm_engine.reset_prefix_cache() is False  # somebody reads these blocks
    it.step()
    assert it.vllm_engine.reset_prefix_cache(reset_running_requests=True) is True
    for _ in range(3):
        it.step()
    assert it.vllm_engine.reset_prefix_cache(reset_running_requests=True) is True
    it.run([req_id])
    assert it.take(req_id).tokens == bystander
    assert_all_returned(it)


def test_a_reset_in_the_middle_of_prompts(opened, bystander):
    it = opened
    prompts = [prompt_of(LONG, salt=40), prompt_of(60, salt=20), prompt_of(200, salt=41)]
    alone = [it.generate([p], greedy(12))[0].tokens for p in prompts]
    assert alone[1] == bystander[:12]
    for steps in range(1, 6):
        req_ids = [it.add(p, greedy(12)) for p in prompts]
        for _ in range(steps):
            it.step()
        it.vllm_engine.reset_prefix_cache(reset_running_requests=True)
        it.run(req_ids)
        assert [it.take(r).tokens for r in req_ids] == alone, steps
    assert_all_returned(it)


def test_prefix_cache_of_a_plain_model_is_used_and_reset(shelf, is_async):
    it = shelf("qwen3", **FLAGS, enable_prefix_caching=True, async_scheduling=is_async)
    prompt = prompt_of(100)
    cold, hit = (it.generate([prompt], greedy(20))[0] for _ in range(2))
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 96)
    assert it.vllm_engine.reset_prefix_cache() is True
    again = it.generate([prompt], greedy(20))[0]
    assert again.cached_tokens == 0
    assert cold.tokens == hit.tokens == again.tokens
    torch.testing.assert_close(hit.logits, cold.logits, rtol=0, atol=1e-4)
    assert_all_returned(it)


# Lives of engines


def test_engines_one_after_another(checkpoint, shelf):
    """Nothing of one engine is left for the next, whatever its model, scheduling, block size; nor after a failure."""
    prompt = prompt_of(70, salt=6)

    shelf.clear()

    def tokens(name: str, **flags: Any) -> list[int]:
        with engine(checkpoint(name), **flags) as it:
            found = it.generate([prompt], greedy(8))[0].tokens
            assert_all_returned(it)
            return found

    first = tokens("q35_dense")
    other = tokens("llama", async_scheduling=False)
    assert other != first
    with pytest.raises(RuntimeError, match="speculative"):
        tokens("q35_dense", speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2})
    with pytest.raises(RuntimeError, match="no memory is left"):
        tokens("q35_dense", num_gpu_blocks_override=None, kv_cache_memory_bytes=1000)
    assert tokens("q35_dense", block_size=64, async_scheduling=False, max_num_seqs=3) == first
    assert tokens("llama") == other


FAILING_STARTS: dict[str, dict[str, Any]] = {
    "in-the-worker": {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1000},
    "in-the-core": {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20, "max_model_len": 8192},
}


@pytest.mark.parametrize("name", FAILING_STARTS)
def test_a_start_that_fails_leaves_nothing_to_the_next(checkpoint, shelf, name):
    """A MoE model needs process groups that a dense one has not."""
    shelf.clear()
    with pytest.raises((RuntimeError, ValueError), match="memory"):
        Engine(checkpoint("qwen3"), **FAILING_STARTS[name])
    assert torch.distributed.is_initialized() is (name == "in-the-core")
    with engine(checkpoint("q35_moe")) as it:
        assert len(it.generate([prompt_of(20)], greedy(3))[0].tokens) == 3
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("length", [256, 1024])
def test_the_default_budget_fits_a_short_context(shelf, length):
    """vLLM's default is 2,048 tokens per step, more than the longest prompt."""
    it = shelf("q35_dense", max_num_batched_tokens=None, max_model_len=length)
    assert it.runner.max_num_tokens > length
    result = it.generate([prompt_of(length - 3), prompt_of(20), prompt_of(length // 2)], greedy(4))[0]
    assert (len(result.tokens), result.finish_reason) == (3, "length")
    assert_all_returned(it)


def test_an_attention_only_model_reads_prompts_whole_where_chunking_is_off(shelf, is_async, schedule_of):
    prompts = [prompt_of(n, salt=n) for n in (300, 250, 40)]
    alone = [shelf("qwen3", async_scheduling=is_async).generate([p], greedy(6))[0].tokens for p in prompts]
    flags = {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "async_scheduling": is_async}
    it = shelf("qwen3", **flags)
    steps = schedule_of(it)
    assert [result.tokens for result in it.generate(prompts, greedy(6))] == alone
    assert [sorted(n for n in step.values() if n > 1) for step in steps][:2] == [[300], [40, 250]]
    assert_all_returned(it)


def test_logits_are_finite_and_lengths_are_as_asked_at_the_end_of_the_context(opened):
    """A request that reaches max_model_len ends there, by length."""
    length = DEFAULTS["max_model_len"] - 5
    result = opened.generate([prompt_of(length, salt=3)], greedy(50))[0]
    assert (len(result.tokens), result.finish_reason) == (5, "length")
    assert math.isfinite(float(result.logits.abs().max()))


# Python front ends


def close(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def text_params(**kwargs: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 10, "ignore_eos": True, **kwargs})


class TestLLM:
    @pytest.fixture(scope="class")
    def llm(self, shelf, checkpoint) -> Iterator[LLM]:
        shelf.clear()
        flags = {**DEFAULTS, "skip_tokenizer_init": False, "max_logprobs": -1}
        it = LLM(str(checkpoint("q35_dense")), **flags)
        yield it
        close(it)

    def test_llm_generate_and_chat(self, llm):
        tokenizer = llm.get_tokenizer()
        text = "Question: how many apples are in the basket?"
        ids = tokenizer.encode(text)
        from_text, from_ids = llm.generate([text, {"prompt_token_ids": ids}], text_params(), use_tqdm=False)
        assert from_text.prompt_token_ids == ids
        assert from_text.outputs[0].token_ids == from_ids.outputs[0].token_ids
        assert from_text.outputs[0].text == tokenizer.decode(from_text.outputs[0].token_ids, skip_special_tokens=True)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        chat = llm.chat(messages, text_params(), use_tqdm=False)[0]
        assert "im_start" in CHAT_TEMPLATE
        assert chat.prompt_token_ids[0] == TOKEN_ID["<|im_start|>"]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        again = llm.generate([{"prompt_token_ids": tokenizer.encode(rendered)}], text_params(), use_tqdm=False)[0]
        assert chat.outputs[0].token_ids == again.outputs[0].token_ids

    def test_llm_many_prompts_keep_their_order(self, llm):
        prompts = [{"prompt_token_ids": prompt_of(5 + 23 * n % 200, salt=n)} for n in range(20)]
        params = [text_params(max_tokens=3 + n % 9) for n in range(20)]
        together = llm.generate(prompts, params, use_tqdm=False)
        assert [o.prompt_token_ids for o in together] == [p["prompt_token_ids"] for p in prompts]
        assert [len(o.outputs[0].token_ids) for o in together] == [3 + n % 9 for n in range(20)]
        alone = [llm.generate([p], q, use_tqdm=False)[0] for p, q in zip(prompts[::5], params[::5], strict=True)]
        assert [o.outputs[0].token_ids for o in together[::5]] == [o.outputs[0].token_ids for o in alone]

    def test_llm_collective_rpc(self, llm):
        assert llm.collective_rpc("get_supported_tasks") == [("generate",)]
        assert llm.collective_rpc(lambda worker, factor: worker.rank + factor, args=(3,)) == [3]
        names = llm.apply_model(lambda model: type(model).__name__)
        assert names == ["Qwen3_5ForCausalLM"]
        with pytest.raises(Exception, match="no_such_method"):
            llm.collective_rpc("no_such_method")
        assert llm.generate([{"prompt_token_ids": prompt_of(9)}], text_params(), use_tqdm=False)[0].finished

    def test_llm_beam_search(self, llm):
        """Width 3 over 3 tokens against all continuations that our own search keeps, scored by full logprobs."""
        prompt = prompt_of(30, salt=3)

        def scores(tokens: list[int]) -> dict[int, float]:
            ids = {"prompt_token_ids": prompt + tokens}
            output = llm.generate([ids], text_params(max_tokens=1, logprobs=-1), use_tqdm=False)[0]
            return {t: p.logprob for t, p in output.outputs[0].logprobs[0].items()}

        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(3):
            longer = [(total + s, [*beam, t]) for total, beam in beams for t, s in scores(beam).items()]
            beams = sorted(longer, reverse=True)[:3]
        params = BeamSearchParams(beam_width=3, max_tokens=3, ignore_eos=True)
        found = llm.beam_search([{"prompt_token_ids": prompt}], params)[0].sequences
        assert [s.tokens[len(prompt) :] for s in found] == [beam for _, beam in beams]
        assert [s.cum_logprob for s in found] == pytest.approx([total for total, _ in beams], abs=1e-4)

    def test_llm_refuses_pooling_and_goes_on(self, llm):
        before = llm.generate([{"prompt_token_ids": prompt_of(9)}], text_params(), use_tqdm=False)[0]
        with pytest.raises(Exception, match="(?i)embed|pooling"):
            llm.embed([{"prompt_token_ids": prompt_of(9)}], use_tqdm=False)
        after = llm.generate([{"prompt_token_ids": prompt_of(9)}], text_params(), use_tqdm=False)[0]
        assert after.outputs[0].token_ids == before.outputs[0].token_ids

    def test_llm_cannot_sleep_and_goes_on_when_woken_up(self, llm):
        """vLLM pauses its scheduler before it asks the worker, so somebody has to wake it up."""
        with pytest.raises(Exception, match="sleep"):
            llm.sleep(level=1)
        llm.wake_up()
        assert llm.generate([{"prompt_token_ids": prompt_of(9)}], text_params(), use_tqdm=False)[0].finished

    @pytest.mark.parametrize("method", ["sleep", "reload_weights", "save_sharded_state"])
    def test_llm_says_what_the_worker_does_not_support(self, llm, method):
        with pytest.raises(Exception, match="not supported"):
            llm.collective_rpc(method)


async def stream(
    it: AsyncLLM, req_id: str, prompt: list[int], params: SamplingParams, stop_after: int | None = None
) -> list[int]:
    """Tokens of one stream, in pieces as they come; the client goes away after ``stop_after`` of them."""
    params.output_kind = RequestOutputKind.DELTA
    tokens: list[int] = []
    async for output in it.generate({"prompt_token_ids": prompt}, params, req_id):
        tokens += output.outputs[0].token_ids
        if stop_after is not None and len(tokens) >= stop_after:
            break
    return tokens


async def drive_async_llm(it: AsyncLLM) -> None:
    prompts = [prompt_of(20 + 40 * n, salt=n) for n in range(6)]
    alone = [await stream(it, f"alone-{n}", p, greedy(20)) for n, p in enumerate(prompts)]
    assert [len(t) for t in alone] == [20] * 6
    # Concurrently, while some clients leave early and one is aborted by name.
    tasks = [asyncio.create_task(stream(it, f"t-{n}", p, greedy(20))) for n, p in enumerate(prompts)]
    leaver = asyncio.create_task(stream(it, "leaver", prompts[5], greedy(200), stop_after=4))
    cancelled = asyncio.create_task(stream(it, "cancelled", prompts[4], greedy(200)))
    named = asyncio.create_task(stream(it, "named", prompts[3], greedy(200)))
    assert (await leaver)[:4] == alone[5][:4]
    cancelled.cancel()
    await it.abort("named")
    assert await asyncio.gather(*tasks) == alone
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert len(await named) < 200
    # A pause that keeps its requests.
    kept = asyncio.create_task(stream(it, "kept", prompts[2], greedy(20)))
    await asyncio.sleep(0.05)
    await it.pause_generation(mode="keep")
    assert await it.is_paused()
    await it.resume_generation()
    assert await kept == alone[2]
    assert await it.reset_prefix_cache() is True
    await it.check_health()
    assert await it.collective_rpc("get_supported_tasks") == [["generate"]]
    assert await stream(it, "last", prompts[1], greedy(20)) == alone[1]
    assert it.get_num_unfinished_requests() == 0


def test_async_llm_with_concurrent_streams(checkpoint):
    async def main() -> None:
        it = AsyncLLM.from_engine_args(AsyncEngineArgs(str(checkpoint("q35_dense")), **DEFAULTS))
        try:
            await drive_async_llm(it)
        finally:
            it.shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))
