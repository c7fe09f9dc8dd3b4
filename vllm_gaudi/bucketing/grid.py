# SPDX-License-Identifier: Apache-2.0
"""The bucket grid: every shape that the model may be given, known before the first request. Standard library only.

Owns: the buckets of the four dimensions (prefill batch, query tokens, context blocks, decode batch and blocks), and the
choice of the bucket for a given need.
Never: tensors, requests, or a shape made up at run time.

Ordering rule: the grid is complete at construction; ``warm_up`` order is largest first, so that memory peaks early.

``ExactGrid`` has the same limits and, between them, any shape: where nothing is compiled, padding costs and a new shape
does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_gaudi.bucketing.strategy import exponential_buckets, round_up, round_up_to_bucket, user_buckets

MIN_ROWS = 16
"""Fewest token rows given to a matrix product (few rows change its result on a CPU)."""

PREFILL_ROW_TILE = 64
"""Token rows of a prefill come in multiples of this many: a host's row tile, and a multiple of the GDN chunk."""

DECODE_ROW_TILE = 16

MOST_DECODE_TOKENS = 1 << 19
"""Tokens of context that the sequences of one decode forward read between them; more are cut into several forwards.

Bounds what a decode gathers, whatever the pool: with 2 heads of 256 in bfloat16 a GiB for keys and values."""

MOST_OF_A_TILE = 0.5
"""Share of a row tile up to which short products are faster: two of 16 rows take 0.7 of the time of one of 64."""

CONFIG_KEYS = (
    "prefill_batch_buckets",
    "prefill_query_buckets",
    "prefill_block_buckets",
    "decode_batch_buckets",
    "decode_block_buckets",
)
"""Keys of ``--additional-config`` that replace a list of buckets, each a list of integers."""


@dataclass(frozen=True, order=True)
class PrefillBucket:
    """``batch`` sequences x ``query`` tokens, reading ``blocks`` kernel blocks of context (own chunk included) each.

    ``boundaries``: block boundaries per sequence whose GDN states are kept beside the one at the end; 0 or as many as
    the chunk can run over.
    """

    batch: int
    query: int
    blocks: int
    boundaries: int = 0

    @property
    def rows(self) -> int:
        return self.batch * self.query


@dataclass(frozen=True, order=True)
class DecodeBucket:
    """``batch`` sequences of one token, reading ``blocks`` kernel blocks between them; ``rows`` token rows."""

    batch: int
    blocks: int

    @property
    def rows(self) -> int:
        return round_up(self.batch, MIN_ROWS)


@dataclass(frozen=True)
class RowTiles:
    """Rows of every matrix product.

    ``short_tile``: rows of the products that a prompt's last tile is cut into where at most half of it is filled; 0:
    none is cut. Only where every other chunk of a prompt fills its tiles, so that a row's product depends on where its
    prompt ends and not on how the prompt was split.
    """

    prefill: int
    decode: int
    short_tile: int = 0

    def gemm_slices(self, length: int) -> list[tuple[int, int]]:
        """First row and rows of each product of a chunk of ``length`` tokens: whole tiles, then short ones, if any."""
        rest = length % self.prefill
        if not self.short_tile or rest > MOST_OF_A_TILE * self.prefill:
            return [(row, self.prefill) for row in range(0, length, self.prefill)]
        whole = [(row, self.prefill) for row in range(0, length - rest, self.prefill)]
        return whole + [(row, self.short_tile) for row in range(length - rest, length, self.short_tile)]


def decode_batch_buckets(max_batch: int, overrides: Mapping[str, Any]) -> tuple[int, ...]:
    """Sequences of a decode forward, which are also the sizes that sampling runs in: the user's, or powers of two."""
    values = overrides.get("decode_batch_buckets")
    return (
        exponential_buckets(1, max_batch)
        if values is None
        else user_buckets("decode_batch_buckets", values, 1, max_batch)
    )


class BucketGrid:
    """The buckets of one engine.

    ``query_multiple`` tokens: a multiple of the GDN chunk and of the row tile; ``max_query`` tokens, ``max_batch``
    sequences, ``max_context`` tokens: the engine's limits; ``kernel_block`` tokens; ``block_size``: B tokens where GDN
    states are cached, 0 elsewhere; ``overrides``: additional config.
    """

    def __init__(
        self,
        *,
        query_multiple: int,
        max_query: int,
        max_batch: int,
        max_context: int,
        kernel_block: int,
        max_blocks: int,
        block_size: int = 0,
        overrides: Mapping[str, Any] | None = None,
    ):
        self._query_multiple = query_multiple
        chosen = dict(overrides or {})
        self.kernel_block = kernel_block
        self.block_size = block_size
        self._max_boundaries = (max_context - 1) // block_size if block_size else 0
        top_query = round_up(min(max_query, max_context), query_multiple)
        row_blocks = -(-max_context // kernel_block)
        all_blocks = max(row_blocks, min(row_blocks * max_batch, max_blocks, MOST_DECODE_TOKENS // kernel_block))

        def buckets(key: str, default: Sequence[int], multiple: int, highest: int) -> tuple[int, ...]:
            values = chosen.pop(key, None)
            return tuple(default) if values is None else user_buckets(key, values, multiple, highest)

        # A batch of one is always there: the longest prompts share a forward with nobody.
        batches = buckets("prefill_batch_buckets", (1, min(4, max_batch)), 1, min(4, max_batch))
        self.prefill_batches = tuple(sorted({1, *batches}))
        self.prefill_queries = buckets(
            "prefill_query_buckets", exponential_buckets(query_multiple, top_query), query_multiple, top_query
        )
        first_context = min(row_blocks, max(1, query_multiple // kernel_block))
        self.prefill_blocks = buckets(
            "prefill_block_buckets", exponential_buckets(first_context, row_blocks), 1, row_blocks
        )
        self.decode_batches = decode_batch_buckets(max_batch, chosen)
        first_blocks = min(all_blocks, max(1, MIN_ROWS // 2))
        self.decode_blocks = buckets(
            "decode_block_buckets", exponential_buckets(first_blocks, all_blocks), 1, all_blocks
        )
        self.max_prefill_rows = top_query

    def prefill(self, batch: int, query: int, context: int, keeps_intermediate: bool = False) -> PrefillBucket:
        """Bucket for ``batch`` sequences, at most ``query`` tokens each, at most ``context`` tokens read each.

        ``keeps_intermediate``: whether the state at a boundary that one of them runs over is kept.
        """
        query = self._step(self.prefill_queries, query, self._query_multiple)
        return PrefillBucket(
            batch=self._step(self.prefill_batches, batch),
            query=query,
            blocks=self._step(self.prefill_blocks, -(-context // self.kernel_block)),
            boundaries=self.boundaries_within(query) if keeps_intermediate else 0,
        )

    def boundaries_within(self, query: int) -> int:
        """Most block boundaries that a chunk of ``query`` tokens runs over, wherever it starts."""
        return min(-(-query // self.block_size), self._max_boundaries) if self.block_size else 0

    @cached_property
    def num_staging(self) -> int:
        """State rows that the boundaries of one forward may need: of the listed buckets, also of an ``ExactGrid``."""
        return max(
            batch * self.boundaries_within(query)
            for batch in self.prefill_batches
            for query in self.prefill_queries
            if self._fits_as_listed(batch, query)
        )

    def decode(self, batch: int, blocks: int) -> DecodeBucket:
        """Bucket for ``batch`` one-token sequences that read ``blocks`` kernel blocks in all."""
        return DecodeBucket(
            batch=self._step(self.decode_batches, batch),
            blocks=self._step(self.decode_blocks, blocks),
        )

    def _step(self, buckets: Sequence[int], value: int, multiple: int = 1) -> int:
        """The size of the buckets that holds ``value``; it is a multiple of ``multiple``."""
        return round_up_to_bucket(buckets, value)

    def fits_one_forward(self, batch: int, query: int, shortest: int | None = None) -> bool:
        """Whether ``batch`` sequences of ``shortest`` to ``query`` tokens share a prefill forward."""
        return self._fits_as_listed(batch, query)

    def _fits_as_listed(self, batch: int, query: int) -> bool:
        if batch > self.prefill_batches[-1]:
            return False
        padded = round_up_to_bucket(self.prefill_batches, batch) * round_up_to_bucket(self.prefill_queries, query)
        return batch == 1 or padded <= self.max_prefill_rows

    def all_prefill(self) -> list[PrefillBucket]:
        """Every prefill bucket that a step can ask for, largest first."""
        found = set()
        for query in self.prefill_queries:
            shorter = [step for step in self.prefill_queries if step < query]
            least_query = shorter[-1] + 1 if shorter else 1
            least_blocks = round_up_to_bucket(self.prefill_blocks, -(-least_query // self.kernel_block))
            for batch in self.prefill_batches:
                if not self._fits_as_listed(batch, query):
                    continue
                found |= {
                    PrefillBucket(batch, query, blocks, boundaries)
                    for blocks in self.prefill_blocks
                    if blocks >= least_blocks
                    for boundaries in (0, self.boundaries_within(query))
                }
        # Of equally many rows those whose sequences read more context between them need more memory.
        return sorted(found, key=lambda b: (b.rows, b.batch * b.blocks, b.blocks, b.boundaries), reverse=True)

    def all_decode(self) -> list[DecodeBucket]:
        """Every decode bucket that a step can ask for, largest first."""
        row_blocks = self.prefill_blocks[-1]
        found = set()
        for batch in self.decode_batches:
            smaller = [step for step in self.decode_batches if step < batch]
            least = round_up_to_bucket(
                self.decode_blocks, min(smaller[-1] + 1 if smaller else 1, self.decode_blocks[-1])
            )
            most = round_up_to_bucket(self.decode_blocks, min(batch * row_blocks, self.decode_blocks[-1]))
            found |= {DecodeBucket(batch, blocks) for blocks in self.decode_blocks if least <= blocks <= most}
        return sorted(found, key=lambda bucket: (bucket.batch, bucket.blocks), reverse=True)


class ExactGrid(BucketGrid):
    """The grid of a process that compiles nothing: a shape is what is needed, up to the largest bucket."""

    def _step(self, buckets: Sequence[int], value: int, multiple: int = 1) -> int:
        """``value``, rounded up to ``multiple`` where the buckets' top allows it."""
        return min(super()._step(buckets, value), round_up(value, multiple))

    def fits_one_forward(self, batch: int, query: int, shortest: int | None = None) -> bool:
        """As in a ``BucketGrid``, and none of them is padded for the others."""
        if batch == 1 or batch > self.prefill_batches[-1]:
            return self._fits_as_listed(batch, query)
        query = round_up(query, self._query_multiple)
        is_even = shortest is None or round_up(shortest, self._query_multiple) == query
        staging = batch * self.boundaries_within(query)
        return is_even and batch * query <= self.max_prefill_rows and staging <= self.num_staging
