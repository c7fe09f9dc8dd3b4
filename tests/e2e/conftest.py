# SPDX-License-Identifier: Apache-2.0
"""What every end-to-end test stands on: tiny checkpoints, poisoned caches, prompts of given lengths."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

# Before vLLM is imported anywhere: pages and slots start as NaN, so that whatever a step forgets to zero surfaces.
os.environ.setdefault("VLLM_GAUDI_POISON", "1")
os.environ.setdefault("VLLM_SKIP_WARMUP", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "checkpoints"


@pytest.fixture(scope="session")
def checkpoint() -> Callable[..., Path]:
    """``checkpoint(name, dtype)``: the directory of a tiny checkpoint, made on first use."""
    from vllm_gaudi.testing import checkpoints

    def build(name: str, dtype: str = "float32") -> Path:
        return checkpoints.build(name, dtype, CACHE)

    return build


@pytest.fixture
def prompt() -> Callable[[int], list[int]]:
    """``prompt(n)``: n random token ids, the same in every run, different at every call of a test."""
    source = random.Random(20)

    def draw(length: int) -> list[int]:
        return [source.randrange(10, 500) for _ in range(length)]

    return draw
