# SPDX-License-Identifier: Apache-2.0
"""Runs engines under the recorder and prints what their steps asked of the device.

Owns: the load (requests of every kind, so that every phase of a step is reached) and the engine's flags for it.
Never: a judgement; that is the table's and the rules'.

Ordering rule: a process per device: with Gaudi's bridge, or its stub, in sight the plugin's variants for Gaudi run.

    python -m tests.support.record_operators CHECKPOINT ... [--tensors-on-cpu]
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

from tests.support.operator_table import EXEMPTIONS
from vllm_gaudi import device


def exercise(serving: Any, seed: int = 1) -> None:
    """Run requests of every kind through a started engine: cold, hit, over boundaries, and each way of sampling."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    source = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [source.randrange(10, 500) for _ in range(length)]

    def sampled(**kwargs: Any) -> SamplingParams:
        return SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False, **kwargs)

    size = serving.block_size
    long = prompt(4 * size + size // 2)
    greedy = sampled(temperature=0)
    serving.generate([long, prompt(5), prompt(size)], greedy)
    again = serving.generate([long + prompt(3), long[: 2 * size] + prompt(size)], greedy)
    if not all(result.cached_tokens for result in again):
        raise RuntimeError("nothing was restored: the load does not reach the store")
    serving.generate([prompt(size - 3)], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    ways = [
        sampled(temperature=1.0),
        sampled(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, seed=3),
        sampled(temperature=0, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logprobs=3),
        sampled(temperature=0, logit_bias={5: 3.0}, min_tokens=3, stop_token_ids=[9]),
        sampled(temperature=0, allowed_token_ids=[5, 6, 7]),
        sampled(temperature=0, prompt_logprobs=2),
        sampled(temperature=0, bad_words=["the"]),
        SamplingParams(temperature=0, max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[a-f]{3}")),
    ]
    prompts = [prompt(9) for _ in ways]
    serving.generate(prompts, ways)  # together, in one batch
    for way in ways:  # and each by itself, which takes vLLM's shorter paths
        serving.generate([prompt(9)], way)


FLAGS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "block_size": 128,
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 60,
    "skip_tokenizer_init": False,
    "language_model_only": True,  # for the families with vision
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


def main(arguments: list[str] | None = None) -> None:
    """Print what engines over the given checkpoints ask of the device, as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.record_operators", description=main.__doc__)
    parser.add_argument("checkpoints", nargs="+", help="directories of models")
    parser.add_argument("--tensors-on-cpu", action="store_true", help="call torch's device cpu, whatever this host is")
    parser.add_argument("--sync", action="store_true", help="without async scheduling")
    options = parser.parse_args(arguments)
    if options.tensors_on_cpu:
        device.device_type = lambda: "cpu"
    from tests.support.operator_recorder import Record, watch
    from vllm_gaudi.testing.engine import engine  # vLLM asks for the device's name when it is imported

    record = Record()
    for checkpoint in options.checkpoints:
        flags = {**FLAGS, "async_scheduling": not options.sync}
        with engine(checkpoint, **flags) as serving, watch(serving.runner, EXEMPTIONS, record):
            exercise(serving)
    found = {
        "phases": {name: sorted(phases) for name, phases in record.operators.items()},
        "dtypes": {name: sorted(dtypes) for name, dtypes in record.dtypes.items()},
        "violations": {str(violation): count for violation, count in record.violations.items()},
        "reads": record.reads,
        "steps": record.num_sampled,
        "awaited": record.num_awaited,
    }
    print("FACTS " + json.dumps(found))


if __name__ == "__main__":
    main()
