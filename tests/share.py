# SPDX-License-Identifier: Apache-2.0
"""Which cases of a table or of a product ``make test`` tries; the others are for ``make soak``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def share_of(cases: Iterable[Any], is_in: Callable[..., bool]) -> list[Any]:
    """``cases`` for ``parametrize``: values, or tuples of them; marked soak where ``is_in(*values)`` is false."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if is_in(*values) else pytest.mark.soak))
    return found
