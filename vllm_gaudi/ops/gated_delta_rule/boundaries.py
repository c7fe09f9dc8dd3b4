# SPDX-License-Identifier: Apache-2.0
"""Which chunk ends at which block boundary: index arithmetic that both variants share.

Owns: that mapping. Never: a state. Ordering rule: none; a pure function of positions.
"""

import torch


def boundary_chunks(
    boundary_offset: torch.Tensor, boundary_interval: int, chunk_size: int, num_chunks: int
) -> torch.Tensor:
    """The chunk that boundary i of sequence n ends, int32 [N, S] in 0..num_chunks - 1, S = ceil(T / boundary_interval).

    Boundary i is the only one of its sequence in the i-th run of boundary_interval tokens, and is clamped to that run
    and to the last chunk: no value of `boundary_offset` leads out of range.

    Raises ValueError when boundary_interval is not a positive multiple of chunk_size.
    """
    if boundary_interval <= 0 or boundary_interval % chunk_size:
        raise ValueError(
            f"boundary_interval is {boundary_interval}: it must be a positive multiple of chunk_size {chunk_size}"
        )
    period = boundary_interval // chunk_size
    run = torch.arange(0, num_chunks, period, dtype=torch.int32, device=boundary_offset.device)
    offset = (boundary_offset // chunk_size - 1).clamp(0, period - 1)
    return (run + offset[:, None]).clamp(max=num_chunks - 1)
