# SPDX-License-Identifier: Apache-2.0
"""What tests, the demo and benchmarks share: tiny checkpoints and an oracle. Nothing the plugin runs on imports it."""
