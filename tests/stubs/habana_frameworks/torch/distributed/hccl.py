# SPDX-License-Identifier: Apache-2.0
"""Importing it registers the process-group backend "hccl"; gloo underneath."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from habana_frameworks.calls import note


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    note("hccl", rank=rank, size=size)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("hccl", _create, devices=["cpu", "hpu"])
