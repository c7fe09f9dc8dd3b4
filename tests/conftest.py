# SPDX-License-Identifier: Apache-2.0
"""How much is tried: ``make test`` has a bounded share of what is random or exhaustive, ``make soak`` (``--soak``) all.

Owns: the option, the marker ``soak`` (deselected without the option), the profiles of Hypothesis, the numbers of seeds.
Never: another way to say how much; a test that draws asks ``share``, or has the profile's number of examples.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

pytest_plugins = ["tests.support.command"]

SOAK_TIMES = 25
"""How many times as much ``--soak`` tries as a share."""

# The share is the same in every run. A soak is another one each time, and prints how to repeat what it finds.
settings.register_profile("share", derandomize=True, deadline=None, database=None)
settings.register_profile("soak", max_examples=SOAK_TIMES * 100, deadline=None, database=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also what is marked soak, and many more examples and seeds")
    parser.addoption("--seeds", metavar="FIRST[-LAST]", help="the seeds that random schedules play, instead of theirs")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("soak" if config.getoption("--soak") else "share")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    left_out = [item for item in items if item.get_closest_marker("soak")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


@pytest.fixture(scope="session")
def share(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """``share(n)``: how often something random is tried: n times, in a soak ``SOAK_TIMES`` as often."""
    times = SOAK_TIMES if pytestconfig.getoption("--soak") else 1
    return lambda count: count * times


@pytest.fixture(scope="session")
def seeds(pytestconfig: pytest.Config, share: Callable[[int], int]) -> Callable[[int, int], range]:
    """``seeds(first, count)``: that many, in a soak more, from ``first`` on; or those of ``--seeds``."""
    asked = pytestconfig.getoption("--seeds")

    def chosen(first: int, count: int) -> range:
        if asked is None:
            return range(first, first + share(count))
        low, _, high = asked.partition("-")
        return range(int(low), int(high or low) + 1)

    return chosen
