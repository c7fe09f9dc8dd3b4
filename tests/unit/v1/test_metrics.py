# SPDX-License-Identifier: Apache-2.0
"""The plugin's metrics in Prometheus: what a step counted is added, per engine, in one server process or in several.

A server process is a fork of one that has prometheus_client's files on and stubs of vLLM's modules: vLLM takes seconds
to import and the stat logger uses nothing of it but the base class.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from vllm_gaudi.v1.core.sched.cache_stats import BYTES, EVICTED, MISSES, REASONS, RESTORED, SAVED
from vllm_gaudi.v1.metrics import SLOTS, GaudiStatLogger

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it

ROOT = Path(__file__).resolve().parents[3]


def config(name: str) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=name), scheduler_config=SimpleNamespace(max_num_seqs=8)
    )


def sample(model: str, metric: str, engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"{metric}_total", {"model_name": model, "engine": str(engine), **labels})


def counted(**counts: int) -> Any:
    return SimpleNamespace(waiting_lora_adapters=counts)


def test_each_step_s_counts_are_added():
    logger = GaudiStatLogger(config("steps"))
    for metric in (SAVED, RESTORED, BYTES):
        assert sample("steps", metric) == 0, "a counter is there before anything has happened"
    assert all(sample("steps", MISSES, reason=reason) == 0 for reason in REASONS)
    for saved in (2, 3):
        step = {SAVED: saved, BYTES: 100 * saved, f"{MISSES}:{EVICTED}": 1, "an adapter of vLLM": 7}
        logger.record(counted(**step), None)
    logger.record(counted(), None)
    logger.record(None, None)
    assert [sample("steps", metric) for metric in (SAVED, RESTORED, BYTES)] == [5, 0, 500]
    missed = {reason: sample("steps", MISSES, reason=reason) for reason in REASONS}
    assert missed == {**dict.fromkeys(REASONS, 0), EVICTED: 2}


def test_a_second_engine_of_the_process_leaves_the_first_one_s_counts_alone():
    first = GaudiStatLogger(config("first"), 0)
    first.record(counted(**{SAVED: 2}), None)
    others = [GaudiStatLogger(config("first"), 1), GaudiStatLogger(config("second"), 0)]
    first.record(counted(**{SAVED: 3}), None)
    others[0].record(counted(**{SAVED: 10}), None)
    found = sample("first", SAVED, 0), sample("first", SAVED, 1), sample("second", SAVED, 0)
    assert found == (5, 10, 0)
    slots = [REGISTRY.get_sample_value(SLOTS, {"model_name": "first", "engine": str(n)}) for n in range(2)]
    assert slots == [8, 8]


SERVERS = """
import json, os, sys, types
from types import SimpleNamespace

for name in ("vllm", "vllm.config", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["vllm.config"].VllmConfig = sys.modules["vllm.v1.metrics.loggers"].StatLoggerBase = object
from prometheus_client import CollectorRegistry, multiprocess
from vllm_gaudi.v1.core.sched.cache_stats import SAVED
from vllm_gaudi.v1.metrics import GaudiStatLogger

config = SimpleNamespace(
    model_config=SimpleNamespace(served_model_name="tiny"), scheduler_config=SimpleNamespace(max_num_seqs=8)
)
for saved in (2, 3):
    if os.fork() == 0:
        GaudiStatLogger(config).record(SimpleNamespace(waiting_lora_adapters={SAVED: saved}), None)
        os._exit(0)
    assert os.wait()[1] == 0
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(json.dumps([[one.name, one.labels, one.value] for metric in registry.collect() for one in metric.samples]))
"""


def test_two_server_processes_tell_one_engine_s_metrics_once(tmp_path):
    """As with --api-server-count 2: counters are sums, and a gauge has no `pid` label and one sample."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SERVERS], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    labels = {"model_name": "tiny", "engine": "0"}
    samples = json.loads(done.stdout)
    assert [one for one in samples if one[0] == SLOTS] == [[SLOTS, labels, 8]]
    assert [one for one in samples if one[0] == f"{SAVED}_total"] == [[f"{SAVED}_total", labels, 5]]
    names = [json.dumps(one[:2], sort_keys=True) for one in samples]
    assert len(set(names)) == len(names)


# What docs/metrics.md says of --disable-log-stats


def test_vllm_takes_an_installed_stat_logger_for_the_wish_to_have_statistics():
    """Once it does not, the documentation may say that the flag turns the plugin's metrics off."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    vllm = Path(spec.origin).parent
    assert "self.log_stats = log_stats or has_custom_loggers" in (vllm / "v1/engine/async_llm.py").read_text()
    server = (vllm / "entrypoints/cli/serve.py").read_text()
    several = server[server.index("def run_multi_api_server") :]
    assert "log_stats = not engine_args.disable_log_stats" in several, "the engine of several servers obeys the flag"


def test_the_documented_list_of_plugins_leaves_out_the_stat_logger_alone():
    listed = re.findall(r"VLLM_PLUGINS=(\S+)", (ROOT / "docs" / "metrics.md").read_text())
    groups = re.findall(
        r'^\[project.entry-points."(vllm\.\w+)"\]\n((?:[^[#\n].*\n)+)', (ROOT / "pyproject.toml").read_text(), re.M
    )
    names = {group: re.findall(r'^"?([\w.]+)"? =', lines, re.M) for group, lines in groups}
    assert names.pop("vllm.stat_logger_plugins") == ["vllm_gaudi"]
    assert [one.split(",") for one in listed] == [[name for group in names.values() for name in group]]
