# SPDX-License-Identifier: Apache-2.0
"""Pages and slots that start as NaN: nothing that is not finite comes out, and tokens are as without."""

from __future__ import annotations

import pytest

from tools.nightly import poison

pytestmark = [pytest.mark.hpu, pytest.mark.timeout(2 * 3600)]


def test_poison_does_not_surface(setting):
    assert len(poison.run(setting)) == 2
