# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing and the experts' MLPs.

Owns: the contract. `reference.py` is the definition, row by row; `cpu.py` and `hpu.py` are what runs, and `routing.py`
runs on both.
Never: picks a variant; `vllm_gaudi.ops.registry` does. Drops a token.
Ordering rule: weights are prepared once, when they are loaded, by the variant whose `experts` is called with them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Prepared = Sequence[Any]
"""Tensors in a form that is a variant's own."""


class PrepareExperts(Protocol):
    """The weights in the form that `experts` of the same variant takes; called once, when they are loaded.

    w13 [E, 2I, H], gate rows then up rows; w2 [E, H, I]. Nothing is copied: what is returned shares their memory, so a
    write into them is seen, and another tensor in their place is not.
    """

    def __call__(self, w13: torch.Tensor, w2: torch.Tensor) -> Prepared: ...


class Experts(Protocol):
    """sum over a row's chosen experts e of weight_e * W2_e (SiLU(gate_e x) * (up_e x)).

    x [T, H]; prepared: by `prepare_experts` of the same variant; weights [T, k] float32; ids [T, k] int32 in 0..E-1,
    distinct within a row. Returns [T, H] in x.dtype. Nothing is mutated.
    """

    def __call__(
        self,
        x: torch.Tensor,
        prepared: Prepared,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor: ...
