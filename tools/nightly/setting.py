# SPDX-License-Identifier: Apache-2.0
"""What the nightly checks run on: the model, its lengths, how much is compared, and where tables and logs go.

Owns: the table of ``NIGHTLY_`` variables, their only reader, and the choice between a Gaudi and the host. Never: a path
or a host of somebody's machine; those come from the variables. Imports neither torch nor vLLM: a process that has
touched a Gaudi keeps it, so the one that only starts others must not.

Ordering rule: a setting is made once and handed on, also to other processes; nobody reads the variables later.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_gaudi import device
from vllm_gaudi.testing import checkpoints

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / ".cache" / "nightly"
CHECKPOINTS = ROOT / ".cache" / "checkpoints"

VARIABLES = {
    "NIGHTLY_MODEL": "Checkpoint of the state, poison, rank and first-token checks; unset is a tiny random one.",
    "NIGHTLY_MAX_MODEL_LEN": "Tokens of the longest conversation with NIGHTLY_MODEL, at least 17 blocks.",
    "NIGHTLY_ENGINE_FLAGS": "JSON of further engine flags for NIGHTLY_MODEL.",
    "NIGHTLY_RANKS": "Tensor-parallel sizes that are tried; unset is 2,4, and 2 for the tiny model.",
    "NIGHTLY_COMPILES": "Fresh compilations that states are compared in.",
    "NIGHTLY_QWEN35_35B_A3B": "Qwen3.5-35B-A3B, for GSM8K.",
    "NIGHTLY_QWEN36_27B": "Qwen3.6-27B, for GSM8K.",
    "NIGHTLY_GSM8K": "Folder with GSM8K's train.jsonl and test.jsonl; unset loads the data set from the hub.",
    "NIGHTLY_REQUIRED": "1: what cannot run here fails and is not skipped.",
}


def read(name: str, default: str = "") -> str:
    """Text of a variable of ``VARIABLES``; a repository variable that does not exist arrives as an empty one."""
    if name not in VARIABLES:
        raise KeyError(name)
    return os.environ.get(name, "").strip() or default


@dataclass(frozen=True)
class Setting:
    """``block_size`` in tokens; None leaves it to the model. ``flags``: engine flags beyond those named here."""

    model: str
    dtype: str
    block_size: int | None
    max_model_len: int  # tokens
    num_blocks: int | None  # of the pool; None: what the memory holds
    compile_backend: str  # of VLLM_GAUDI_COMPILE
    is_device: bool
    ranks: tuple[int, ...]
    num_compiles: int
    longest: int  # blocks of the longest prompt
    num_answer_tokens: int = 16
    out: str = str(OUT)
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def short_len(self) -> int:
        """``max_model_len`` for a check on a pool that is too small: five blocks at least, ten at most."""
        return self.max_model_len // 3

    def engine_flags(self, **changed: Any) -> dict[str, Any]:
        """For ``vllm_gaudi.testing.engine``; a value of None leaves the choice to vLLM."""
        return {
            "dtype": self.dtype,
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 4 * (self.block_size or 1024),
            "num_gpu_blocks_override": self.num_blocks,
            **self.flags,
            **changed,
        }

    def environment(self, warm_up: bool, poison: bool = False) -> dict[str, str]:
        """Variables of the process that an engine of this setting runs in; a host compiles where warm-up is tried."""
        return {
            "VLLM_GAUDI_COMPILE": self.compile_backend if warm_up or self.is_device else "none",
            "VLLM_SKIP_WARMUP": "0" if warm_up else "1",
            "VLLM_GAUDI_POISON": "1" if poison else "0",
        }

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def from_json(values: Mapping[str, Any]) -> Setting:
    return Setting(**{**values, "ranks": tuple(values["ranks"])})


def on_host(name: str = "q35_dense", **changed: Any) -> Setting:
    """A tiny model in fp32, where a hit equals cold in every bit whatever the chunks are."""
    tiny = {
        "model": str(checkpoints.build(name, "float32", CHECKPOINTS)),
        "dtype": "float32",
        "block_size": 16,
        "max_model_len": 512,
        "num_blocks": 120,
        "compile_backend": "aot_eager",
        "is_device": False,
        "ranks": (2,),
        "num_compiles": 5,
        "longest": 16,
    }
    return Setting(**{**tiny, **changed})


def on_device() -> Setting:
    """The checkpoint that the variables name, else a tiny one in bf16."""
    model = read("NIGHTLY_MODEL")
    ranks = read("NIGHTLY_RANKS", "2,4" if model else "2")  # the tiny one has two key heads
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "compile_backend": "hpu_backend",
        "is_device": True,
        "ranks": tuple(int(text) for text in ranks.split(",")),
        "num_compiles": int(read("NIGHTLY_COMPILES", "5")),
        "longest": 16,
    }
    if not model:
        tiny = str(checkpoints.build("next_moe", "bfloat16", CHECKPOINTS))
        return Setting(model=tiny, block_size=128, max_model_len=20 * 128, num_blocks=400, **common)
    return Setting(
        model=model,
        block_size=None,
        max_model_len=int(read("NIGHTLY_MAX_MODEL_LEN", str(18 * 1152))),
        num_blocks=None,
        flags=json.loads(read("NIGHTLY_ENGINE_FLAGS", '{"language_model_only": true}')),
        **common,
    )


def of_this_machine() -> Setting:
    """A host tries the scripts and proves nothing about compilers, hence two compilations."""
    return on_device() if device.is_hpu() else on_host(num_compiles=2)
