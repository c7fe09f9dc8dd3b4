# SPDX-License-Identifier: Apache-2.0
"""Hypothesis for all unit tests: the same examples in every run, no time limit per example, no files."""

from hypothesis import settings

settings.register_profile("unit", derandomize=True, deadline=None, database=None)
settings.load_profile("unit")
