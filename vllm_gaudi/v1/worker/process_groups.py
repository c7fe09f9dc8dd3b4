# SPDX-License-Identifier: Apache-2.0
"""vLLM's process groups of an engine that did not start: taken down, so that the next one makes its own.

Owns: whether the groups of this process belong to a start that has not finished.
Never: makes a group, or touches those of an engine that serves.

Ordering rule: ``begin`` before groups are made, ``finish`` when nothing of a start can fail any more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    model_parallel_is_initialized,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_is_starting = False


def begin() -> None:
    """An engine starts. What a failed start has left goes first; groups that somebody uses are shared and stay."""
    global _is_starting
    take_down()
    _is_starting = not model_parallel_is_initialized()


def finish() -> None:
    """The engine has started."""
    global _is_starting
    _is_starting = False


def take_down() -> None:
    """Remove the groups of a start that has not finished, if there is one."""
    global _is_starting
    if _is_starting:
        _is_starting = False
        destroy_model_parallel()
        destroy_distributed_environment()


def part_of_the_start(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """``method``, after whose failure there are no groups. vLLM's core may fail between two of them: see ``begin``."""

    @functools.wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except BaseException:
            take_down()
            raise

    return guarded
