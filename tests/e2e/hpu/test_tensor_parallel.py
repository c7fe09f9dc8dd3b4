# SPDX-License-Identifier: Apache-2.0
"""Two and four ranks that hash differently hand out the same slots, and a hit over them is the cold run."""

from __future__ import annotations

import pytest

from tools.nightly import ranks

pytestmark = [pytest.mark.hpu, pytest.mark.timeout(2 * 3600)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_agree_on_slots_and_a_hit_is_the_cold_run(num_ranks, setting, cannot):
    if num_ranks not in setting.ranks:
        if setting.is_device:
            cannot(f"NIGHTLY_RANKS leaves {num_ranks} ranks out")
        pytest.skip("a host tries two ranks")
    assert ranks.run(setting, num_ranks)["ranks"] == num_ranks
