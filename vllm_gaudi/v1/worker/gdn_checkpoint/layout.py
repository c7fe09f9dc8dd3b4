# SPDX-License-Identifier: Apache-2.0
"""Where the words of a GDN state stand in the K and V pages of its block. Numbers only; numpy at most.

Owns: the packing of one layer's (SSM, conv) state into one page, and the refusal of a state that does not fit.
Never: tensors, groups of requests, truncation.

A page is the K half and the V half of one block at one position. SSM heads fill the K half head by head; the heads that
are left, then the conv state, fill the V half. Where whole heads do not fit that way, the SSM state is cut at the end
of the K half. For every target model each head and the conv state cover whole token rows of the page.

Ordering rule: the layout is made once from the KV cache config and never changes; a checkpoint's meaning depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

WORD_BYTES = 4
"""Bytes of an int32 word, the unit of everything here."""


@dataclass(frozen=True)
class Segment:
    """``num_words`` words, contiguous both in a state row and in a page half."""

    state: str  # "conv" or "ssm"
    half: str  # "k" or "v"
    state_word: int  # first word in the state row
    page_word: int  # first word in the page half
    num_words: int


@dataclass(frozen=True)
class StateShape:
    """One layer's live state, TP-local. Shapes of one row; bytes per element."""

    conv: tuple[int, ...]  # [kernel - 1, conv_dim]
    conv_itemsize: int
    ssm: tuple[int, ...]  # [v heads, k dim, v dim]
    ssm_itemsize: int

    @property
    def conv_words(self) -> int:
        return _words("conv state", prod(self.conv) * self.conv_itemsize)

    @property
    def head_words(self) -> int:
        return _words("SSM head", prod(self.ssm[1:]) * self.ssm_itemsize)

    @property
    def ssm_words(self) -> int:
        return self.ssm[0] * self.head_words

    @property
    def num_bytes(self) -> int:
        return (self.conv_words + self.ssm_words) * WORD_BYTES


@dataclass(frozen=True)
class CheckpointLayout:
    """The layout of every checkpoint of an engine.

    ``page_words``: int32 words of one page half; ``group_ids``: KV cache group ids of the GDN groups; ``positions[g]``:
    the attention position that layer i of the g-th of them shares its page with.
    """

    block_size: int  # B, tokens
    num_blocks: int
    group_ids: tuple[int, ...]
    layer_indices: tuple[tuple[int, ...], ...]
    segments: tuple[Segment, ...]
    page_words: int
    whole_heads: bool
    state_bytes: int  # of one layer

    @property
    def num_layers(self) -> int:
        return sum(len(indices) for indices in self.layer_indices)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one boundary's checkpoint over all GDN layers."""
        return self.num_layers * self.state_bytes

    @property
    def blocks_per_boundary(self) -> int:
        """Blocks that one cached boundary takes: its attention block and one in every GDN group."""
        return 1 + len(self.group_ids)


def pack(state: StateShape, page_words: int) -> tuple[tuple[Segment, ...], bool]:
    """Segments of ``state`` in a page of two halves of ``page_words`` each, and whether heads stay whole.

    Raises RuntimeError when the state does not fit.
    """
    total = state.ssm_words + state.conv_words
    if total > 2 * page_words:
        raise RuntimeError(
            f"a GDN state of {total * WORD_BYTES} bytes does not fit its page of {2 * page_words * WORD_BYTES} bytes; "
            "remove --block-size so that the block size follows from the state, or pass --no-enable-prefix-caching"
        )
    in_k = min(page_words // state.head_words, state.ssm[0]) * state.head_words
    whole = state.ssm_words - in_k + state.conv_words <= page_words
    if not whole:
        in_k = min(page_words, state.ssm_words)
    in_v = state.ssm_words - in_k
    segments = [
        Segment("ssm", "k", 0, 0, in_k),
        Segment("ssm", "v", in_k, 0, in_v),
        Segment("conv", "v", 0, in_v, state.conv_words),
    ]
    return tuple(segment for segment in segments if segment.num_words), whole


def make_layout(
    *,
    state: StateShape,
    block_size: int,
    num_blocks: int,
    page_bytes: int,
    group_ids: Sequence[int],
    group_sizes: Sequence[int],
    num_attention_layers: int,
) -> CheckpointLayout:
    """The engine's layout.

    ``block_size`` tokens; ``page_bytes``: K and V of a block at one position; ``group_sizes``: GDN layers per group;
    ``num_attention_layers``: attention layers. Raises RuntimeError when state, page or positions do not fit together.
    """
    for group, size in zip(group_ids, group_sizes, strict=True):
        if size > num_attention_layers:
            raise RuntimeError(
                f"KV cache group {group} has {size} GDN layers for {num_attention_layers} attention layers: a layer "
                "would have no page; pass --no-enable-prefix-caching"
            )
    page_words = _words("page half", page_bytes // 2)
    segments, whole = pack(state, page_words)
    return CheckpointLayout(
        block_size=block_size,
        num_blocks=num_blocks,
        group_ids=tuple(group_ids),
        layer_indices=tuple(tuple(range(size)) for size in group_sizes),
        segments=segments,
        page_words=page_words,
        whole_heads=whole,
        state_bytes=state.num_bytes,
    )


def _words(what: str, num_bytes: int) -> int:
    if num_bytes % WORD_BYTES:
        raise RuntimeError(
            f"a {what} of {num_bytes} bytes is not a whole number of int32 words; pass --dtype float32 or "
            "--no-enable-prefix-caching"
        )
    return num_bytes // WORD_BYTES
