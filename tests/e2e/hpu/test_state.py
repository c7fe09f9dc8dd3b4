# SPDX-License-Identifier: Apache-2.0
"""Five fresh compilations: after warm-up, every GDN slot holds the same bits after a hit as after the cold run."""

from __future__ import annotations

import pytest

from tools.nightly import state

pytestmark = [pytest.mark.hpu, pytest.mark.timeout(4 * 3600)]


def test_a_hits_state_is_the_cold_runs_in_every_fresh_compilation(setting):
    rows = state.run(setting)
    assert len(rows) == 2 * setting.num_compiles
    if setting.is_device:
        assert {row["backend"] for row in rows} == {"hpu_backend"}
