# SPDX-License-Identifier: Apache-2.0
"""What the engine reads of a step. Needs vLLM's records."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_gaudi.device import HostCopy
from vllm_gaudi.v1.worker.requests import StepRequests

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it


@pytest.fixture(scope="module")
def sampling():
    from vllm_gaudi.v1.worker import sampling

    return sampling


@pytest.fixture(scope="module")
def step_output():
    from vllm_gaudi.v1.worker.output import StepOutput

    return StepOutput


def step_of(*req_ids: str) -> StepRequests:
    zeros = np.zeros(len(req_ids), np.int32)
    return StepRequests(
        req_ids=req_ids,
        state_slots=zeros,
        num_computed_tokens=zeros,
        num_scheduled_tokens=zeros,
        is_prefill=zeros > 0,
        samples=zeros > 0,
        admitted=zeros > 0,
        admission_ids=tuple(range(len(req_ids))),
        block_ids=(),
        tokens=(),
        fresh_blocks=zeros[:0],
    )


def logprobs(rows: int, columns: int, first: float = 0.0):
    """Logprobs whose values tell their row: row r holds r + ``first`` in all three tensors."""
    from vllm.v1.outputs import LogprobsTensors

    value = torch.arange(rows) + first
    return LogprobsTensors(
        logprob_token_ids=value[:, None].repeat(1, columns).to(torch.int32),
        logprobs=value[:, None].repeat(1, columns).to(torch.float32),
        selected_token_ranks=value.to(torch.int32),
    )


class TestStepOutput:
    def test_requests_that_sampled_come_first_in_their_own_order_and_the_rest_give_nothing(self, sampling, step_output):
        sampled = sampling.SampledStep(("c", "a"), (0, 1), HostCopy(torch.tensor([[7], [8]], dtype=torch.int32)), None)
        scores = {"b": SimpleNamespace(get=lambda: "scores of b")}
        output = step_output(step_of("a", "b", "c", "d"), sampled, scores).get_output()
        assert output.req_ids == ["c", "a", "b", "d"]
        assert output.req_id_to_index == {"c": 0, "a": 1, "b": 2, "d": 3}
        assert output.sampled_token_ids == [[7], [8], [], []]
        assert output.logprobs is None
        assert output.prompt_logprobs_dict == {"b": "scores of b"}
        assert output.pooler_output == []

    def test_a_step_in_which_nobody_samples(self, step_output):
        output = step_output(step_of("a", "b"), None, {}).get_output()
        assert (output.req_ids, output.sampled_token_ids, output.logprobs) == (["a", "b"], [[], []], None)

    def test_logprobs_are_those_of_the_rows_that_sampled(self, sampling, step_output):
        sampled = sampling.SampledStep(
            ("b", "a"), (0, 1), HostCopy(torch.tensor([[7], [8], [9], [9]])), sampling.HostLogprobs(logprobs(4, 3), 2)
        )
        output = step_output(step_of("a", "b", "c"), sampled, {}).get_output()
        assert output.sampled_token_ids == [[7], [8], []]
        assert [list(map(float, row)) for row in output.logprobs.logprobs] == [[0, 0, 0], [1, 1, 1]]

    def test_nothing_is_waited_for_before_it_is_asked(self, sampling, step_output):
        waited = []
        copy = SimpleNamespace(get=lambda: waited.append(True) or torch.tensor([[7]]))
        output = step_output(step_of("a"), sampling.SampledStep(("a",), (0,), copy, None), {})
        assert not waited
        assert output.get_output().sampled_token_ids == [[7]]
        assert output.get_output().sampled_token_ids == [[7]]


@pytest.mark.parametrize("vocab_size", [64, 70, 512])
def test_what_a_grammar_forbids_is_what_vllms_kernel_forbids(sampling, vocab_size):
    import xgrammar

    words = np.random.default_rng(vocab_size).integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), np.int32)
    grammar = SimpleNamespace(structured_output_request_ids=["c", "gone", "a"], grammar_bitmask=words)
    forbidden = sampling.forbidden_tokens(grammar, ["a", "b", "c"], vocab_size)
    logits = torch.zeros(2, vocab_size)
    xgrammar.apply_token_bitmask_inplace(logits, torch.from_numpy(words[[2, 0]]))
    assert forbidden.shape == (3, vocab_size) and not forbidden[1].any()
    assert (forbidden[[0, 2]] == logits.isinf().numpy()).all()
    assert 0.3 < forbidden[0].mean() < 0.7
