# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a way to run the command in this process. Owns: what the command sets is gone afterwards."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest

from vllm_gaudi import cli


@pytest.fixture(scope="session")
def quick_plans() -> None:
    """A plan collects garbage, as a start does, and none of it is what vLLM and torch imported."""
    import vllm_gaudi.cli.dry_run  # noqa: F401

    gc.freeze()


@pytest.fixture
def run(quick_plans: None, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``run(*arguments)``: exit code, stdout and stderr; what the command sets in the environment goes again."""

    def call(*arguments: object) -> tuple[int, str, str]:
        before = set(os.environ)
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        for name in set(os.environ) - before:
            del os.environ[name]
        return code, *capfd.readouterr()

    return call
