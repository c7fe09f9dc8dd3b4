# SPDX-License-Identifier: Apache-2.0
"""How checkpoint bytes move: rows of int32 words, copied or zeroed in place by two custom ops.

Owns: ``torch.ops.vllm_gaudi.copy_rows_`` and ``zero_rows_``, their CPU and HPU kernels, their fake implementation.
Never: which rows (the plan says so), dtypes other than int32 (views are made once, by the store), compiled graphs:
the ops are opaque to torch.compile and run eagerly between forwards.

int32 because a copy of words is exact for every dtype and NaN payload, which arithmetic on floats is not (x * 1 quiets
a signalling NaN, x + 0 loses the sign of -0, 0 * NaN is NaN); and because Gaudi's compiler rejects writes through
views that change the dtype.

Ordering rule: all pairs of one call act as one simultaneous copy; source and destination never share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

_library = torch.library.Library("vllm_gaudi", "DEF")
_library.define("copy_rows_(Tensor(a!)[] dst, Tensor[] src, Tensor dst_rows, Tensor src_rows) -> ()")
_library.define("zero_rows_(Tensor(a!)[] dst, Tensor rows) -> ()")


def copy_rows_(
    dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], dst_rows: torch.Tensor, src_rows: torch.Tensor
) -> None:
    """``dst[i][dst_rows[n]] = src[i][src_rows[n]]`` for every i and n.

    dst  [P_i, W_i] int32 each, mutated; whole rows, or some columns, of a contiguous tensor at the start of its memory
    src  [Q_i, W_i] int32 each, sharing no memory with dst
    dst_rows, src_rows  [N] int32 on the tensors' device, in range; equal destinations only with equal sources

    Raises ValueError when counts, widths, dtypes or lengths disagree.
    """
    _check(dst, src, dst_rows, src_rows)
    torch.ops.vllm_gaudi.copy_rows_(list(dst), list(src), dst_rows, src_rows)


def zero_rows_(dst: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
    """Write zeros over rows [N] int32 of every ``dst[i]`` [P_i, W_i] int32, whatever stood there (0 * NaN is NaN)."""
    torch.ops.vllm_gaudi.zero_rows_(list(dst), rows)


def _check(
    dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], dst_rows: torch.Tensor, src_rows: torch.Tensor
) -> None:
    if len(dst) != len(src):
        raise ValueError(f"{len(dst)} destinations for {len(src)} sources")
    if dst_rows.shape != src_rows.shape or dst_rows.dim() != 1:
        raise ValueError(f"row lists of shapes {tuple(dst_rows.shape)} and {tuple(src_rows.shape)}; need two equal [N]")
    for i, (to, of) in enumerate(zip(dst, src, strict=True)):
        if to.dtype != torch.int32 or of.dtype != torch.int32 or to.shape[1] != of.shape[1]:
            raise ValueError(
                f"pair {i}: {to.dtype} rows of {to.shape[1]} words from {of.dtype} rows of {of.shape[1]}; need int32 "
                "rows of equal width"
            )
        for side in (to, of):
            if side.stride(1) != 1 or side.storage_offset() + side.shape[1] > side.stride(0):
                raise ValueError(
                    f"pair {i}: rows of {side.shape[1]} words, {side.stride()} apart from word {side.storage_offset()} "
                    "on; need whole rows, or columns, of a contiguous tensor at the start of its memory"
                )


# CPU: the rows are in host memory, so each pair is one memcpy, through numpy, whose call costs a tenth of torch's. A
# pad repeats its neighbour and is skipped.


def _copy_rows_cpu(
    dst: list[torch.Tensor], src: list[torch.Tensor], dst_rows: torch.Tensor, src_rows: torch.Tensor
) -> None:
    pairs = list(dict.fromkeys(zip(dst_rows.tolist(), src_rows.tolist(), strict=True)))
    for to, of in zip(dst, src, strict=True):
        to_words, of_words = to.numpy(), of.numpy()
        for d, s in pairs:
            to_words[d] = of_words[s]


def _zero_rows_cpu(dst: list[torch.Tensor], rows: torch.Tensor) -> None:
    distinct = list(dict.fromkeys(rows.numpy()))
    for to in dst:
        for row in distinct:
            to[row].zero_()


# HPU: rows are known to the device only; gather, then scatter, both of fixed shape. Words that are a part of their rows
# are moved as whole rows of a narrower view of the same memory: a scatter into some columns of a tensor is a write into
# a strided view, for which the bridge may copy all of it, and here it is a pool. torch scatters by int64 rows alone.


def _copy_rows_hpu(
    dst: list[torch.Tensor], src: list[torch.Tensor], dst_rows: torch.Tensor, src_rows: torch.Tensor
) -> None:
    for to, of in zip(dst, src, strict=True):
        width = gcd(to.shape[1], *(size for side in (to, of) for size in (side.stride(0), side.storage_offset())))
        to_all, to_rows = _narrow(to, dst_rows, width)
        of_all, of_rows = _narrow(of, src_rows, width)
        to_all.index_copy_(0, to_rows.long(), of_all.index_select(0, of_rows))


def _narrow(part: torch.Tensor, rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All memory around ``part`` [P, W] as rows of ``width`` words, and which of them are ``part``'s ``rows`` [N].

    The rows of ``part`` are as far apart as those of the contiguous tensor that it was cut from.
    """
    pitch, first = part.stride(0), part.storage_offset()
    whole = part.as_strided((part.shape[0] * pitch // width, width), (width, 1), 0)
    pieces = torch.arange(first // width, (first + part.shape[1]) // width, dtype=rows.dtype, device=rows.device)
    return whole, (rows[:, None] * (pitch // width) + pieces).flatten()


def _zero_rows_hpu(dst: list[torch.Tensor], rows: torch.Tensor) -> None:
    for to in dst:
        to.index_copy_(0, rows.long(), to.new_zeros((rows.shape[0], to.shape[1])))


def _copy_rows_fake(
    dst: list[torch.Tensor], src: list[torch.Tensor], dst_rows: torch.Tensor, src_rows: torch.Tensor
) -> None:
    return


def _zero_rows_fake(dst: list[torch.Tensor], rows: torch.Tensor) -> None:
    return


_library.impl("copy_rows_", _copy_rows_cpu, "CPU")
_library.impl("zero_rows_", _zero_rows_cpu, "CPU")
_library.impl("copy_rows_", _copy_rows_hpu, "HPU")
_library.impl("zero_rows_", _zero_rows_hpu, "HPU")
torch.library.register_fake("vllm_gaudi::copy_rows_", _copy_rows_fake, lib=_library)
torch.library.register_fake("vllm_gaudi::zero_rows_", _zero_rows_fake, lib=_library)
