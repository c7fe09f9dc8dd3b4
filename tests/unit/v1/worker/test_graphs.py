# SPDX-License-Identifier: Apache-2.0
"""Which shapes the model was given: known after warm-up, reported once where they are not. Needs vLLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_gaudi.bucketing.grid import BucketGrid, DecodeBucket, PrefillBucket
from vllm_gaudi.v1.worker.inputs import InputBuilder, PaddingRows

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it

GRID = BucketGrid(query_multiple=16, max_query=64, max_batch=6, max_context=100, kernel_block=16, max_blocks=30)


@pytest.fixture
def inputs():
    return InputBuilder(
        GRID,
        PaddingRows(padding_block=30, zero_row=6, trash_row=7),
        tiles=None,
        expert_tiles=None,
        with_hints=False,
        attention_group=0,
        kernel_block=16,
        kernel_blocks_per_block=1,
        num_slots=6,
        position_axes=1,
        device=torch.device("cpu"),
    )


class Model:
    """Gives back hidden states that tell their row."""

    def __init__(self):
        self.seen = []

    def __call__(self, **given):
        self.seen.append((given["input_ids"].shape[0], given["intermediate_tensors"], given["inputs_embeds"]))
        return torch.arange(given["input_ids"].shape[0], dtype=torch.float32)[:, None]

    def compute_logits(self, hidden):
        return hidden * 2


@pytest.fixture
def runner(monkeypatch):
    import contextlib

    from vllm_gaudi.v1.worker import graphs

    monkeypatch.setattr(graphs, "set_forward_context", lambda *args, **kwargs: contextlib.nullcontext())
    return graphs.GraphRunner(Model(), vllm_config=None)


def test_every_bucket_of_the_grid_has_a_shape_of_its_own(inputs):
    from vllm_gaudi.v1.worker.graphs import shape_of

    buckets = [*GRID.all_prefill(), *GRID.all_decode()]
    assert len({shape_of(inputs.dummy_inputs(bucket)) for bucket in buckets}) == len(buckets)
    assert shape_of(inputs.dummy_inputs(PrefillBucket(4, 16, 4))) == ("prefill", 64, 4, 4, 0)
    assert shape_of(inputs.dummy_inputs(DecodeBucket(2, 16))) == ("decode", 16, 2, 16, 0)


def test_shapes_before_the_seal_are_warm_and_others_are_reported_once(runner, inputs, monkeypatch):
    from vllm_gaudi.v1.worker import graphs

    said = []
    monkeypatch.setattr(graphs.logger, "warning", lambda *args: said.append(args))
    runner.run(inputs.dummy_inputs(PrefillBucket(1, 16, 1)))
    runner.finish_warmup()
    runner.run(inputs.dummy_inputs(PrefillBucket(1, 16, 1)))
    assert (runner.unwarmed_shapes, said) == (set(), [])
    for _ in range(2):
        runner.run(inputs.dummy_inputs(PrefillBucket(1, 32, 2)))
    assert runner.unwarmed_shapes == {("prefill", 32, 1, 2, 0)}
    assert said == [("Configuration: %s was not warmed-up!", ("prefill", 32, 1, 2, 0))]
    assert runner.warmed_shapes == {("prefill", 16, 1, 1, 0)}


def test_without_warm_up_nothing_is_reported(runner, inputs, monkeypatch):
    from vllm_gaudi.v1.worker import graphs

    monkeypatch.setattr(graphs.logger, "warning", lambda *args: pytest.fail("reported"))
    runner.finish_warmup()
    runner.run(inputs.dummy_inputs(DecodeBucket(1, 8)))
    assert runner.unwarmed_shapes == {("decode", 16, 1, 8, 0)}


def test_no_more_than_some_cold_shapes_are_remembered(runner, inputs, monkeypatch):
    from vllm_gaudi.v1.worker import graphs

    monkeypatch.setattr(graphs, "MAX_UNWARMED_SHAPES", 3)
    runner.finish_warmup()
    for blocks in range(1, 9):
        runner.run(inputs.dummy_inputs(DecodeBucket(1, blocks)))
    assert runner.unwarmed_shapes == {("decode", 16, 1, blocks, 0) for blocks in (1, 2, 3)}


def test_logits_are_those_of_the_rows_asked_for(runner, inputs):
    hidden = runner.run(inputs.dummy_inputs(PrefillBucket(1, 16, 1)))
    rows = torch.from_numpy(np.array([3, 0, 3]))
    assert runner.logits(hidden, rows).tolist() == [[6.0], [0.0], [6.0]]


def test_the_compiled_regions_are_the_layers_and_nothing_inside_them():
    from vllm_gaudi.v1.worker.graphs import regions

    layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)])) for _ in range(3)])
    body = torch.nn.Module()
    body.embed, body.layers, body.norm = torch.nn.Embedding(2, 2), layers, torch.nn.LayerNorm(2)
    model = torch.nn.Module()
    model.model, model.lm_head = body, torch.nn.Linear(2, 2)
    assert list(regions(model)) == list(layers)
