# SPDX-License-Identifier: Apache-2.0
"""What the nightly checks run on. On a Gaudi the ``NIGHTLY_`` variables name it; on a host it is a tiny model.

Each file is to be run by a pytest process of its own: a process that has touched a Gaudi keeps it until it ends.
"""

from __future__ import annotations

import pytest

from tools.nightly import setting as settings


@pytest.fixture(scope="session")
def setting() -> settings.Setting:
    return settings.of_this_machine()


@pytest.fixture(scope="session")
def cannot():
    """``cannot(why)``: skips, or fails where NIGHTLY_REQUIRED says that nothing may be left out."""

    def say(why: str) -> None:
        if settings.read("NIGHTLY_REQUIRED") == "1":
            pytest.fail(why)
        pytest.skip(why)

    return say
