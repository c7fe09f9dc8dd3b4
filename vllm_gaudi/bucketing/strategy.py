# SPDX-License-Identifier: Apache-2.0
"""Buckets: how far apart the sizes of one dimension stand. Standard library only.

Owns: how a list of buckets is made and how one is read from configuration.
Never: which dimensions exist (``grid``), or what a size means.
"""

from __future__ import annotations

from collections.abc import Sequence


def exponential_buckets(lowest: int, highest: int) -> tuple[int, ...]:
    """``lowest``, its doubles below ``highest``, and ``highest`` itself. Raises ValueError unless 0 < lowest."""
    if lowest <= 0:
        raise ValueError(f"a list of buckets starts above zero, not at {lowest}")
    steps = [lowest]
    while steps[-1] * 2 < highest:
        steps.append(steps[-1] * 2)
    if steps[-1] < highest:
        steps.append(highest)
    return tuple(steps)


def user_buckets(name: str, values: Sequence[int], multiple: int, highest: int) -> tuple[int, ...]:
    """A list of buckets given by the user: sorted, each a positive multiple of ``multiple``, topped up with
    ``highest``.

    Raises ValueError that names ``name``, the value and the legal values.
    """
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{name} is {values!r}; it must be a list of positive multiples of {multiple}")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value % multiple:
            raise ValueError(f"{name} has {value!r}; every step must be a positive multiple of {multiple}")
    kept = sorted({value for value in values if value < highest})
    return (*kept, highest)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def round_up_to_bucket(buckets: Sequence[int], value: int) -> int:
    """The first step that holds ``value``. Raises RuntimeError when the buckets ends below it."""
    for step in buckets:
        if step >= value:
            return step
    raise RuntimeError(f"a size of {value} is above the top of the buckets {tuple(buckets)}")
