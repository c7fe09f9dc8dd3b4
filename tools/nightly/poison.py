# SPDX-License-Identifier: Apache-2.0
"""Pools and slots that start as NaN, against the same load on zeros: nothing non-finite surfaces, no token changes.

Owns: the load (shared prefixes, a pool that is too small, blocks that held a checkpoint before they hold attention) and
the comparison. Never: poison in the run that is compared with.

Ordering rule: each run is a process of its own on a device; the poison is counted before the first request.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tools.nightly import process, report
from tools.nightly.setting import Setting, from_json

POOL_BLOCKS = 30  # less than the load's conversations need at once, so blocks change hands between the groups


def answers(setting: Mapping[str, Any], fault: str = "") -> dict[str, Any]:
    """One engine under the load, in this process and as its environment says: what was poisoned and what came out."""
    import torch

    from tests.support import faults
    from vllm_gaudi.testing.engine import engine, greedy

    it = from_json(setting)
    small = {"num_gpu_blocks_override": POOL_BLOCKS, "max_num_seqs": 4, "max_model_len": it.short_len}
    with engine(it.model, **it.engine_flags(enable_prefix_caching=True, **small)) as serving:
        caches = serving.runner.step.caches
        slots = [tensor[: caches.zero_row] for tensor in (*caches.conv_states, *caches.ssm_states)]
        poisoned = [float(tensor.isnan().float().mean()) for tensor in (*caches.k, *caches.v, *slots)]
        if fault:
            faults.put_in(serving.runner, fault)
        source = random.Random(11)
        size = serving.block_size

        def draw(blocks: float) -> list[int]:
            return [source.randrange(10, 500) for _ in range(int(blocks * size))]

        stem = draw(2.5)
        results = []
        for _ in range(4):
            texts = [stem + draw(0.7), draw(3.2), stem[: 2 * size] + draw(1.1), draw(0.4), stem + draw(1.8)]
            results += serving.generate(texts, greedy(it.num_answer_tokens))
        rows = torch.cat([result.logits for result in results if result.logits is not None])
        return {
            "poisoned": min(poisoned),
            "tokens": [result.tokens for result in results],
            "cached_tokens": [result.cached_tokens for result in results],
            "logits": rows.numel(),
            "non_finite": int((~torch.isfinite(rows)).sum()),
        }


def check(clean: Mapping[str, Any], poisoned: Mapping[str, Any]) -> None:
    """Raises AssertionError when poison surfaced, or was not there, or nothing was reused under it."""
    assert clean["poisoned"] == 0, "the run on zeros began with NaN"
    assert poisoned["poisoned"] > 0.9, f"a tensor began with {100 * poisoned['poisoned']:.0f} % NaN only"
    assert any(poisoned["cached_tokens"]), "nothing was hit under poison"
    assert poisoned["logits"] == clean["logits"] > 0, "another number of logits"
    assert clean["non_finite"] == 0, f"{clean['non_finite']} logits are not finite without any poison"
    assert poisoned["non_finite"] == 0, f"{poisoned['non_finite']} of {poisoned['logits']} logits are not finite"
    assert poisoned["tokens"] == clean["tokens"], "poison changes tokens"


def run(setting: Setting, fault: str = "") -> list[dict[str, Any]]:
    """Both runs and the check; returns the table's rows. ``fault`` is for the tests of this file."""
    found = {}
    for name, poison in (("zeros", False), ("NaN", True)):
        environment = setting.environment(warm_up=setting.is_device, poison=poison)
        arguments: dict[str, Any] = {"setting": setting.to_json(), "fault": fault}
        found[name] = process.apply(setting, "tools.nightly.poison:answers", arguments, environment, f"poison-{name}")
    rows = [
        {
            "caches start as": name,
            "least share of NaN in a tensor": it["poisoned"],
            "requests": len(it["tokens"]),
            "cached tokens": sum(it["cached_tokens"]),
            "logits": it["logits"],
            "not finite": it["non_finite"],
        }
        for name, it in found.items()
    ]
    report.write(setting.out, "poison", "The same load on caches of zeros and of NaN", rows)
    check(found["zeros"], found["NaN"])
    return rows
