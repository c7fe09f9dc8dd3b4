# SPDX-License-Identifier: Apache-2.0
"""What was asked of the stub, in order. The bridge itself has no such module."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    name: str
    facts: dict[str, Any]


_log: list[Call] = []

ENVIRONMENT_AT_IMPORT = dict(os.environ)
"""What the bridge could have read when it was imported; the stub's first module to be imported is this one."""


def note(name: str, **facts: Any) -> None:
    _log.append(Call(name, facts))


def reset() -> None:
    _log.clear()


def names() -> list[str]:
    return [call.name for call in _log]


def of(name: str) -> list[dict[str, Any]]:
    """The facts of every call of ``name``."""
    return [call.facts for call in _log if call.name == name]


def check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(f"stub of the bridge: {text}")
