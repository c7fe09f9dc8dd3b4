# SPDX-License-Identifier: Apache-2.0
"""Samples of every metric that the dashboard shows, taken while chats and agents run on a tiny model.

    python -m benchmarks panels [--out .cache/bench/panels.json] [--picture docs/assets/dashboard.png]

Owns: the load, and when samples are taken. ``tools/dashboard.py`` draws the panels from them, as Grafana would from a
server's. Never asserts a number.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import workloads
from benchmarks.engines import CHECKPOINTS, flags_for, use_environment_here
from benchmarks.report import OUT, relative
from benchmarks.worker import Player
from tools import dashboard

B = 32
EVERY = 1.0
"""Seconds between samples."""
LABELS = {curve.metric: curve.by for panel in dashboard.PANELS for curve in panel.curves}


def sample(at: float) -> dict[str, Any]:
    """Every metric of the dashboard as the process's registry has it now."""
    from prometheus_client import REGISTRY

    wanted = dashboard.metrics()
    values: dict[str, dict[str, float]] = {}
    for family in REGISTRY.collect():
        for it in family.samples:
            if it.name in wanted:
                label = it.labels.get(LABELS.get(it.name) or "", "")
                found = values.setdefault(it.name, {})
                found[label] = found.get(label, 0.0) + it.value
    return {"at": at, "values": values}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=OUT / "panels.json")
    parser.add_argument("--picture", type=Path, help="draw the panels into this file")


def run(options: argparse.Namespace) -> None:
    use_environment_here()
    from vllm_gaudi.testing import checkpoints
    from vllm_gaudi.v1.metrics import GaudiStatLogger

    load = [(name, workloads.make(name, B, 512, 0, 1.0)) for name in ("chat", "agent", "pressure")]
    player = Player(
        {
            "model": str(checkpoints.build("q35_dense", "float32", CHECKPOINTS)),
            "dtype": "float32",
            "enable_prefix_caching": True,
            "block_size": B,
            "disable_log_stats": False,
            **flags_for([sessions for _, sessions in load], B, pool=0.6, budget=4, max_num_seqs=8),
        },
        [GaudiStatLogger],  # vLLM loads a plugin's loggers for its server alone
    )
    samples: list[Mapping[str, Any]] = []
    began = last = time.perf_counter()
    with tqdm(load, desc="Playing", unit="workload") as progress:
        for name, sessions in progress:
            progress.set_postfix_str(name)

            def each_step() -> None:
                nonlocal last
                now = time.perf_counter()
                if now - last >= EVERY or not samples:
                    samples.append(sample(now - began))
                    last = now

            player.play(sessions, each_step)
    samples.append(sample(time.perf_counter() - began))
    player.close()
    says = f"A tiny model, B = {B}: 12 chats, then 6 agents in a pool for 60 %, then 16 long answers at once"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"says": says, "samples": samples}) + "\n")
    print(relative(options.out))
    if options.picture:
        dashboard.draw(samples, options.picture, says)
        print(options.picture)
