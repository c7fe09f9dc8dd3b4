# SPDX-License-Identifier: Apache-2.0
"""What the layers of one forward need to know beyond the token rows. One object serves every layer.

Owns: the frozen record. Never: tensors of the caches (a layer has its own), or anything computed from tensors.

Ordering rule: built once by ``v1.worker.inputs`` before the forward; nobody writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_gaudi.ops.linear import GemmRows


@dataclass(frozen=True)
class PrefillAttention:
    """Each of N sequences runs ``query`` token rows that start at ``num_computed_tokens``."""

    block_table: torch.Tensor  # [N, M] int32: kernel block ids of the context, padding = the padding block
    num_computed_tokens: torch.Tensor  # [N] int32: tokens before the first row
    query_lens: torch.Tensor  # [N] int32: rows that are real; 0 for padding sequence


@dataclass(frozen=True)
class IntermediateStates:
    """Where each of N sequences leaves its GDN states at the S block boundaries that it may run over."""

    offset: torch.Tensor  # [N] int32: tokens from the chunk's first token to the first boundary, at least 1
    interval: int  # tokens between boundaries: B
    state_indices_out: torch.Tensor  # [N * S] int64: GDN state row that is written (TRASH for what is not kept)


@dataclass(frozen=True)
class DecodeAttention:
    """Each of N sequences runs one token row; the blocks of all rows stand in one flat list."""

    block_list: torch.Tensor  # [F] int32: kernel block ids, grouped by row, padding = the padding block
    block_groups: torch.Tensor  # [F] int32: the row that reads the block
    block_usage: torch.Tensor  # [F] int32: tokens of the block that the row sees, 0 for padding
    first_block: torch.Tensor  # [N] int32: index of the row's first entry in the list


@dataclass(frozen=True)
class HostHints:
    """What layers of a host may take a shorter way with: the step in plain numbers, without padding."""

    num_computed_range: tuple[int, int]  # least and largest number of tokens before a sequence's first row
    state_indices_cpu: tuple[int, ...]  # GDN state row of each real sequence


@dataclass(frozen=True)
class HPUAttentionMetadata:
    """The first ``batch * query`` token rows of the model belong to sequences; the rest are padding."""

    batch: int
    query: int
    kernel_block: int  # tokens
    slot_mapping: torch.Tensor  # [batch * query] int64: kernel block * kernel block size + offset of each row's K/V
    state_indices_in: torch.Tensor  # [batch] int64: GDN state row that is read (ZERO for padding)
    state_indices_out: torch.Tensor  # [batch] int64: GDN state row that is written (TRASH for padding)
    prefill: PrefillAttention | None = None
    decode: DecodeAttention | None = None
    intermediate: IntermediateStates | None = None
    gemm_rows: GemmRows | None = None  # rows of every matrix product; None: one product over all rows
    expert_gemm_rows: GemmRows | None = None  # the same of the experts' products
    hints: HostHints | None = None

    @property
    def num_rows(self) -> int:
        return self.batch * self.query
