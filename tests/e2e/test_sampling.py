# SPDX-License-Identifier: Apache-2.0
"""Every sampling parameter of vLLM against a computation of our own on the raw logits, with async and sync scheduling.

``next_token`` is that computation: it follows vLLM's documented order (allowed tokens, bad words, minimum of tokens,
bias, penalties, temperature, min-p, top-k, top-p, exponential noise of the request's own generator) on the row of
logits that the engine sampled from. A row of another request, a stale output, or a generator that moved when it should
not have, changes a token.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from vllm import SamplingParams
from vllm.config import ReasoningConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor

from vllm_gaudi.testing.checkpoints import TOKEN_ID, VOCAB_SIZE
from vllm_gaudi.testing.engine import Engine, Result, greedy

EOS = TOKEN_ID["<|im_end|>"]
BUDGET = 128  # tokens per step; longer prompts are read in several steps
# Without prefix caching every run of a prompt takes the same steps.
FLAGS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": BUDGET,
    "max_logprobs": -1,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def is_async(request):
    return request.param


only_async = pytest.mark.parametrize(
    "is_async", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["async", "sync"], indirect=True
)
"""For a row of a table: with sync scheduling all rows come in ``run_staggered``, and one by one in ``make soak``."""


@pytest.fixture
def opened(shelf, is_async):
    it = shelf("q35_dense", **FLAGS, async_scheduling=is_async)
    assert it.runner.step.is_async is is_async
    return it


# Our own computation


@dataclass(frozen=True)
class Rules:
    """Sampling parameters as the tests state them; ``bad`` are the token sequences of the bad words."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    bad: tuple[tuple[int, ...], ...] = ()

    def params(self, max_tokens: int = 24) -> SamplingParams:
        return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **self.kwargs})


def processed(row: torch.Tensor, prompt: list[int], output: list[int], rules: Rules) -> torch.Tensor:
    """What greedy sampling takes the maximum of."""
    wants = rules.kwargs
    logits = row.float().clone()
    if "allowed_token_ids" in wants:
        banned = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        banned[wants["allowed_token_ids"]] = False
        logits[banned] = -math.inf
    for sequence in rules.bad:
        start = len(output) - (len(sequence) - 1)
        if start >= 0 and tuple(output[start:]) == sequence[:-1]:
            logits[sequence[-1]] = -math.inf
    if len(output) < wants.get("min_tokens", 0):
        logits[[EOS, *wants.get("stop_token_ids", ())]] = -math.inf
    for token, bias in wants.get("logit_bias", {}).items():
        logits[token] += bias
    counts = Counter(output)
    for token in {*prompt, *output}:
        factor = wants.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in counts.items():
        logits[token] -= wants.get("frequency_penalty", 0.0) * count + wants.get("presence_penalty", 0.0)
    return logits


def allowed(scaled: torch.Tensor, rules: Rules, slack: float = 0.0) -> torch.Tensor:
    """[V] bool: the tokens that min-p, top-k and top-p leave of logits after temperature. ``slack`` widens the set."""
    wants = rules.kwargs
    probs = scaled.softmax(-1)
    keep = probs >= (wants.get("min_p", 0.0) - slack) * probs.max()
    order = torch.argsort(scaled.masked_fill(~keep, -math.inf), descending=True)
    top_k = wants.get("top_k", 0)
    if top_k > 0:
        keep[order[top_k:]] = False
    left = scaled.masked_fill(~keep, -math.inf).softmax(-1)[order]
    before = left.cumsum(-1) - left  # probability of everything that is more likely
    keep[order[before >= wants.get("top_p", 1.0) + slack]] = False
    return keep


def next_token(
    row: torch.Tensor, prompt: list[int], output: list[int], rules: Rules, generator: torch.Generator | None
) -> int:
    logits = processed(row, prompt, output, rules)
    temperature = rules.kwargs.get("temperature", 0)
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits / temperature
    probs = scaled.masked_fill(~allowed(scaled, rules), -math.inf).softmax(-1)
    noise = torch.empty(VOCAB_SIZE).exponential_(generator=generator)
    return int((probs / noise).argmax())


def expected(result: Result, prompt: list[int], rules: Rules) -> list[int]:
    """The tokens that the result's own raw logits call for."""
    assert result.logits is not None
    assert result.logits.isfinite().all()
    seed = rules.kwargs.get("seed")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return [
        next_token(row, prompt, result.tokens[:i], rules, generator) for i, row in enumerate(result.logits.unbind())
    ]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Token ids that no special token is among; every salt another prompt."""
    return [10 + (i * i * 7 + i * 13 + salt * 101) % 480 for i in range(length)]


PROMPT = prompt_of(40)

# name -> rules; each must change what plain greedy gives, or it would prove nothing.
CASES: dict[str, Rules] = {
    "presence": Rules({"presence_penalty": 1.9}),
    "frequency": Rules({"frequency_penalty": 1.3}),
    "negative-frequency": Rules({"frequency_penalty": -1.5}),
    "repetition": Rules({"repetition_penalty": 1.4}),
    "encouraged-repetition": Rules({"repetition_penalty": 0.6}),
    "all-penalties": Rules({"presence_penalty": 1.1, "frequency_penalty": 0.7, "repetition_penalty": 1.2}),
    "logit-bias": Rules({"logit_bias": {7: 2.5, 100: 2.5, 300: 2.5, 458: -100.0}}),
    "min-tokens": Rules({"min_tokens": 9, "logit_bias": {EOS: 100.0}, "stop_token_ids": [101], "ignore_eos": False}),
    "allowed-tokens": Rules({"allowed_token_ids": list(range(50, 90))}),
    "allowed-and-penalised": Rules({"allowed_token_ids": list(range(50, 60)), "frequency_penalty": 1.7}),
    "top-k": Rules({"temperature": 1.0, "seed": 1, "top_k": 4}),
    "top-p": Rules({"temperature": 1.3, "seed": 2, "top_p": 0.7}),
    "min-p": Rules({"temperature": 1.1, "seed": 3, "min_p": 0.15}),
    "all-filters": Rules({"temperature": 0.9, "seed": 4, "top_k": 20, "top_p": 0.8, "min_p": 0.05}),
    "seeded": Rules({"temperature": 1.0, "seed": 5}),
    "cold": Rules({"temperature": 0.3, "seed": 6}),
    "seeded-and-penalised": Rules({"temperature": 0.8, "seed": 7, "frequency_penalty": 1.2, "repetition_penalty": 1.1}),
    "seeded-bias": Rules({"temperature": 0.8, "seed": 8, "logit_bias": {50: 4.0}, "min_p": 0.1}),
}


def with_bad_words(it: Engine, prompt: list[int]) -> Rules:
    """Bad words made of what plain greedy says: one token, and a pair whose second token alone stays legal."""
    tokenizer = it.vllm_engine.renderer.get_tokenizer()
    plain = it.generate([prompt], greedy(24))[0].tokens

    def as_word(ids: list[int]) -> str | None:
        text = tokenizer.decode(ids)
        is_same = text.isascii() and text == text.lstrip() and tokenizer.encode(text, add_special_tokens=False) == ids
        return text if is_same else None

    single = next(t for t in plain[1:] if as_word([t]))
    pairs = [[a, b] for a, b in zip(plain, plain[1:], strict=False) if single not in (a, b)]
    pair = next(p for p in pairs if as_word(p))
    words = [as_word([single]), as_word(pair)]
    bad = [(single,), tuple(pair)]
    # vLLM also bans a word behind a space, where that has as many tokens and another first one.
    for word, ids in zip(words, list(bad), strict=True):
        spaced = tuple(tokenizer.encode(f" {word}", add_special_tokens=False))
        if len(spaced) == len(ids) and spaced[0] != ids[0]:
            bad.append(spaced)
    return Rules({"bad_words": words}, tuple(bad))


# One request at a time


def test_greedy_takes_the_largest_logit(opened):
    result = opened.generate([PROMPT], Rules().params())[0]
    assert result.tokens == result.logits.argmax(-1).tolist()
    assert len(result.tokens) == 24


@only_async
@pytest.mark.parametrize("name", CASES)
def test_parameter_gives_what_its_own_logits_call_for(opened, name):
    plain, result = opened.generate([PROMPT, PROMPT], [Rules().params(), CASES[name].params()])
    assert result.tokens == expected(result, PROMPT, CASES[name])
    assert result.tokens != plain.tokens


def test_bad_words_are_not_said(opened):
    rules = with_bad_words(opened, PROMPT)
    plain, result = opened.generate([PROMPT, PROMPT], [Rules().params(), rules.params()])
    assert result.tokens == expected(result, PROMPT, rules)
    assert rules.bad[0][0] in plain.tokens
    for sequence in rules.bad:
        said = zip(*(result.tokens[i:] for i in range(len(sequence))), strict=False)
        assert sequence not in set(said)


def test_min_tokens_holds_the_end_back_and_then_lets_it_come(opened):
    rules = CASES["min-tokens"]
    result = opened.generate([PROMPT], rules.params())[0]
    assert EOS not in result.tokens[:9] and 101 not in result.tokens[:9]
    assert result.tokens[9:] == [EOS]
    assert result.finish_reason == "stop"


def test_ignore_eos_and_max_tokens(opened):
    forced = {"logit_bias": {EOS: 100.0}}
    stopped, ignored = opened.generate(
        [PROMPT, PROMPT], [Rules({**forced, "ignore_eos": False}).params(5), Rules(forced).params(5)]
    )
    assert (stopped.tokens, stopped.finish_reason) == ([EOS], "stop")
    assert (ignored.tokens, ignored.finish_reason) == ([EOS] * 5, "length")


def test_a_stop_token_ends_the_request_after_it(opened):
    plain = opened.generate([PROMPT], Rules().params())[0].tokens
    stop = plain[11]
    result = opened.generate([PROMPT], Rules({"stop_token_ids": [stop, 509]}).params())[0]
    assert result.tokens == plain[: plain.index(stop) + 1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("include", [False, True], ids=["cut", "included"])
def test_a_stop_string_cuts_the_text(opened, include):
    whole = run_raw(opened, PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)).outputs[0].text
    stop = whole[len(whole) // 2 :][:5]
    assert len(stop) == 5
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, stop=[stop, "never said"], include_stop_str_in_output=include
    )
    output = run_raw(opened, PROMPT, params).outputs[0]
    assert output.text == whole[: whole.index(stop) + (len(stop) if include else 0)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    opened.generate([PROMPT], greedy(2))
    opened.drain()
    assert opened.scheduler.get_num_unfinished_requests() == 0


def test_repetition_is_detected(opened):
    again = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=4)
    rules = Rules({"logit_bias": {77: 100.0}, "repetition_detection": again})
    result = opened.generate([PROMPT], rules.params())[0]
    assert result.tokens == [77] * 4
    assert result.finish_reason == "repetition"


# Many at once


def run_staggered(it: Engine, rules: dict[str, Rules]) -> list[str]:
    """One request more at every step, of different lengths, more than there are rows; the names of those gone wrong."""
    assert len(rules) > it.runner.max_num_seqs
    running = {}
    for number, (name, rule) in enumerate(rules.items()):
        prompt = PROMPT if name == "bad-words" else prompt_of(20 + 17 * (number % 7), salt=number)
        req_id = it.add(prompt, rule.params(max_tokens=14 + 5 * (number % 4)))
        running[req_id] = (name, prompt, rule)
        it.step()
    it.run(running)
    results = {req_id: it.take(req_id) for req_id in running}
    return [
        name
        for req_id, (name, prompt, rule) in running.items()
        if results[req_id].tokens != expected(results[req_id], prompt, rule)
    ]


def test_every_parameter_at_once_while_requests_come_and_go(opened):
    """Rows move in the batch at nearly every step; each request must keep its own parameters, outputs and generator."""
    cases = {name: rules for name, rules in CASES.items() if "allowed_token_ids" not in rules.kwargs}
    assert run_staggered(opened, {**cases, "bad-words": with_bad_words(opened, PROMPT), "plain": Rules()}) == []


def test_every_parameter_and_allowed_tokens_at_once(opened):
    assert run_staggered(opened, CASES) == []


def test_allowed_tokens_of_one_request_do_not_bind_the_next_in_its_row(opened):
    """The smallest case: row 0 ends, row 1 with allowed tokens moves there, and a free request takes row 1."""
    restricted = CASES["allowed-tokens"]
    first = opened.add(PROMPT, Rules().params(3))
    second = opened.add(PROMPT, restricted.params(30))
    opened.run([first])
    opened.step()
    third = opened.add(PROMPT, Rules().params(8))
    opened.run([second, third])
    assert opened.take(second).tokens == expected(
        opened.generate([PROMPT], restricted.params(30))[0], PROMPT, restricted
    )
    result = opened.take(third)
    assert result.tokens == expected(result, PROMPT, Rules())


# Seeds


def steps_to_first_token(it: Engine, req_id: str) -> int:
    steps = 0
    while not it._results[req_id].tokens:
        it.step()
        steps += 1
    return steps


@pytest.mark.parametrize("length", [40, 300], ids=["one-chunk", "three-chunks"])
def test_a_seed_repeats_alone_and_in_company(opened, length):
    """A chunk that only reads the prompt samples nothing, so it must not move the request's generator either."""
    prompt, rules = prompt_of(length, salt=3), Rules({"temperature": 1.0, "seed": 11})
    alone = opened.generate([prompt], rules.params())[0]
    assert alone.tokens == expected(alone, prompt, rules)
    for seed_of_others in (11, 12, None):
        other = Rules({"temperature": 1.2, "seed": seed_of_others})
        others = [opened.add(prompt_of(60, salt=s), other.params(40)) for s in range(5)]
        for _ in range(4):
            opened.step()
        again = opened.add(prompt, rules.params())
        steps = steps_to_first_token(opened, again)
        opened.run([again, *others])
        assert opened.take(again).tokens == alone.tokens
        assert steps >= math.ceil(length / BUDGET)


def test_different_seeds_and_no_seed_differ(opened):
    rules = [Rules({"temperature": 1.0, "seed": seed}) for seed in (1, 2, None, None)]
    results = opened.generate([PROMPT] * 4, [r.params() for r in rules])
    assert len({tuple(r.tokens) for r in results}) == 4


@pytest.mark.parametrize("is_cached", [False, True], ids=["", "cached"])
def test_parameters_survive_preemption(shelf, is_async, is_cached, preemptions_of):
    """A resumed request reads its prompt and output again; generator, outputs and minimum go on where they were."""
    names = ["logit-bias", "all-penalties", "seeded-and-penalised", "seeded", "top-p", "presence"]
    prompts = [prompt_of(70, salt=s) for s in range(len(names))]
    params = [CASES[name].params(max_tokens=60) for name in names]
    # Two requests fit and one of them not for long.
    small = {"max_model_len": 160, "num_gpu_blocks_override": 15}
    it = shelf("q35_dense", **{**FLAGS, **small, "enable_prefix_caching": is_cached}, async_scheduling=is_async)
    counts = preemptions_of(it)
    req_ids = [it.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    it.run(req_ids)
    results = [it.take(req_id) for req_id in req_ids]
    assert [bool(counts[req_id]) for req_id in req_ids] == [False, True, True, True, True, True]
    for name, prompt, result in zip(names, prompts, results, strict=True):
        assert len(result.tokens) == 60, name
        assert result.tokens == expected(result, prompt, CASES[name]), name


@pytest.mark.parametrize("name", ["frequency", "all-penalties", "seeded", "seeded-and-penalised"])
def test_parameters_survive_a_reset_of_the_running_requests(opened, name):
    """vLLM preempts and resumes all of them in one step and drops the token that was on its way."""
    rules = CASES[name]
    alone = opened.generate([PROMPT], rules.params())[0]
    req_id = opened.add(PROMPT, rules.params())
    for _ in range(9):
        opened.step()
    assert opened.vllm_engine.reset_prefix_cache(reset_running_requests=True)
    opened.run([req_id])
    assert opened.take(req_id).tokens == alone.tokens


# Filters and distributions over many seeds

FILTERS: dict[str, dict[str, Any]] = {
    "top-k-1": {"top_k": 1},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.6},
    "tiny-top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.2},
    "all": {"top_k": 30, "top_p": 0.75, "min_p": 0.05},
}


@only_async
@pytest.mark.parametrize("name", FILTERS)
def test_sampled_tokens_are_always_inside_the_allowed_set(opened, name):
    temperature = 1.5
    rules = Rules({"temperature": temperature, **FILTERS[name]})
    free = opened.generate(
        [PROMPT] * 48, [SamplingParams(temperature=temperature, max_tokens=1, seed=s) for s in range(48)]
    )
    filtered = opened.generate([PROMPT] * 48, [SamplingParams(**rules.kwargs, max_tokens=1, seed=s) for s in range(48)])
    keep = allowed(filtered[0].logits[0] / temperature, rules, slack=1e-5)
    assert all(keep[r.tokens[0]] for r in filtered)
    assert not all(keep[r.tokens[0]] for r in free)  # without the filter the same seeds leave the set
    said = {r.tokens[0] for r in filtered}
    assert said == {int(keep.nonzero())} if int(keep.sum()) == 1 else len(said) >= min(4, int(keep.sum()))


@only_async
def test_unseeded_sampling_follows_the_distribution(opened):
    """Chi-squared over the seven likeliest tokens and the rest, 400 draws: 24.3 is exceeded once in a thousand."""
    num, temperature = 400, 0.9
    params = SamplingParams(temperature=temperature, max_tokens=1)
    results = opened.generate([PROMPT] * num, params)
    probs = (results[0].logits[0] / temperature).softmax(-1)
    top = probs.topk(7)
    shares = [*top.values.tolist(), 1 - float(top.values.sum())]
    seen = Counter(r.tokens[0] for r in results)
    counts = [seen[token] for token in top.indices.tolist()]
    counts.append(num - sum(counts))
    assert min(shares) * num > 5
    chi_squared = sum((c - num * p) ** 2 / (num * p) for c, p in zip(counts, shares, strict=True))
    assert chi_squared < 24.3


# Several outputs of one request


def run_raw(it: Engine, prompt: list[int], params: SamplingParams) -> Any:
    """vLLM's own final output of one request."""
    it.vllm_engine.add_request("raw", {"prompt_token_ids": prompt}, params)
    final = None
    while it.vllm_engine.has_unfinished_requests():
        for output in it.vllm_engine.step():
            if output.request_id == "raw" and output.finished:
                final = output
    return final


def test_n_outputs_are_those_of_consecutive_seeds(opened):
    params = SamplingParams(
        n=5, temperature=1.0, seed=40, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    outputs = run_raw(opened, PROMPT, params).outputs
    alone = opened.generate([PROMPT] * 5, [Rules({"temperature": 1.0, "seed": 40 + i}).params(12) for i in range(5)])
    assert [list(o.token_ids) for o in outputs] == [r.tokens for r in alone]
    assert len({tuple(r.tokens) for r in alone}) == 5


def test_n_unseeded_outputs_differ(opened):
    params = SamplingParams(
        n=4, temperature=1.0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    outputs = run_raw(opened, PROMPT, params).outputs
    assert len({tuple(o.token_ids) for o in outputs}) == 4


# Logprobs


def check_logprobs(
    positions: list[dict[int, Any]], scores: torch.Tensor, tokens: list[int], num: int, tolerance: float = 1e-5
) -> None:
    """``positions``: vLLM's dicts; ``scores`` [n, V]: what they must say, with the right ranks and the right tokens."""
    assert len(positions) == len(tokens) == len(scores)
    for at, (found, row, token) in enumerate(zip(positions, scores, tokens, strict=True)):
        top = set(row.topk(num).indices.tolist()) if num else set()
        assert set(found) == top | {token}, at
        for other, logprob in found.items():
            assert abs(logprob.logprob - float(row[other])) <= tolerance, (at, other)
            first, last = int((row > row[other] + tolerance).sum()) + 1, int((row >= row[other] - tolerance).sum())
            assert first <= logprob.rank <= last, (at, other)


@pytest.mark.parametrize("num", [0, 1, 5, -1])
def test_logprobs_are_those_of_the_raw_logits(opened, num):
    """Also beside requests that want none or another number, and with penalties that must not show."""
    rules = [
        Rules({"logprobs": num}),
        Rules({"temperature": 1.0, "seed": 3, "logprobs": num, "top_k": 3, "frequency_penalty": 1.5}),
        Rules({"logprobs": 3}),
        Rules({"temperature": 0.7, "seed": 9}),
    ]
    prompts = [prompt_of(30 + 9 * i, salt=i) for i in range(4)]
    results = opened.generate(prompts, [r.params(10) for r in rules])
    for result, wanted in zip(results[:3], (num, num, 3), strict=True):
        scores = result.logits.log_softmax(-1)
        check_logprobs(result.logprobs, scores, result.tokens, VOCAB_SIZE if wanted == -1 else wanted)
    assert results[3].logprobs is None
    assert [r.tokens for r in results] == [
        expected(r, p, rule) for r, p, rule in zip(results, prompts, rules, strict=True)
    ]


def test_logprobs_of_given_tokens(opened):
    wanted = [5, 300, 17]
    result, plain = opened.generate(
        [PROMPT, PROMPT], [Rules({"logprob_token_ids": wanted}).params(6), Rules().params(6)]
    )
    scores = result.logits.log_softmax(-1)
    assert len(result.logprobs) == 6
    for found, row, token in zip(result.logprobs, scores, result.tokens, strict=True):
        assert set(found) == {*wanted, token}
        for other, logprob in found.items():
            assert logprob.logprob == pytest.approx(float(row[other]), abs=1e-5)
    assert plain.logprobs is None and plain.tokens == result.tokens


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_logprobs_mode(shelf, mode):
    rules = [
        Rules({"logprobs": 4, "frequency_penalty": 1.9}),
        Rules({"temperature": 0.7, "seed": 3, "logprobs": 4, "top_k": 9, "presence_penalty": 1.0}),
    ]
    prompts = [PROMPT, prompt_of(33, salt=5)]
    it = shelf("q35_dense", **FLAGS, logprobs_mode=mode)
    results = it.generate(prompts, [r.params(10) for r in rules])
    for result, prompt, rule in zip(results, prompts, rules, strict=True):
        scores = result.logits
        if mode != "raw_logits":
            rows = [processed(row, prompt, result.tokens[:i], rule) for i, row in enumerate(result.logits)]
            scores = torch.stack(rows) / (rule.kwargs.get("temperature") or 1.0)
            scores = torch.stack([row.masked_fill(~allowed(row, rule), -math.inf) for row in scores])
        if mode == "processed_logprobs":
            scores = scores.log_softmax(-1)
        check_logprobs(result.logprobs, scores, result.tokens, 4)


# Prompt logprobs


@pytest.fixture(scope="module")
def prompt_rows(shelf, is_async):
    """Prompt of 300 tokens and, for positions of interest, the logits that come after them (by sampling there)."""
    prompt = prompt_of(300, salt=8)
    at = [0, 1, 14, 15, 16, 62, 63, 64, 126, 127, 128, 191, 254, 255, 256, 298]
    it = shelf("q35_dense", **FLAGS, async_scheduling=is_async)
    results = it.generate([prompt[: i + 1] for i in at], greedy(1))
    return prompt, {i: r.logits[0] for i, r in zip(at, results, strict=True)}


@pytest.mark.parametrize("num", [0, 3, -1])
def test_prompt_logprobs_over_several_chunks(opened, prompt_rows, num):
    """The prompt is read in three steps, beside others that decode, and each position is scored once, rightly."""
    prompt, rows = prompt_rows
    others = [opened.add(prompt_of(50, salt=s), greedy(30)) for s in range(3)]
    for _ in range(3):
        opened.step()
    req_id = opened.add(prompt, greedy(4, prompt_logprobs=num))
    assert steps_to_first_token(opened, req_id) >= 3
    opened.run([req_id, *others])
    found = opened.take(req_id).prompt_logprobs
    assert found[0] is None and len(found) == len(prompt)
    for at, row in rows.items():
        scores = row.log_softmax(-1)[None]
        check_logprobs([found[at + 1]], scores, [prompt[at + 1]], VOCAB_SIZE if num == -1 else num, 1e-4)


def test_prompt_logprobs_do_not_depend_on_the_chunks(shelf):
    prompt = prompt_of(200, salt=9)
    found = []
    for budget in (64, 256):
        it = shelf("q35_dense", **{**FLAGS, "max_num_batched_tokens": budget}, max_num_seqs=4)
        req_id = it.add(prompt, greedy(2, prompt_logprobs=5))
        assert (steps_to_first_token(it, req_id) >= 4) == (budget == 64)
        it.run()
        found.append(it.take(req_id).prompt_logprobs)
    assert found[0][0] is None and found[1][0] is None
    for at, (split, whole) in enumerate(zip(found[0][1:], found[1][1:], strict=True)):
        assert {t: (p.logprob, p.rank) for t, p in split.items()} == {
            t: (p.logprob, p.rank) for t, p in whole.items()
        }, at


def test_prompt_logprobs_of_a_cached_prompt_are_all_there(shelf, is_async):
    it = shelf("q35_dense", **{**FLAGS, "enable_prefix_caching": True}, async_scheduling=is_async)
    prompt = prompt_of(150, salt=12)
    first, again, scored = (it.generate([prompt], greedy(4, prompt_logprobs=n))[0] for n in (None, None, 1))
    assert again.cached_tokens > 0
    assert first.tokens == again.tokens == scored.tokens
    assert len(scored.prompt_logprobs) == len(prompt)
    assert all(prompt[at] in scored.prompt_logprobs[at] for at in range(1, len(prompt)))


@pytest.mark.parametrize("length", [1, 2, 64, 65, 128, 129])
def test_prompt_logprobs_of_edge_lengths(opened, length):
    prompt = prompt_of(length, salt=4)
    together = opened.generate([prompt, PROMPT], [greedy(3, prompt_logprobs=2, logprobs=2), greedy(3)])
    found = together[0].prompt_logprobs
    assert found[0] is None and len(found) == length
    assert together[1].prompt_logprobs is None
    assert all(prompt[at] in found[at] for at in range(1, length))
    assert len(together[0].logprobs) == 3


def test_prompt_logprobs_survive_preemption(opened):
    prompt = prompt_of(200, salt=9)
    alone = opened.generate([prompt], greedy(6, prompt_logprobs=3))[0]
    results = []
    for steps in (1, 4):  # once in the middle of the prompt, once while it decodes
        req_id = opened.add(prompt, greedy(6, prompt_logprobs=3))
        for _ in range(steps):
            opened.step()
        opened.vllm_engine.reset_prefix_cache(reset_running_requests=True)
        opened.run([req_id])
        results.append(opened.take(req_id))
    for result in results:
        assert result.tokens == alone.tokens
        assert len(result.prompt_logprobs) == len(prompt)
        for mine, theirs in zip(result.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
            assert {t: p.logprob for t, p in mine.items()} == pytest.approx({t: p.logprob for t, p in theirs.items()})


# Thinking budget


def test_a_thinking_budget_ends_the_thought(shelf, is_async):
    """After that many tokens behind the start of a thought the end is forced, token by token."""
    reasoning = ReasoningConfig(reasoning_start_str="<|vision_start|>", reasoning_end_str="<|vision_end|>.")
    flags = {**FLAGS, "reasoning_config": reasoning, "async_scheduling": is_async}
    it = shelf("q35_dense", **flags)
    tokenizer = it.vllm_engine.renderer.get_tokenizer()
    start = tokenizer.encode("<|vision_start|>", add_special_tokens=False)
    end = tokenizer.encode("<|vision_end|>.", add_special_tokens=False)
    assert len(end) == 2
    budgets = (None, 0, 3, 7)
    free, *rest = it.generate([PROMPT + start] * 4, [greedy(12, thinking_token_budget=b) for b in budgets])
    for budget, result in zip(budgets[1:], rest, strict=True):
        assert result.tokens[: budget + 2] == free.tokens[:budget] + end
        assert result.tokens[budget + 2 :] != free.tokens[budget + 2 :]


# Custom logits processors


class SumOfOutput(AdapterLogitsProcessor):
    """Asks for token (7 + 3 * sum of the output so far) mod V: a stale or missing output token changes the rest."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if not (params.extra_args or {}).get("sum_of_output"):
            return None

        def force(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[(7 + 3 * sum(output)) % VOCAB_SIZE] = 1e4
            return logits

        return force


class OnlyToken(LogitsProcessor):
    """Lets a request that asks for it say one token only; keeps its own rows from vLLM's batch updates."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        token = (sampling_params.extra_args or {}).get("only_token")
        if token is not None and not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"only_token {token} is not a token")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.tokens: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.tokens.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.tokens.pop(index, None)
            token = (params.extra_args or {}).get("only_token")
            if token is not None:
                self.tokens[index] = token
        for source, target, direction in batch_update.moved:
            mine, other = self.tokens.pop(source, None), self.tokens.pop(target, None)
            if mine is not None:
                self.tokens[target] = mine
            if other is not None and direction.name == "SWAP":
                self.tokens[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token in self.tokens.items():
            kept = logits[row, token].clone()
            logits[row] = -math.inf
            logits[row, token] = kept
        return logits


class CountRows(LogitsProcessor):
    """As vLLM's documented example does: holds a tensor of as many rows as it is told, and returns new logits."""

    seen: ClassVar[list[tuple[int, int]]] = []  # requests that it was told of, rows that it was given

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.batch_size = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self.batch_size = batch_update.batch_size

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.batch_size, len(logits)))
        return logits + torch.zeros(self.batch_size, 1)


def test_custom_logits_processors(shelf, is_async):
    flags = {**FLAGS, "logits_processors": [SumOfOutput, OnlyToken, CountRows], "async_scheduling": is_async}
    it = shelf("q35_dense", **flags)
    plain = it.generate([PROMPT], greedy(20))[0].tokens
    CountRows.seen.clear()
    it.generate([PROMPT[n:] for n in range(5)], greedy(3))
    assert (5, 5) in CountRows.seen and all(told == given for told, given in CountRows.seen)
    assert it.runner.sampling.num_rows(5) > 5, "no padding to be seen"
    wanted = []
    for number in range(12):  # more than there are rows, of different lengths: rows move
        extra = [{"sum_of_output": True}, {"only_token": 20 + number}, None][number % 3]
        req_id = it.add(PROMPT, greedy(20 - number, extra_args=extra))
        wanted.append((req_id, extra))
        it.step()
    it.run()
    with pytest.raises(VLLMValidationError, match="only_token 600 is not a token"):
        it.add(PROMPT, greedy(4, extra_args={"only_token": 600}))
    for number, (req_id, extra) in enumerate(wanted):
        tokens = it.take(req_id).tokens
        assert len(tokens) == 20 - number
        if extra is None:
            assert tokens == plain[: len(tokens)]
        elif "only_token" in extra:
            assert set(tokens) == {extra["only_token"]}
        else:
            assert tokens == [(7 + 3 * sum(tokens[:i])) % VOCAB_SIZE for i in range(len(tokens))]
