# SPDX-License-Identifier: Apache-2.0
"""What runs outside the graphs has shapes that warm-up has had: a device compiles each of them, too.

With the stub of the bridge, so that warm-up is Gaudi's. Requests of any number and length come, hit and leave; greedy,
at random, and with top-p and top-k, alone and together.
"""

from __future__ import annotations

import re

import pytest

from tests import with_stub

pytestmark = pytest.mark.execution_mode("hpu_like")

SCRIPT = """
import contextlib
import json
import os
import random

from vllm_gaudi import device

device.device_type = lambda: "cpu"
import torch
from vllm import SamplingParams
from vllm_gaudi.testing.engine import engine
from tests.support.operator_table import EXEMPTIONS
from tests.support.operator_recorder import watch

FLAGS = dict(enable_prefix_caching=True, block_size=128, max_model_len=640, max_num_seqs=6, max_num_batched_tokens=256)
source = random.Random(int(os.environ["SEED"]))
stem = [source.randrange(10, 500) for _ in range(384)]


def params(**extra):
    ways = [dict(temperature=0), dict(temperature=0.9), dict(temperature=0.9, top_p=0.8),
            dict(temperature=0.9, top_k=4), dict(temperature=0.9, top_p=0.8, top_k=4)]
    asked = source.choice(ways[: int(os.environ["WAYS"])])
    return SamplingParams(max_tokens=source.randrange(1, 9), ignore_eos=True, detokenize=False, **asked, **extra)


def load(serving, count, **extra):
    names = []
    for _ in range(count):
        prompt = stem[: source.choice([0, 50, 256, 384])]
        prompt = prompt + [source.randrange(10, 500) for _ in range(source.randrange(1, 200))]
        names.append(serving.add(prompt, params(**extra)))
        for _ in range(source.choice([0, 0, 1, 4])):
            serving.step()
    serving.run()
    return sum(bool(serving.take(name).cached_tokens) for name in names)


def shapes(serving, count, **extra):
    with watch(serving.runner, EXEMPTIONS) as seen:
        hits = load(serving, count, **extra)
    return seen.record.eager_shapes, hits


with engine(os.environ["CHECKPOINT"], num_gpu_blocks_override=90, **FLAGS) as serving:
    with watch(serving.runner, EXEMPTIONS) as seen, torch.inference_mode():
        compile_only = device.compile_only

        @contextlib.contextmanager
        def forgotten():
            # Nothing runs there on a device, so what was seen there is not warm.
            with compile_only() as nothing_ran:
                yield nothing_ran
            seen.record.eager_shapes.clear()

        device.compile_only = forgotten
        if os.environ["WARMS_UP"] == "1":
            serving.runner.warm_up(show_progress=False)
    warm = seen.record.eager_shapes
    count = int(os.environ["COUNT"])
    used, hits = shapes(serving, count)
    penalties = dict(presence_penalty=0.5, repetition_penalty=1.2)
    penalised, _ = shapes(serving, count // 2, **penalties)
print("FACTS " + json.dumps({"hits": hits, "new": sorted(used - warm), "used": sorted(used),
                            "penalties": sorted(penalised - warm)}))
"""


def facts_of(checkpoint, script: str = SCRIPT, ways: int = 5, warms_up: bool = True, count: int = 20) -> dict:
    return with_stub.facts(
        "-c",
        script,
        CHECKPOINT=str(checkpoint("q35_dense")),
        VLLM_SKIP_WARMUP="1",
        VLLM_GAUDI_COMPILE="none",
        VLLM_GAUDI_ROW_TILES="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        SEED="5",
        WAYS=str(ways),
        WARMS_UP=str(int(warms_up)),
        COUNT=str(count),
    )


@pytest.mark.slow
@pytest.mark.random
def test_no_shape_outside_the_graphs_is_new_after_warm_up(checkpoint, share):
    found = facts_of(checkpoint, count=share(20))
    assert found["hits"] >= 5
    used = {line.split()[0] for line in found["used"]}
    assert used >= {
        "vllm_gaudi.zero_rows_.default",
        "vllm_gaudi.copy_rows_.default",
        "aten.index_copy_.default",
        "aten.argmax.default",
        "aten.sort.default",
    }
    assert found["new"] == []

    # Penalties are seldom asked for and not warmed up; but their sizes are steps of buckets, too.
    rows, vocabulary, lengths = {1, 2, 4, 6}, {512, 513}, {128, 256, 512, 640}
    sizes = {int(size) for line in found["penalties"] for size in re.findall(r"\d+", line.split(maxsplit=1)[1])}
    assert sizes & lengths - vocabulary and sizes <= rows | vocabulary | lengths, sizes


@pytest.mark.slow
def test_rows_as_many_as_requests_would_be_new_shapes(checkpoint):
    """The fault switch: a batch without its buckets."""
    fault = (
        "from vllm_gaudi.v1.worker.bucketed_sampling import BucketedInputBatch\n"
        "BucketedInputBatch.rows_of = lambda self, n: n\n"
    )
    found = facts_of(checkpoint, SCRIPT.replace("FLAGS = ", fault + "FLAGS = "), ways=1, warms_up=False, count=12)
    assert "aten.argmax.default [(3, 512)]" in found["new"]
