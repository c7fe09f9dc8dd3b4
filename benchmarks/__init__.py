# SPDX-License-Identifier: Apache-2.0
"""Measurements, each beside something else in the same run. None of them asserts a number."""
