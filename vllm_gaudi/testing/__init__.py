# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints and an engine in this process: for tests, the demo, benchmarks, and to show a bug without weights.

Nothing that the plugin runs on imports it. What only contributors need is in ``tests/support`` and not in the wheel.
"""
