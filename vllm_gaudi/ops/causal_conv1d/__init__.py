# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution in front of Gated DeltaNet: `reference.py` (plain torch) and `hpu.py` (same signatures).

Owns: the room. Never: picks a variant; `vllm_gaudi.ops.registry` does. Order: reference first.
"""
