# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs as a user runs it: engines in processes of their own, results, table and picture written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_compares_caching_on_with_caching_off(tmp_path):
    arguments = ["--sizes", "tiny", "--workloads", "repeat", "pressure", "--repeats", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "cache", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    workloads = found["sizes"]["tiny"]["workloads"]
    assert list(workloads) == ["repeat", "pressure"]
    for by_label in workloads.values():
        for label in ("off", "on"):
            same, compared = by_label[label]["same"]
            assert same == compared > 0, (label, same, compared)
        assert by_label["off"]["hit"] in (None, [0, 0, 0])
    assert workloads["repeat"]["on"]["hit"] == [1.0, 1.0, 1.0]
    assert workloads["repeat"]["on"]["recomputed"] == [0, 0, 0]
    assert workloads["repeat"]["on"]["ttft p50"][0] > 0
    steps, preempted = (workloads["pressure"]["on"][key][0] for key in ("steps", "preempted"))
    assert 10 <= steps / preempted <= 40, (steps, preempted)
    assert (tmp_path / "results.md").read_text().strip() in done.stdout
    assert (tmp_path / "tiny.png").stat().st_size > 10_000
    assert "Benchmark: 100%" in done.stderr
