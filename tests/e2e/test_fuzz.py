# SPDX-License-Identifier: Apache-2.0
"""No request may end the engine: Hypothesis over sampling parameters and prompts of token ids, in process.

Each request is refused when it is added, or it ends. After each, another one is answered with the same bits as before
the first. `make test` plays a share, `make soak` many more.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_gaudi.testing.checkpoints import VOCAB_SIZE
from vllm_gaudi.testing.engine import Engine, greedy

pytestmark = pytest.mark.hypothesis

CANARY = [10 + (i * i * 7 + i * 13) % 480 for i in range(40)]
REFUSED = (VLLMValidationError, ValueError, TypeError, OverflowError, AssertionError)
"""What a caller may be told: vLLM's constructor asserts on some types before anybody else has seen them."""

ODD_NUMBERS = st.sampled_from(
    [0, 1, -1, 2, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, 1e-9, 1e308]
) | st.sampled_from([math.nan, math.inf, -math.inf, True, None, "5", [], {}, b"\0", np.int64(3), np.float32(0.5)])


def odd(sensible: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what makes sense, so that several values meet in one request, sometimes anything."""
    return st.one_of(*[sensible] * 11, ODD_NUMBERS)


TOKENS = odd(st.integers(0, VOCAB_SIZE - 1) | st.sampled_from([-1, VOCAB_SIZE]))
TEXTS = odd(st.sampled_from(["", "a", "e", "\ud800", "the", "\0", "\u00e9" * 40]))

BIASES = st.floats(-100, 100)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": odd(st.sampled_from([0.0, 0.01, 1.0, 2.0])),
    "top_p": odd(st.sampled_from([1e-6, 0.5, 1.0])),
    "top_k": odd(st.sampled_from([-1, 0, 1, 40, VOCAB_SIZE])),
    "min_p": odd(st.sampled_from([0.0, 0.3, 1.0])),
    "seed": odd(st.integers(-(2**63), 2**64 - 1)),
    "n": odd(st.sampled_from([1, 2, 3])),
    "presence_penalty": odd(st.floats(-2, 2)),
    "frequency_penalty": odd(st.floats(-2, 2)),
    "repetition_penalty": odd(st.floats(0.01, 2)),
    "min_tokens": odd(st.integers(0, 2)),
    "logprobs": odd(st.integers(-1, 20)),
    "prompt_logprobs": odd(st.integers(-1, 20)),
    "logprob_token_ids": odd(st.lists(TOKENS, min_size=1, max_size=3)),
    "stop": odd(st.lists(TEXTS, max_size=3) | TEXTS),
    "stop_token_ids": odd(st.lists(TOKENS, min_size=1, max_size=3)),
    "bad_words": odd(st.lists(TEXTS, max_size=3)),
    "allowed_token_ids": odd(st.lists(TOKENS, min_size=1, max_size=3)),
    "logit_bias": st.dictionaries(
        TOKENS.filter(lambda t: not isinstance(t, list | dict)), odd(st.floats(-100, 100)), max_size=3
    ),
    "ignore_eos": odd(st.booleans()),
    "detokenize": odd(st.booleans()),
    "include_stop_str_in_output": odd(st.booleans()),
    "skip_special_tokens": odd(st.booleans()),
    "flat_logprobs": odd(st.booleans()),
    "output_kind": odd(st.sampled_from(list(RequestOutputKind))),
    "extra_args": odd(st.dictionaries(st.text(max_size=3), odd(st.integers(0, 9)), max_size=2)),
    "skip_reading_prefix_cache": odd(st.booleans()),
    "thinking_token_budget": odd(st.none()),
    "structured_outputs": st.none()
    | st.sampled_from([{"regex": "[a-f]+"}, {"choice": ["yes", "no"]}, {"json_object": True}, {"grammar": "?"}]).map(
        lambda kwargs: StructuredOutputsParams(**kwargs)
    ),
}
PARAMS = st.fixed_dictionaries({}, optional=FIELDS).map(lambda values: dict(list(values.items())[:4]))
MAX_TOKENS = odd(st.integers(1, 6)).map(lambda n: 8 if n is None or (type(n) is int and 8 < n < 2**63) else n)
PROMPTS = st.one_of(
    *[st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=70)] * 5,
    st.lists(TOKENS, max_size=4),
    st.integers(500, 520).map(lambda length: [5] * length),
)


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def opened(request: pytest.FixtureRequest, shelf: Any) -> Engine:
    return shelf(
        "q35_dense", skip_tokenizer_init=False, max_num_seqs=4, max_logprobs=-1, async_scheduling=request.param
    )


@pytest.fixture(scope="module")
def wanted(opened: Engine) -> Any:
    cold = opened.generate([CANARY], greedy(3))[0]
    hit = opened.generate([CANARY], greedy(3))[0]
    assert hit.cached_tokens == 32 and torch.equal(hit.logits, cold.logits)
    return hit


@settings(phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
@given(prompt=PROMPTS, max_tokens=MAX_TOKENS, values=PARAMS)
def test_after_any_request_the_next_one_is_served(
    opened: Engine, wanted: Any, prompt: list[Any], max_tokens: Any, values: dict[str, Any]
) -> None:
    beside = opened.add(CANARY[:20], greedy(4))
    opened.step()
    req_ids = [beside]
    try:
        req_ids.append(opened.add(prompt, SamplingParams(max_tokens=max_tokens, **values)))
    except REFUSED as error:
        event(f"refused: {type(error).__name__}")
    else:
        event("served")
    opened.run(req_ids)
    results = [opened.take(req_id) for req_id in req_ids]
    assert results[0].tokens and all(result.finish_reason for result in results)
    opened.drain()
    found = opened.generate([CANARY], greedy(3))[0]
    assert found.tokens == wanted.tokens and torch.equal(found.logits, wanted.logits)


def test_an_answer_that_changes_would_be_seen(opened: Engine, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault switch: a request that leaves something behind, here a mask over the logits."""
    take = opened.runner.sampling.logits_buffer.take
    monkeypatch.setattr(opened.runner.sampling.logits_buffer, "take", lambda *args: take(*args) + 1e-4)
    found = opened.generate([CANARY], greedy(3))[0]
    assert not torch.equal(found.logits, wanted.logits)
