# SPDX-License-Identifier: Apache-2.0
"""Every word of a state has one place in its page; what does not fit is refused."""

from __future__ import annotations

import pytest

from vllm_gaudi.v1.worker.gdn_checkpoint.layout import StateShape, make_layout, pack

# name: (B, kv heads, head, conv channels, v heads, GDN head, SSM bytes) per rank -> heads in the K half
TARGETS = {
    "27B TP1": (896, 4, 256, 10240, 48, 128, 4, 28),
    "27B TP2": (896, 2, 256, 5120, 24, 128, 4, 14),
    "27B TP4": (896, 1, 256, 2560, 12, 128, 4, 7),
    "27B TP8": (512, 1, 256, 1280, 6, 128, 4, 4),
    "35B-A3B TP1": (1152, 2, 256, 8192, 32, 128, 4, 18),
    "35B-A3B TP4": (640, 1, 256, 2048, 8, 128, 4, 5),
    "397B TP8": (640, 1, 256, 1536, 8, 128, 4, 5),
    "397B TP4": (1152, 1, 256, 3072, 16, 128, 4, 9),
    "Next-80B TP1 fp32": (1152, 2, 256, 8192, 32, 128, 4, 18),
    "Next-80B TP1 bf16": (640, 2, 256, 8192, 32, 128, 2, 20),
}


def state_of(conv_dim: int, heads: int, dim: int, ssm_bytes: int, conv_bytes: int = 2) -> StateShape:
    return StateShape((3, conv_dim), conv_bytes, (heads, dim, dim), ssm_bytes)


@pytest.mark.parametrize("name", TARGETS)
def test_target_models_keep_whole_heads_on_whole_token_rows(name: str) -> None:
    block, kv_heads, head, conv_dim, heads, dim, ssm_bytes, heads_in_k = TARGETS[name]
    state = state_of(conv_dim, heads, dim, ssm_bytes)
    row_words = kv_heads * head * 2 // 4
    segments, whole = pack(state, block * row_words)
    assert whole
    assert segments[0].half == "k" and segments[0].num_words == heads_in_k * state.head_words
    assert all(part.page_word % row_words == 0 and part.num_words % row_words == 0 for part in segments)


@pytest.mark.parametrize("page_words", range(700, 1500, 37))
@pytest.mark.parametrize("heads", [1, 2, 4, 5])
def test_every_word_has_exactly_one_place(page_words: int, heads: int) -> None:
    state = StateShape((3, 96), 4, (heads, 16, 16), 4)
    if state.ssm_words + state.conv_words > 2 * page_words:
        with pytest.raises(RuntimeError, match="does not fit its page"):
            pack(state, page_words)
        return
    segments, _ = pack(state, page_words)
    for name, total in (("ssm", state.ssm_words), ("conv", state.conv_words)):
        words = [w for s in segments if s.state == name for w in range(s.state_word, s.state_word + s.num_words)]
        assert words == list(range(total))
    places = [(s.half, w) for s in segments for w in range(s.page_word, s.page_word + s.num_words)]
    assert len(set(places)) == len(places) and all(word < page_words for _, word in places)


def test_heads_are_cut_only_where_whole_ones_do_not_fit() -> None:
    state = StateShape((3, 64), 4, (3, 16, 16), 4)  # 192 + 3 * 256 words
    assert pack(state, 512)[1]
    segments, whole = pack(state, 500)  # one head in K would leave 704 words for a V half of 500
    assert not whole and segments[0].num_words == 500


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (StateShape((3, 5), 2, (1, 2, 2), 4), "conv state of 30 bytes"),
        (StateShape((3, 4), 2, (1, 3, 3), 2), "SSM head of 18 bytes"),
    ],
)
def test_bytes_that_are_no_words_are_refused(state: StateShape, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        pack(state, 1000)


def layout_with(group_sizes: list[int], num_attention_layers: int):
    return make_layout(
        state=StateShape((3, 64), 4, (2, 16, 16), 4),
        block_size=16,
        num_blocks=10,
        page_bytes=8192,
        group_ids=range(len(group_sizes)),
        group_sizes=group_sizes,
        num_attention_layers=num_attention_layers,
    )


def test_layers_share_pages_by_position_and_costs_add_up() -> None:
    layout = layout_with([2, 2, 1], 2)
    assert layout.layer_indices == ((0, 1), (0, 1), (0,))
    assert layout.blocks_per_boundary == 4
    assert layout.checkpoint_bytes == 5 * (3 * 64 + 2 * 256) * 4


def test_a_group_longer_than_the_attention_group_is_refused() -> None:
    with pytest.raises(RuntimeError, match="KV cache group 1 has 3 GDN layers for 2 attention layers"):
        layout_with([2, 3], 2)
