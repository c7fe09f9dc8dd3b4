# SPDX-License-Identifier: Apache-2.0
"""A hit's GDN state against the cold run's, bit by bit, after warm-up, in several fresh compilations.

Owns: which rows of which tensors are compared and when. A compiled graph that drops or mis-binds a state write passes
every eager test and every look at tokens that happen to agree; it does so in some compilations and not in others.
Never: tokens as the proof.

Ordering rule: two cold runs are compared first (a device that does not repeat itself proves nothing), then that the
cache was hit, then the states.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.nightly import process, report
from tools.nightly.setting import Setting, from_json

LENGTHS = (3.3, 2.0, 1.6)  # of prompts, in blocks; the second one ends on a boundary
# Where chunks differ in size, a device's sums may. A state of another boundary, row or group is off by its own size
# (1.0 and more with every fault switch); what rounding makes of bf16 stays below half of that.
WIDE_TOLERANCE = 0.5


def compare(setting: Mapping[str, Any], fault: str = "") -> dict[str, Any]:
    """One engine, in this process; ``fault``: a fault switch, put in before the requests.

    ``narrow``: a step holds one block, so cold and hit end in the same chunks. ``wide``: a step holds several blocks,
    and states of boundaries inside a forward come out of staging rows.
    """
    from tests.support import faults
    from vllm_gaudi.testing.engine import engine

    it = from_json(setting)
    flags = it.engine_flags(enable_prefix_caching=True, max_num_seqs=4, max_model_len=it.short_len)
    with engine(it.model, **flags) as serving:
        if fault:
            faults.put_in(serving.runner, fault)
        whole_step = serving.scheduler.max_num_scheduled_tokens
        source = random.Random(7)
        found: dict[str, Any] = {"block_size": serving.block_size, "backend": serving.runner.graphs.backend or "none"}
        # In the wide run one token: where sums may differ, so may the tokens that later states are made of.
        for name, step, num_tokens in (("narrow", serving.block_size, it.num_answer_tokens), ("wide", whole_step, 1)):
            serving.scheduler.max_num_scheduled_tokens = step
            texts = [[source.randrange(10, 500) for _ in range(int(n * serving.block_size))] for n in LENGTHS]
            found[name] = _compare_runs(serving, texts, num_tokens, name)
        found["late_shapes"] = len(serving.runner.graphs.unwarmed_shapes)
    return found


def _compare_runs(serving: Any, texts: list[list[int]], num_tokens: int, salt: str) -> dict[str, Any]:
    runs = [_run(serving, texts, num_tokens, **extra) for extra in ({"cache_salt": salt}, {}, {})]
    (cold, cold_states), (_, filling_states), (hit, hit_states) = runs
    return {
        "cached_tokens": [result.cached_tokens for result in hit],
        "cold_cached_tokens": [result.cached_tokens for result in cold],
        "wanted_tokens": [(len(text) - 1) // serving.block_size * serving.block_size for text in texts],
        "same_tokens": [result.tokens for result in cold] == [result.tokens for result in hit],
        "cold_repeats": _differences(cold_states, filling_states)["num_bytes"] == 0,
        "compared_bytes": sum(part.numel() for parts in cold_states for part, _ in parts),
        "digest": hashlib.sha256(b"".join(_bytes(parts) for parts in cold_states)).hexdigest()[:16],
        **_differences(cold_states, hit_states),
    }


def _run(serving: Any, texts: list[list[int]], num_tokens: int, **extra: Any) -> tuple[list[Any], list[Any]]:
    """Results, and per text the bytes and values of its conv and SSM rows of every layer as they are at its end."""
    from vllm_gaudi.testing.engine import greedy

    names = [serving.add(text, greedy(num_tokens), **extra) for text in texts]
    states: dict[str, Any] = {}
    while serving.scheduler.has_unfinished_requests():
        for name in serving.step():  # its slot is given back with the next step
            states[name] = _rows(serving.runner, texts[names.index(name)])
    return [serving.take(name) for name in names], [states[name] for name in names]


def _rows(runner: Any, text: list[int]) -> list[Any]:
    import torch

    (slot,) = [state.state_slot for state in runner.step.requests._requests.values() if state.prompt == text]
    rows = [tensor[slot].clone().cpu() for tensor in (*runner.step.caches.conv_states, *runner.step.caches.ssm_states)]
    return [(row.view(torch.uint8), row.float()) for row in rows]


def _differences(one: list[Any], other: list[Any]) -> dict[str, Any]:
    """Bytes that differ, and the largest difference of a row relative to the row's largest value."""
    num_bytes, largest = 0, 0.0
    for parts, others in zip(one, other, strict=True):
        for (a_bytes, a), (b_bytes, b) in zip(parts, others, strict=True):
            num_bytes += int((a_bytes != b_bytes).sum())
            off = float((a - b).abs().max() / a.abs().max().clamp(min=1e-6))
            largest = max(largest, off if off == off else float("inf"))
    return {"num_bytes": num_bytes, "largest": largest}


def _bytes(parts: list[Any]) -> bytes:
    return b"".join(part.numpy().tobytes() for part, _ in parts)


def check(found: Mapping[str, Any], is_device: bool) -> None:
    """Raises AssertionError when a state is not the cold one, or when nothing was proved."""
    for name in ("narrow", "wide"):
        run = found[name]
        assert not any(run["cold_cached_tokens"]), f"{name}: a cold run has reused {run['cold_cached_tokens']} tokens"
        assert run["cached_tokens"] == run["wanted_tokens"] and all(run["cached_tokens"]), f"{name}: no hit: {run}"
        assert run["compared_bytes"] > 0, f"{name}: nothing was compared"
        assert run["cold_repeats"], f"{name}: two cold runs end in different states"
        if name == "narrow" or not is_device:
            assert run["num_bytes"] == 0, f"{name}: {run['num_bytes']} bytes of the hit's state are not the cold run's"
            assert run["same_tokens"], f"{name}: other tokens"
        assert run["largest"] <= WIDE_TOLERANCE, f"{name}: a state is off by {run['largest']:.2g} of its size"
    assert found["late_shapes"] == 0, "a shape was not warmed up"


def run(setting: Setting) -> list[dict[str, Any]]:
    """``num_compiles`` fresh compilations, each in a new process with empty caches. Returns the table's rows."""
    rows, all_found = [], []
    for n in range(setting.num_compiles):
        caches = Path(setting.out) / "compile-caches" / str(n)
        shutil.rmtree(caches, ignore_errors=True)
        environment = {**setting.environment(warm_up=True, poison=True), **process.fresh_caches(caches)}
        log = Path(setting.out) / "logs" / f"state-{n}.log"
        found = process.call("tools.nightly.state:compare", {"setting": setting.to_json()}, environment, log)
        shutil.rmtree(caches, ignore_errors=True)
        all_found.append(found)
        rows += [
            {
                "compile": n + 1,
                "backend": found["backend"],
                "step": name,
                "cached tokens": "+".join(map(str, found[name]["cached_tokens"])),
                "bytes compared": found[name]["compared_bytes"],
                "bytes that differ": found[name]["num_bytes"],
                "largest difference": found[name]["largest"],
                "cold state": found[name]["digest"],
            }
            for name in ("narrow", "wide")
        ]
        report.write(setting.out, "state", "GDN state after a hit against the cold run", rows)
    for found in all_found:
        check(found, setting.is_device)
    return rows
