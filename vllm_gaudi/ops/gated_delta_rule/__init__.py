# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet's recurrence: `reference.py` (plain torch, any host) and `hpu.py` (the same signatures for Gaudi).

Owns: the room. Never: picks a variant; `vllm_gaudi.ops.registry` does. Order: reference first.
"""
