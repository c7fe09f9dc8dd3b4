# SPDX-License-Identifier: Apache-2.0
"""The time to the first token, cold and out of the cache, over 1 to 16 blocks: a table, without a limit."""

from __future__ import annotations

import pytest

from tools.nightly import ttft

pytestmark = [pytest.mark.hpu, pytest.mark.timeout(3 * 3600)]


def test_every_whole_block_of_a_prompt_is_hit_and_the_times_are_written_down(setting):
    rows = ttft.run(setting)
    assert [row["blocks"] for row in rows] == list(range(1, setting.longest + 1))
