# SPDX-License-Identifier: Apache-2.0
"""Sizes as log lines and the command line print them."""

from __future__ import annotations

import pytest

from vllm_gaudi.units import GIB, LEAST_IN_GIB, MIB, format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (0, "0.00 MiB"),
        (38_486_016, "36.70 MiB"),
        (LEAST_IN_GIB - MIB, "191.00 MiB"),
        (LEAST_IN_GIB, "0.19 GiB"),
        (GIB // 4, "0.25 GiB"),
        (117_760_000_000, "109.67 GiB"),
        (4096 * GIB, "4096.00 GiB"),
        (-3 * GIB, "-3.00 GiB"),
    ],
)
def test_a_size_has_two_decimals_of_the_unit_that_tells_something(num_bytes, said):
    assert format_bytes(num_bytes) == said
