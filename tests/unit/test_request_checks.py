# SPDX-License-Identifier: Apache-2.0
"""What of a request is refused, in which words; which legal values pass."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest


@pytest.fixture(scope="module", autouse=True)
def imported():
    import vllm  # noqa: F401


def params(**values):
    from vllm import SamplingParams

    return SamplingParams(**values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"seed": 2**64 - 3, "n": 3, "temperature": 1.0},
        {"temperature": 1, "top_p": 1},  # whole numbers where a fraction may stand
        {"logit_bias": {3: -math.inf, 4: 1}},
        {"stop": ["a"], "bad_words": ["b"], "allowed_token_ids": [1]},
        {"extra_args": {"anything": object(), "more": [1, "a"]}},
        {"logprobs": True},
    ],
    ids=lambda values: "-".join(values) or "nothing",
)
def test_what_a_step_can_do_passes(values):
    from vllm_gaudi.request_checks import check_sampling_params

    check_sampling_params(params(**values))


def test_structures_pass():
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_gaudi.request_checks import check_sampling_params

    check_sampling_params(params(structured_outputs=StructuredOutputsParams(json=json.dumps({"type": "object"}))))


@pytest.mark.parametrize(
    ("name", "value", "pattern"),
    [
        ("seed", 2**64, f"to {2**64 - 1}, got {2**64}"),
        ("seed", "a", "Expected `int . null`, got `str` - at `.*seed`"),
        ("seed", True, "got `bool`"),
        ("max_tokens", 1.5, "max_tokens"),
        ("temperature", "hot", "temperature"),
        ("logit_bias", {3: math.nan}, "nan for token id 3"),
        ("logit_bias", {"3": 1.0}, "logit_bias"),
        ("min_tokens", np.int32(3), "pass 3"),
        ("stop", ["\ud800"], "surrogates"),
        ("extra_args", {"huge": 10**30}, "ints"),
        ("extra_args", {"huge": [np.float32(0.5)]}, "pass 0.5"),
    ],
    ids=str,
)
def test_what_a_step_would_raise_over_is_refused(name, value, pattern):
    from vllm.exceptions import VLLMValidationError

    from vllm_gaudi.request_checks import check_sampling_params

    wrong = params()
    setattr(wrong, name, value)
    with pytest.raises(VLLMValidationError, match=pattern):
        check_sampling_params(wrong)


def test_token_ids_of_the_vocabulary_pass():
    from vllm_gaudi.request_checks import check_token_ids

    check_token_ids([0, 511], 512)
    check_token_ids([], 512)
    check_token_ids((3, 4), 512)


@pytest.mark.parametrize("wrong", [-1, 512, 10**30, 1.0, True, "5", None], ids=repr)
def test_other_token_ids_are_refused_with_the_range(wrong):
    from vllm.exceptions import VLLMValidationError

    from vllm_gaudi.request_checks import check_token_ids

    with pytest.raises(VLLMValidationError, match=rf"token id {wrong!r} is not .* 0 to 511"):
        check_token_ids([5, wrong, 7], 512)


def test_the_platform_takes_the_largest_vocabulary_that_is_served(config_of):
    from vllm.exceptions import VLLMValidationError

    from vllm_gaudi.platform import HpuPlatform

    small, large = config_of(), config_of()
    small.model_config.get_vocab_size = lambda: 100
    large.model_config.get_vocab_size = lambda: 200
    others = dict(HpuPlatform._model_configs)
    HpuPlatform._model_configs.clear()
    try:
        for config in (small, large):
            HpuPlatform.check_and_update_config(config)
        HpuPlatform.validate_request({"type": "token", "prompt_token_ids": [150]}, params())
        del large, config
        with pytest.raises(VLLMValidationError, match="0 to 99"):
            HpuPlatform.validate_request({"type": "token", "prompt_token_ids": [150]}, params())
    finally:
        HpuPlatform._model_configs.clear()
        HpuPlatform._model_configs.update(others)
