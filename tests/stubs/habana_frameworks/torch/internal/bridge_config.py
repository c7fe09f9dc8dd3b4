# SPDX-License-Identifier: Apache-2.0
"""Flags of the bridge that are set for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from habana_frameworks.calls import check, note

_KNOWN: dict[str, Any] = {"PT_COMPILE_ONLY_MODE": False}


@contextlib.contextmanager
def env_setting(name: str, value: Any) -> Iterator[None]:
    check(name in _KNOWN, f"no flag {name}")
    check(type(value) is type(_KNOWN[name]), f"{name} is given {value!r}")
    before, _KNOWN[name] = _KNOWN[name], value
    note("env_setting", flag=name, value=value)
    try:
        yield
    finally:
        _KNOWN[name] = before
        note("env_setting", flag=name, value=before)


def is_compile_only() -> bool:
    """Of the stub, not of the bridge."""
    return _KNOWN["PT_COMPILE_ONLY_MODE"]
