# SPDX-License-Identifier: Apache-2.0
"""Prompt logprobs: each prompt token gets those of its own row, over any chunks; an id that comes again starts anew.

The model here is a function of the row: logits of row r are r everywhere, so a wrong row shows as a wrong value.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it

VOCAB = 600


@pytest.fixture(scope="module")
def module():
    from vllm_gaudi.v1.worker import prompt_logprobs

    return prompt_logprobs


class FakeSampler:
    """``gather_logprobs`` gives each row's value, the target as token id, and how many were asked for as width."""

    def __init__(self):
        self.sizes = []

    def compute_logprobs(self, logits):
        return logits

    def gather_logprobs(self, scores, num_logprobs, targets):
        from vllm.v1.outputs import LogprobsTensors

        self.sizes.append(len(targets))
        values = scores[:, :1].repeat(1, num_logprobs + 1)
        return LogprobsTensors(targets.to(torch.int32)[:, None].repeat(1, num_logprobs + 1), values, targets)


@pytest.fixture
def sampler():
    return FakeSampler()


@pytest.fixture
def worker(module, sampler):
    return module.PromptLogprobsWorker(
        lambda hidden, rows: hidden.index_select(0, rows), sampler, VOCAB, "raw_logprobs", torch.device("cpu")
    )


def request_of(req_id="a", length=6, prompt_logprobs=2, output=()):
    return SimpleNamespace(
        req_id=req_id,
        num_prompt=length,
        tokens=np.arange(100, 100 + length + 4, dtype=np.int32),
        output=list(output),
        sampling_params=SimpleNamespace(prompt_logprobs=prompt_logprobs),
    )


def run(worker, query, *chunks):
    """One forward: ``chunks`` of (request, start, end), one per sequence of ``query`` rows. Row n * query + i holds
    that number."""
    step = SimpleNamespace(
        req_ids=[request.req_id for request, *_ in chunks],
        num_computed_tokens=np.array([start for _, start, _ in chunks]),
        end=np.array([end for *_, end in chunks]),
    )
    inputs = SimpleNamespace(members=range(len(chunks)), attn=SimpleNamespace(query=query))
    rows = torch.arange(len(chunks) * query, dtype=torch.float32)[:, None].repeat(1, 3)
    return worker.compute(step, inputs, rows, {request.req_id: request for request, *_ in chunks})


def test_a_prompt_in_one_chunk_has_its_next_tokens_and_its_own_rows(worker):
    other, request = request_of("b", 3), request_of("a", 6)
    finished = run(worker, 8, (other, 0, 3), (request, 0, 6))
    assert set(finished) == {"a", "b"}
    whole = finished["a"].get()
    assert whole.logprobs.shape == whole.logprob_token_ids.shape == (5, 3)
    assert whole.logprobs[:, 0].tolist() == [8, 9, 10, 11, 12]
    assert whole.logprob_token_ids[:, 0].tolist() == [101, 102, 103, 104, 105]
    assert finished["b"].get().logprobs[:, 0].tolist() == [0, 1]


def test_a_prompt_in_chunks_is_handed_out_with_the_last_one(worker):
    request = request_of(length=6)
    assert run(worker, 4, (request, 0, 4)) == {}
    whole = run(worker, 4, (request, 4, 6))["a"].get()
    assert whole.logprobs[:, 0].tolist() == [0, 1, 2, 3, 0]
    assert whole.logprob_token_ids[:, 0].tolist() == [101, 102, 103, 104, 105]


def test_tokens_that_are_run_again_are_written_over(worker):
    """As after a preemption, which starts the prompt anew."""
    request = request_of(length=6)
    run(worker, 8, (request_of("b"), 0, 6), (request, 0, 4))
    whole = run(worker, 8, (request, 0, 6))["a"].get()
    assert whole.logprobs[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("length", [1, 2, 128, 129, 256, 257, 300])
def test_logits_are_made_in_windows_of_one_size(worker, sampler, module, length):
    whole = run(worker, 320, (request_of(length=length), 0, length))["a"].get()
    assert whole.logprobs[:, 0].tolist() == list(range(length - 1))
    assert set(sampler.sizes) <= {module.MOST_ROWS} and len(sampler.sizes) == -(-(length - 1) // 128)


def test_a_window_is_no_larger_than_the_sequence_of_the_bucket(worker, sampler):
    assert run(worker, 64, (request_of(length=50), 0, 50))["a"].get().logprobs.shape == (49, 3)
    assert sampler.sizes == [64]


def test_who_asked_for_none_or_has_answered_gets_none(worker, sampler):
    """A resumed request that has output replays its prompt: its logprobs have been handed out."""
    chunks = (request_of("a", prompt_logprobs=None), 0, 6), (request_of("b", output=[7]), 0, 6)
    assert run(worker, 8, *chunks) == {} and sampler.sizes == []
    assert run(worker, 1, (request_of("c"), 6, 7)) == {}, "past its prompt"


def test_all_means_the_vocabulary(worker):
    assert run(worker, 8, (request_of(prompt_logprobs=-1), 0, 6))["a"].get().logprobs.shape == (5, VOCAB + 1)


def test_raw_logits_are_not_normalised(module, sampler):
    sampler.compute_logprobs = lambda logits: pytest.fail("normalised")
    worker = module.PromptLogprobsWorker(
        lambda hidden, rows: hidden.index_select(0, rows), sampler, VOCAB, "raw_logits", torch.device("cpu")
    )
    assert run(worker, 8, (request_of(), 0, 6))["a"].get().logprobs[0, 0].item() == 0


def test_what_was_handed_out_or_removed_is_gone(worker):
    run(worker, 8, (request_of(), 0, 6))
    assert not worker._in_flight
    run(worker, 4, (request_of(), 0, 4))
    assert worker._in_flight
    worker.remove_requests({"a", "never seen"})
    assert not worker._in_flight


def test_another_request_under_the_same_id_starts_anew(worker):
    """An id may finish and come again; chunks of the first must not show in the second's answer."""
    run(worker, 8, (request_of("x"), 0, 6), (request_of(), 0, 4))
    assert run(worker, 4, (request_of(length=3), 0, 3))["a"].get().logprobs[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize(("vocab_size", "rows"), [(512, 128), (65536, 128), (65537, 64), (151936, 32), (2**30, 1)])
def test_a_chunk_keeps_to_its_elements(module, vocab_size, rows):
    assert module.chunk_rows(vocab_size) == rows


def test_a_profile_run_is_one_chunk_with_all_logprobs(worker, sampler):
    worker.profile(torch.zeros(200, VOCAB), 7)
    assert sampler.sizes == [128]
