# SPDX-License-Identifier: Apache-2.0
"""The compiled path on a host: the same graphs that Gaudi's backend would be given, run by another backend.

Under ``aot_eager`` dynamo traces and AOT autograd makes functional graphs of every region, and torch runs them. So what
a graph compiler could reject shows here: a graph break, a recompilation after warm-up, a value read back to the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from vllm_gaudi.testing.engine import Engine, engine, greedy

pytestmark = [pytest.mark.slow, pytest.mark.execution_mode("hpu_like")]
FLAGS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 40,
}


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_GAUDI_COMPILE", "aot_eager")
    monkeypatch.setenv("VLLM_SKIP_WARMUP", "0")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def random_load(serving: Engine, prompt: Callable[[int], list[int]]) -> list[tuple[list[int], int, Any]]:
    """Prompts with shared prefixes and turns that go on; returns prompt, answer's length and result of each."""
    source = random.Random(4)
    stem = prompt(48)
    asked: list[tuple[list[int], int, str]] = []
    for n in range(14):
        text = stem[: source.choice([0, 16, 40, 48])] + prompt(source.randrange(1, 60))
        length = source.randrange(1, 12)
        asked.append((text, length, serving.add(text, greedy(length))))
        for _ in range(source.choice([0, 1, 3])):
            serving.step()
        if n % 5 == 4:
            serving.run()
    serving.run()
    return [(text, length, serving.take(name)) for text, length, name in asked]


@pytest.mark.parametrize(
    "model",
    ["q35_moe", pytest.param("q35_dense", marks=pytest.mark.soak), pytest.param("llama", marks=pytest.mark.soak)],
)
def test_compiled_layers_give_what_eager_ones_give_without_a_break_or_a_late_graph(
    model: str,
    checkpoint: Callable[..., Path],
    prompt: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = checkpoint(model)
    with engine(path, **FLAGS) as serving:
        graphs = serving.runner.graphs
        assert graphs.backend == "aot_eager"
        # All layers of a kind share a shape's graph, however many they are; the first has a graph of its own, since it
        # has no residual yet. The logits are one more.
        kinds = 2 if model == "llama" else 3
        # The profile ran a prefill and a decode on a pool of another size, which is another shape of the attention's.
        made, shapes = counters["stats"]["unique_graphs"], len(graphs.warmed_shapes) + 2
        assert len(graphs.warmed_shapes) < made <= (kinds + 1) * shapes
        assert not counters["graph_break"], dict(counters["graph_break"])
        answers = random_load(serving, prompt)
        assert sum(bool(result.cached_tokens) for _, _, result in answers) >= 3
        assert graphs.num_late_graphs == 0 and not graphs.unwarmed_shapes
        assert not counters["graph_break"]
    monkeypatch.setenv("VLLM_GAUDI_COMPILE", "none")
    with engine(path, **FLAGS) as serving:
        assert serving.runner.graphs.backend is None
        for text, length, result in answers:
            wanted = serving.generate([text], greedy(length))[0]
            assert result.tokens == wanted.tokens
            assert (result.logits - wanted.logits).abs().max() < 1e-4


def test_a_shape_that_warm_up_has_not_seen_is_a_late_graph(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter that the test above relies on."""
    monkeypatch.setenv("VLLM_SKIP_WARMUP", "1")
    with engine(checkpoint("q35_moe"), **FLAGS) as serving:
        assert serving.runner.graphs.num_late_graphs == 0
        serving.generate([prompt(20)], greedy(1))
        assert serving.runner.graphs.num_late_graphs > 0


def test_a_read_back_in_a_layer_is_seen_as_a_graph_break(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault switch: a layer that asks for a value of a tensor."""
    from vllm_gaudi.layers.gdn_attention import HPUGatedDeltaNetAttention

    split_heads = HPUGatedDeltaNetAttention._split_heads

    def reads_back(self: Any, convolved: torch.Tensor) -> Any:
        if convolved.sum().item() > 1e9:
            convolved = convolved + 1
        return split_heads(self, convolved)

    monkeypatch.setattr(HPUGatedDeltaNetAttention, "_split_heads", reads_back)
    monkeypatch.setenv("VLLM_SKIP_WARMUP", "1")
    with engine(checkpoint("q35_moe"), **FLAGS) as serving:
        serving.generate([prompt(20)], greedy(1))
        assert counters["graph_break"]


def test_enforce_eager_compiles_nothing(checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]) -> None:
    with engine(checkpoint("q35_moe"), enforce_eager=True, **FLAGS) as serving:
        assert serving.runner.graphs.backend is None
        serving.generate([prompt(20)], greedy(1))
        assert counters["stats"]["unique_graphs"] == 1  # vLLM's count of ranks, for logprobs


def test_the_first_request_with_logprobs_compiles_nothing(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's count of ranks goes through dynamo wherever the layers do not."""
    monkeypatch.setenv("VLLM_GAUDI_COMPILE", "none")
    with engine(checkpoint("q35_moe"), **FLAGS) as serving:
        made = counters["stats"]["unique_graphs"]
        assert made > 0
        (result,) = serving.generate([prompt(20)], greedy(2, logprobs=2, prompt_logprobs=2))
        assert result.logprobs and result.prompt_logprobs
        assert counters["stats"]["unique_graphs"] == made
        assert serving.runner.graphs.num_late_graphs == 0
