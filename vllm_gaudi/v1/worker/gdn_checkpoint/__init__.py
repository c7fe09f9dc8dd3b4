# SPDX-License-Identifier: Apache-2.0
"""GDN checkpoints: WHICH bytes (``layout``), WHEN (``plan``), and the owner that moves them (``store``)."""
