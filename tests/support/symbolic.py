# SPDX-License-Identifier: Apache-2.0
"""A model whose state is a hash of what it has read, in place of the real one, on the real engine and runner.

Owns: ``SymbolicGraphs``, which stands where the runner has its graphs, and the checks of slots, pages and checkpoints.
Never: scheduling, plans, stores, block tables: those are the ones under test.

The state of a sequence after t tokens is a 64-bit rolling hash of (position, token). Every word of a layer's slot row
is a function of hash, layer and word, so a copy of a wrong row, layer or part of a row is seen. K and V rows of a token
hold the hash, the token and the position, so that what attention would read can be chained. The next token is a
function of the hash: a prompt alone determines everything that must ever stand anywhere.

Ordering rule: ``check_*`` are called between engine steps, when every scheduled step has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_gaudi.v1.worker.graphs import GraphRunner
from vllm_gaudi.v1.worker.inputs import ModelInputs

_MASK = (1 << 64) - 1
_STEP, _TOKEN, _POSITION = 6364136223846793005, 11400714819323198485, 1442695040888963407
VOCABULARY = 512
FIRST_TOKEN = 10
"""Smallest token that is ever sampled, so that no end token is."""


def advance(state: int, position: int, token: int) -> int:
    """Hash after reading ``token`` at ``position``."""
    return (state * _STEP + token * _TOKEN + (position + 1) * _POSITION) & _MASK


def next_token(state: int) -> int:
    """The token that the model answers with after ``state``."""
    return FIRST_TOKEN + (state >> 17) % (VOCABULARY - FIRST_TOKEN - 1)


def hashes_of(tokens: Sequence[int]) -> list[int]:
    """Hash after 0, 1, .. len(tokens) tokens."""
    states = [0]
    for position, token in enumerate(tokens):
        states.append(advance(states[-1], position, token))
    return states


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens that a request of ``prompt`` must produce."""
    state = hashes_of(prompt)[-1]
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(next_token(state))
        state = advance(state, len(prompt) + len(tokens) - 1, tokens[-1])
    return tokens


class SymbolicGraphs(GraphRunner):
    """Takes the place of the step's graphs; ``install`` puts it there."""

    def __init__(self, runner: Any):
        super().__init__(runner.model, runner.vllm_config)
        self._caches = runner.step.caches
        self._layers = [
            [tensor.view(tensor.shape[0], -1).view(torch.int32).numpy() for tensor in pair]
            for pair in zip(self._caches.conv_states, self._caches.ssm_states, strict=True)
        ]
        self._offsets = [
            [self._pattern_offsets(layer, kind, words.shape[1]) for kind, words in enumerate(pair)]
            for layer, pair in enumerate(self._layers)
        ]
        self._token_rows = [t.flatten(1).view(torch.int32).numpy() for t in (*self._caches.k, *self._caches.v)]
        self._kernel_block = self._caches.geometry.kernel_block
        self.num_checked = 0

    @classmethod
    def install(cls, runner: Any) -> SymbolicGraphs:
        graphs = cls(runner)
        runner.step.graphs = graphs
        return graphs

    # The model

    def run(self, inputs: ModelInputs) -> torch.Tensor:
        """Advance every sequence of the forward; returns rows that ``logits`` understands, [rows, 1] int64."""
        attn = inputs.attn
        ids = inputs.input_ids.numpy()
        positions = (inputs.positions if inputs.positions.dim() == 1 else inputs.positions[0]).numpy()
        hidden = np.zeros(len(ids), np.int64)
        read, write = attn.state_indices_in.numpy(), attn.state_indices_out.numpy()
        slots = attn.slot_mapping.numpy()
        lengths = attn.prefill.query_lens.numpy() if attn.prefill is not None else np.ones(attn.batch, np.int32)
        for n in range(len(inputs.members)):
            first = n * attn.query
            start = int(positions[first])
            state = self.state_of(int(read[n]))
            self._check_context(inputs, n, start, state)
            for row in range(first, first + int(lengths[n])):
                state = advance(state, int(positions[row]), int(ids[row]))
                hidden[row] = np.uint64(state).astype(np.int64)
                self._write_token(int(slots[row]), state, int(ids[row]), int(positions[row]))
                self._stage(inputs, n, row - first + 1, state)
            self._write_state(int(write[n]), state)
        return torch.from_numpy(hidden[:, None])

    def _stage(self, inputs: ModelInputs, n: int, num_tokens: int, state: int) -> None:
        """Leave the state after ``num_tokens`` of the chunk of sequence ``n`` where a boundary's state belongs."""
        intermediate = inputs.attn.intermediate
        if intermediate is None:
            return
        past_first = num_tokens - int(intermediate.offset[n])
        if past_first >= 0 and past_first % intermediate.interval == 0:
            rows = intermediate.state_indices_out.view(inputs.attn.batch, -1)
            self._write_state(int(rows[n, past_first // intermediate.interval]), state)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        states = hidden.index_select(0, rows)[:, 0].numpy().astype(np.uint64)
        out = torch.zeros(len(states), VOCABULARY)
        for n, state in enumerate(states):
            out[n, next_token(int(state))] = 1.0
        return out

    # What stands where

    def state_of(self, row: int) -> int:
        """Hash in state row ``row``. Raises AssertionError unless every word of every layer agrees on it."""
        first = self._layers[0][0][row, :2] - self._offsets[0][0][:2]
        low, high = (int(x) & 0xFFFFFFFF for x in first)
        state = high << 32 | low
        if not self._row_holds(row, state):
            # A slot that was zeroed holds zeros, not the pattern of hash 0.
            assert self._is_zero(row), f"state row {row} holds words of different states"
            return 0
        return state

    def check_slot(self, slot: int, tokens: Sequence[int]) -> None:
        """``slot`` must hold the state after exactly ``tokens``."""
        expected = hashes_of(tokens)[-1]
        assert self._row_holds(slot, expected), f"slot {slot} does not hold the state after {len(tokens)} tokens"
        self.num_checked += 1

    def check_checkpoints(self, store: Any, group: int, claims: dict[int, int]) -> None:
        """Every block of ``claims`` (block id -> hash) must hold that state in the ``group``-th GDN group."""
        if not claims:
            return
        blocks = np.fromiter(claims, np.int64, len(claims))
        states = np.fromiter(claims.values(), np.uint64, len(claims))
        first = sum(len(p) for p in store.layout.layer_indices[:group])
        sides = iter(store._page_side[group])
        for layer in range(first, first + len(store.layout.layer_indices[group])):
            for part in store.layout.segments:
                kind = 0 if part.state == "conv" else 1
                found = next(sides).numpy()[blocks]
                words = slice(part.state_word, part.state_word + part.num_words)
                wanted = self._pattern(states, self._offsets[layer][kind], words)
                wrong = np.flatnonzero((found != wanted).any(axis=1))
                assert not len(wrong), (
                    f"block {blocks[wrong[0]]} of GDN group {group}, layer {layer}, {part.state} part in {part.half}: "
                    "not the state of the prefix that its hash claims"
                )
        self.num_checked += len(claims)

    def check_attention_blocks(self, block_size: int, claims: dict[int, int]) -> None:
        """The last token of every attention block of ``claims`` (block id -> hash) must have that hash."""
        if not claims:
            return
        rows = np.fromiter(claims, np.int64, len(claims)) * block_size + block_size - 1
        states = np.fromiter(claims.values(), np.uint64, len(claims))
        for tokens in self._token_rows:
            found = np.ascontiguousarray(tokens[rows][:, :2]).view(np.uint64)[:, 0]
            wrong = np.flatnonzero(found != states)
            assert not len(wrong), f"attention block {rows[wrong[0]] // block_size} is not the prefix its hash claims"

    def _row_holds(self, row: int, state: int) -> bool:
        states = np.array([state], np.uint64)
        return all(
            (words[row] == self._pattern(states, offsets, slice(None))[0]).all()
            for pair, pair_offsets in zip(self._layers, self._offsets, strict=True)
            for words, offsets in zip(pair, pair_offsets, strict=True)
        )

    def _is_zero(self, row: int) -> bool:
        return not any(words[row].any() for pair in self._layers for words in pair)

    @staticmethod
    def _pattern_offsets(layer: int, kind: int, num_words: int) -> np.ndarray:
        words = np.arange(num_words, dtype=np.int64)
        return ((words // 2 * 2654435761 + layer * 40503 + kind * 97) & 0x7FFFFFFF).astype(np.int32)

    @staticmethod
    def _pattern(states: np.ndarray, offsets: np.ndarray, words: slice) -> np.ndarray:
        """[n, words] int32: low half of the hash in even words, high half in odd ones, each plus the word's offset."""
        halves = np.stack([states & np.uint64(0xFFFFFFFF), states >> np.uint64(32)], axis=1).astype(np.uint32)
        tiled = np.tile(halves, (1, -(-len(offsets) // 2)))[:, : len(offsets)].view(np.int32)
        return (tiled + offsets)[:, words]

    def _write_state(self, row: int, state: int) -> None:
        states = np.array([state], np.uint64)
        for pair, pair_offsets in zip(self._layers, self._offsets, strict=True):
            for words, offsets in zip(pair, pair_offsets, strict=True):
                words[row] = self._pattern(states, offsets, slice(None))[0]

    def _write_token(self, slot: int, state: int, token: int, position: int) -> None:
        low, high = np.array([state], np.uint64).view(np.int32)
        for rows in self._token_rows:
            rows[slot, :4] = (low, high, token, position)
            rows[slot, 4:] = token

    def _check_context(self, inputs: ModelInputs, n: int, start: int, state: int) -> None:
        """K and V of the sequence's tokens before ``start`` must chain up to ``state``."""
        if start == 0:
            assert state == 0, "a sequence starts at token 0 on a slot that is not zero"
            return
        kernel_ids = self._kernel_ids(inputs, n, start)
        where = np.arange(start)
        rows = kernel_ids[where // self._kernel_block] * self._kernel_block + where % self._kernel_block
        for tokens in self._token_rows:
            found = tokens[rows]
            chain = np.ascontiguousarray(found[:, :2]).view(np.uint64)[:, 0]
            token, position = found[:, 2].astype(np.uint64), found[:, 3].astype(np.uint64)
            before = np.concatenate([np.zeros(1, np.uint64), chain[:-1]])
            with np.errstate(over="ignore"):
                wanted = before * np.uint64(_STEP) + token * np.uint64(_TOKEN)
                wanted += (position + np.uint64(1)) * np.uint64(_POSITION)
            assert (position == where).all() and (chain == wanted).all(), "K/V of the context are not this sequence's"
            assert int(chain[-1]) == state, f"the slot's state is not the one of the {start} tokens in the K/V pages"

    @staticmethod
    def _kernel_ids(inputs: ModelInputs, n: int, start: int) -> np.ndarray:
        attn = inputs.attn
        if attn.prefill is not None:
            return attn.prefill.block_table.numpy()[n]
        assert attn.decode is not None
        first = int(attn.decode.first_block[n])
        mine = attn.decode.block_groups.numpy()[first:] == n
        return attn.decode.block_list.numpy()[first:][mine]
