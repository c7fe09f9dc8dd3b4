# SPDX-License-Identifier: Apache-2.0
"""Which boundaries are kept, from literal prompts. The ledger's own tests hold that it follows the rule."""

from __future__ import annotations

import pytest

from vllm_gaudi.v1.core.retention import is_kept, prompt_ends

B = 16


@pytest.mark.parametrize(
    ("num_prompt", "ends"), [(1, (0, 0)), (15, (0, 0)), (16, (0, 1)), (17, (1, 1)), (48, (2, 3)), (50, (3, 3))]
)
def test_a_prompt_that_ends_on_a_boundary_has_two_ends(num_prompt, ends):
    assert prompt_ends(num_prompt, B) == ends


@pytest.mark.parametrize(
    ("retention", "shared", "kept"),
    [
        (0, 0, [6]),
        (0, 2 * B, [2, 6]),
        (2 * B, 0, [2, 4, 6, 8]),
        (3 * B, B, [1, 3, 6]),
        (None, 0, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_what_is_kept_of_a_prompt_of_six_blocks_and_a_bit(retention, shared, kept):
    assert [k for k in range(1, 9) if is_kept(k, B, retention, 6 * B + 5, shared)] == kept
