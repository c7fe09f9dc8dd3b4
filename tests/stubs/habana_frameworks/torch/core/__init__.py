# SPDX-License-Identifier: Apache-2.0
"""``mark_step`` and the initialisation calls of ``htcore``."""

from habana_frameworks.calls import note


def mark_step() -> None:
    note("mark_step")


def hpu_initialize(model=None, mark_only_scales_as_const=False, optimizer=None, args=None) -> None:
    note("hpu_initialize")
