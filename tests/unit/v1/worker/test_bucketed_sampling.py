# SPDX-License-Identifier: Apache-2.0
"""vLLM's batch and sampler at sizes from buckets: pads ask for nothing, and every tensor has a step's size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_gaudi.v1.worker.bucketed_sampling import BucketedInputBatch, BucketedSampler, LogitsBuffer, penalty_buckets

VOCAB = 40
LADDER = (1, 2, 4, 6)
MAX_LEN = 300


@pytest.fixture
def batch():
    return BucketedInputBatch(
        LADDER,
        max_num_reqs=LADDER[-1],
        max_model_len=2 * MAX_LEN,
        max_num_batched_tokens=1,
        device=torch.device("cpu"),
        vocab_size=VOCAB,
        block_sizes=[1],
        kernel_block_sizes=[1],
        max_num_blocks_per_req=[1],
        logitsprocs=LogitsProcessors(),
    )


def request(name: str, prompt=(1, 2, 3), output=(), **params) -> CachedRequestState:
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=list(prompt),
        mm_features=[],
        sampling_params=SamplingParams(**params),
        generator=None,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=list(output),
    )


ASKS_MUCH = {"temperature": 0.3, "top_p": 0.2, "top_k": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5}


def test_metadata_has_the_rows_of_the_ladder_and_pads_ask_for_nothing(batch):
    for n in range(5):
        batch.add_request(request(f"r{n}", repetition_penalty=2.0, allowed_token_ids=[1, 2], **ASKS_MUCH))
    batch.refresh_metadata()
    assert (batch.num_reqs, batch.rows_of(5), batch.sampling_metadata.temperature.shape) == (5, 6, (6,))
    for n in (0, 1):
        batch.remove_request(f"r{n}")
    batch.condense()
    batch.refresh_metadata()
    metadata = batch.sampling_metadata
    assert batch.num_reqs == 3 and batch.rows_of(3) == 4
    expected = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": VOCAB,
        "presence_penalties": 0.0,
        "frequency_penalties": 0.0,
        "repetition_penalties": 1.0,
    }
    for name, nothing in expected.items():
        values = getattr(metadata, name)
        assert values.shape == (4,) and values[3].item() == nothing and values[0].item() != nothing, name
    assert metadata.allowed_token_ids_mask.shape == (4, VOCAB)
    assert metadata.allowed_token_ids_mask[:3].any(1).all() and not metadata.allowed_token_ids_mask[3].any()
    assert metadata.prompt_token_ids.shape == (4, 128)
    assert (metadata.prompt_token_ids[3] == VOCAB).all() and metadata.prompt_token_ids[0, :4].tolist() == [1, 2, 3, 40]


@pytest.mark.parametrize(("length", "padded"), [(1, 128), (128, 128), (129, 256), (290, 512)])
def test_prompts_and_outputs_have_lengths_of_a_ladder(batch, length, padded, monkeypatch):
    assert padded in penalty_buckets(2 * MAX_LEN)
    seen = []
    from vllm_gaudi.v1.worker import bucketed_sampling

    def penalties(logits, prompts, outputs, *_):
        seen.append((prompts.shape, outputs.shape))
        return logits

    monkeypatch.setattr(bucketed_sampling, "apply_penalties", penalties)
    batch.add_request(request("a", prompt=[1] * length, output=[2] * length, **ASKS_MUCH))
    batch.refresh_metadata()
    BucketedSampler(2 * MAX_LEN)(torch.zeros(1, VOCAB), batch.sampling_metadata)
    assert seen == [((1, padded), (1, padded))]


@pytest.mark.parametrize("outputs", [([5, 5, 6], [], [7]), ([], [], [])])
def test_penalties_are_vllms(batch, outputs):
    for n, output in enumerate(outputs):
        batch.add_request(
            request(f"r{n}", prompt=[n, 9], output=output, repetition_penalty=1.5, presence_penalty=0.3, temperature=0)
        )
    batch.refresh_metadata()
    metadata = batch.sampling_metadata
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    found = BucketedSampler(MAX_LEN).apply_penalties(logits.clone(), metadata, metadata.output_token_ids)
    wanted = Sampler.apply_penalties(logits.clone(), metadata, [*metadata.output_token_ids, []])
    assert torch.equal(found, wanted) and torch.equal(found[3], logits[3]) and not torch.equal(found[0], logits[0])


def test_a_batch_that_asks_for_no_penalties_has_none(batch):
    batch.add_request(request("a", temperature=0))
    batch.refresh_metadata()
    logits = torch.randn(1, VOCAB)
    assert BucketedSampler(MAX_LEN).apply_penalties(logits, batch.sampling_metadata, []) is logits


class TestLogitRows:
    def test_rows_are_found_at_their_places_and_nobody_s_are_not(self):
        rows = LogitsBuffer(4, torch.device("cpu"))
        first, second = torch.arange(6.0).view(3, 2), torch.arange(10.0, 14.0).view(2, 2)
        rows.add(first, {0: 1})  # the third is padding, the second does not sample
        rows.add(second, {0: 0, 1: 2})
        taken = rows.take([2, 0, 1], 4)
        assert taken[:3].tolist() == [[12, 13], [10, 11], [0, 1]] and taken.shape == (4, 2)

    def test_what_is_taken_is_the_taker_s(self):
        rows = LogitsBuffer(1, torch.device("cpu"))
        rows.add(torch.ones(1, 2), {0: 0})
        rows.take([0], 1).zero_()
        assert rows.take([0], 1).tolist() == [[1, 1]]


def test_ladders_of_lengths_end_at_the_longest_text():
    assert (
        penalty_buckets(64) == (64,)
        and penalty_buckets(128) == (128,)
        and penalty_buckets(1000) == (128, 256, 512, 1000)
    )


def test_a_custom_processor_is_told_the_rows_that_its_logits_have(batch):
    sizes = []
    processor = SimpleNamespace(
        update_state=lambda update: sizes.append(update and update.batch_size), is_argmax_invariant=lambda: True
    )
    batch.logitsprocs = LogitsProcessors([processor])
    for n in range(3):
        batch.add_request(request(f"r{n}", temperature=0))
    batch.refresh_metadata()
    batch.refresh_metadata()
    assert sizes == [4, None]
