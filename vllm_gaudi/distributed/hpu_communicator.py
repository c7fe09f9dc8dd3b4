# SPDX-License-Identifier: Apache-2.0
"""Collectives between tensor-parallel ranks: HCCL on Gaudi, gloo on the host.

Owns: the communicator class that vLLM builds for a group of ranks.
Never: process groups (vLLM makes them), which tensors are exchanged, or a mark of a step: that ends a graph in lazy
mode, which is refused; in eager mode a collective is an operator in stream order like any other, and inside a compiled
layer a call to Python would break the graph.

Ordering rule: none of its own; every rank calls the same collectives in the same order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class HpuCommunicator(DeviceCommunicatorBase):
    """``gather``, ``broadcast``, ``reduce_scatter``, ``send`` and ``recv`` are vLLM's own, on the device's group."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place: ``input_`` is mutated and returned."""
        dist.all_reduce(input_, group=self.device_group)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors of one shape side by side along ``dim``; a new tensor.

        Gathered end to end along the first dimension and put in place afterwards: a gather that stacks does not get
        through torch.compile. HCCL moves the first dimension only.
        """
        dim %= input_.dim()
        first = input_.movedim(dim, 0).contiguous()
        gathered = first.new_empty((self.world_size * first.shape[0], *first.shape[1:]))
        dist.all_gather_into_tensor(gathered, first, group=self.device_group)
        return gathered.movedim(0, dim).contiguous()
