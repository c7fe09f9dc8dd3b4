# SPDX-License-Identifier: Apache-2.0
"""Rows of int32 words: every bit arrives, nothing else changes, and torch.compile sees an opaque operator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_gaudi.ops.row_copy import _copy_rows_hpu, _zero_rows_hpu, copy_rows_, zero_rows_

# Quiet and signalling NaNs with payloads, infinities, minus zero, denormals: what arithmetic would change.
SPECIAL_WORDS = (0x7FC00001, 0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF)


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def random_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_pattern_arrives(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        words = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int32).copy())
    else:
        words = torch.from_numpy(np.array(SPECIAL_WORDS * 4, dtype=np.uint32).view(np.int32).copy())
    source = words.view(dtype).repeat(3, 1).view(torch.int32)
    target = torch.zeros(4, source.shape[1], dtype=torch.int32).view(dtype)
    copy_rows_([target.view(torch.int32)], [source], rows(2), rows(1))
    assert torch.equal(target.view(torch.int32)[2], words)
    assert not target.view(torch.int32)[[0, 1, 3]].any()


def test_a_copy_touches_its_rows_and_words_alone() -> None:
    page, before = random_words(9, 40), None
    before = page.clone()
    state = random_words(5, 24)
    copy_rows_([page[:, 3:19], page[:, 30:38]], [state[:, :16], state[:, 16:]], rows(7, 2, 4), rows(0, 4, 4))
    for block, slot in ((7, 0), (2, 4), (4, 4)):
        assert torch.equal(page[block, 3:19], state[slot, :16])
        assert torch.equal(page[block, 30:38], state[slot, 16:])
        before[block, 3:19], before[block, 30:38] = page[block, 3:19], page[block, 30:38]
    assert torch.equal(page, before)


def test_a_repeated_pair_changes_nothing() -> None:
    state, plain = random_words(6, 8), torch.zeros(9, 8, dtype=torch.int32)
    with_pads = plain.clone()
    copy_rows_([plain], [state], rows(1, 5, 8), rows(0, 2, 3))
    copy_rows_([with_pads], [state], rows(1, 5, 8, 8), rows(0, 2, 3, 3))
    assert torch.equal(with_pads, plain)


def test_zeroing_writes_and_does_not_multiply() -> None:
    state = torch.full((4, 6), float("nan"))
    zero_rows_([state.view(torch.int32)], rows(1, 3, 3))
    assert not state[[1, 3]].any() and state[[0, 2]].isnan().all()


def test_the_hpu_kernels_move_the_same_words() -> None:
    state, ours, theirs = random_words(6, 8), torch.zeros(9, 8, dtype=torch.int32), torch.zeros(9, 8, dtype=torch.int32)
    to, of = rows(1, 5, 8, 8), rows(0, 2, 3, 3)
    copy_rows_([ours], [state], to, of)
    _copy_rows_hpu([theirs], [state], to, of)
    assert torch.equal(ours, theirs)
    zero_rows_([ours], rows(5, 5))
    _zero_rows_hpu([theirs], rows(5, 5))
    assert torch.equal(ours, theirs) and not ours[5].any() and ours[1].any()


@pytest.mark.parametrize(
    ("words", "page_word", "state_word"), [(40, 0, 0), (16, 8, 24), (24, 16, 0), (5, 3, 7)], ids=str
)
def test_the_hpu_kernel_scatters_whole_rows_of_a_contiguous_tensor(
    words: int, page_word: int, state_word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never some columns of one: the bridge may copy all of it for that."""
    state, page = random_words(6, 40), random_words(9, 40)
    ours, theirs = page.clone(), page.clone()
    to, of = rows(1, 5, 8), rows(0, 2, 3)
    columns = slice(page_word, page_word + words), slice(state_word, state_word + words)
    copy_rows_([ours[:, columns[0]]], [state[:, columns[1]]], to, of)
    written = []
    scatter = torch.Tensor.index_copy_

    def spy(target: torch.Tensor, *args: object) -> torch.Tensor:
        written.append((target.is_contiguous(), target.numel()))
        return scatter(target, *args)

    monkeypatch.setattr(torch.Tensor, "index_copy_", spy)
    _copy_rows_hpu([theirs[:, columns[0]]], [state[:, columns[1]]], to, of)
    assert torch.equal(ours, theirs) and not torch.equal(ours, page)
    assert written == [(True, page.numel())]


@pytest.mark.parametrize(
    ("dst", "src", "to", "of", "complaint"),
    [
        ([random_words(3, 4)], [], rows(0), rows(0), "1 destinations for 0 sources"),
        ([random_words(3, 4)], [random_words(3, 5)], rows(0), rows(0), "rows of 4 words from .* rows of 5"),
        ([torch.zeros(3, 4)], [random_words(3, 4)], rows(0), rows(0), "need int32"),
        ([random_words(3, 4)], [random_words(3, 4)], rows(0, 1), rows(0), "two equal"),
        ([random_words(3, 4)[1:]], [random_words(3, 4)], rows(0), rows(0), "start of its memory"),
        ([random_words(3, 8)[:, ::2]], [random_words(3, 4)], rows(0), rows(0), "start of its memory"),
    ],
)
def test_what_does_not_fit_is_refused(dst: list, src: list, to: torch.Tensor, of: torch.Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        copy_rows_(dst, src, to, of)


def test_opcheck_is_clean() -> None:
    pages, states = [random_words(6, 16)[:, 2:10], random_words(6, 4)], [random_words(5, 8), random_words(5, 4)]
    arguments = (pages, states, rows(1, 3), rows(0, 2))
    torch.library.opcheck(torch.ops.vllm_gaudi.copy_rows_, arguments)
    torch.library.opcheck(torch.ops.vllm_gaudi.zero_rows_, (pages, rows(1, 3)))


def test_compiled_code_calls_the_operator_whole() -> None:
    page, state = torch.zeros(6, 8, dtype=torch.int32), random_words(5, 8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(page: torch.Tensor, state: torch.Tensor, to: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        torch.ops.vllm_gaudi.copy_rows_([page], [state], to, of)
        return page + 0

    result = step(page, state, rows(4), rows(2))
    assert torch.equal(page[4], state[2]) and torch.equal(result, page)
