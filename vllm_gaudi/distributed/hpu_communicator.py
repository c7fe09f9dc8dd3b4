# SPDX-License-Identifier: Apache-2.0
"""Collectives between tensor-parallel ranks: HCCL on Gaudi, gloo on the host.

Owns: the communicator class that vLLM builds for a group of ranks.
Never: process groups (vLLM makes them) or which tensors are exchanged.
"""

from __future__ import annotations

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class HpuCommunicator(DeviceCommunicatorBase):
    """vLLM's base class: it calls torch.distributed on the group's device backend, which both devices implement."""
