# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are saved and restored at a share of what the device copies plainly; the table says at which."""

from __future__ import annotations

import pytest

from tools.nightly import bandwidth

pytestmark = [pytest.mark.hpu, pytest.mark.timeout(3600)]


def test_checkpoints_move_at_a_share_of_a_plain_copy(setting):
    assert len(bandwidth.run(setting)) >= 12
