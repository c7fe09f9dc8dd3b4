# SPDX-License-Identifier: Apache-2.0
"""The ledger on vLLM's own block pool: what is taken, published, given up, and which blocks go first.

Importing the ledger imports vLLM, so each test does that itself.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.xdist_group("vllm")  # with --dist loadgroup only one process imports it

B = 4
GROUPS = (0, 1)


class Bench:
    """A pool, a ledger over it, and requests made of letters: the hash of a boundary is the text up to it."""

    def __init__(self, num_blocks: int, retention: int | None = 0):
        from vllm.v1.core.block_pool import BlockPool

        from vllm_gaudi.v1.core.checkpoint_ledger import CheckpointLedger

        self.pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=B)
        self.ledger = CheckpointLedger(self.pool, GROUPS, B, retention)

    @staticmethod
    def request(name: str, prompt: str, known: str | None = None, junction: int = 0) -> SimpleNamespace:
        known = known or prompt
        return SimpleNamespace(
            request_id=name,
            num_prompt_tokens=len(prompt),
            num_tokens=len(known),
            shared_prefix_boundary=junction,
            block_hashes=[known[: k * B].encode() for k in range(1, len(known) // B + 1)],
        )

    def take(self, *ranges) -> dict:
        from vllm_gaudi.v1.core.checkpoint_ledger import ScheduledRange

        self.ledger.new_step_starts()
        return self.ledger.allocate([ScheduledRange(*crossing) for crossing in ranges])

    def is_cached(self, text: str) -> bool:
        found = [self.pool.get_cached_block(text.encode(), [group]) for group in GROUPS]
        assert len({bool(blocks) for blocks in found}) == 1, "in some groups only"
        return bool(found[0])

    def fill(self, leave: int) -> list:
        """Somebody else takes all free blocks but ``leave``, the most recently cached ones."""
        return self.pool.get_new_blocks(self.pool.get_num_free_blocks() - leave)


def test_a_step_over_three_boundaries_gives_three_checkpoints_and_pins_none():
    bench = Bench(20, retention=None)
    entries = bench.take((bench.request("r", "aaaabbbbccccd"), 0, 13))
    assert len(entries["r"]) == 3 and len({block for blocks in entries["r"] for block in blocks}) == 6
    assert all(bench.is_cached(text) for text in ("aaaa", "aaaabbbb", "aaaabbbbcccc"))
    assert bench.pool.get_num_free_blocks() == 19
    assert bench.ledger.drain_counts() == (3, 0) and len(bench.ledger.drain_published()) == 3


def test_nothing_is_taken_between_boundaries():
    bench = Bench(20)
    assert bench.take((bench.request("r", "aaaabbbb"), 4, 7)) == {}


def test_blocks_of_one_pass_are_never_given_twice_and_the_end_comes_first():
    bench = Bench(4, retention=None)  # three blocks: one checkpoint
    entries = bench.take((bench.request("r", "aaaabbbbcccc"), 0, 12))
    assert [any(blocks) for blocks in entries["r"]] == [False, False, True]
    assert bench.ledger.drain_counts() == (1, 2)


def test_all_groups_or_none():
    bench = Bench(20)
    bench.fill(leave=1)
    entries = bench.take((bench.request("r", "aaaa"), 0, 4))
    assert entries["r"] == [(0, 0)] and bench.pool.get_num_free_blocks() == 1
    assert bench.ledger.drain_counts() == (0, 1)


def test_what_is_cached_is_not_taken_again():
    bench = Bench(20)
    first = bench.take((bench.request("r", "aaaa"), 0, 4))["r"]
    second = bench.take((bench.request("s", "aaaab"), 0, 5), (bench.request("t", "aaaab"), 0, 5))
    assert any(first[0]) and second == {"s": [(0, 0)], "t": [(0, 0)]}


def test_an_evicted_member_takes_its_siblings_along_and_they_go_next():
    bench = Bench(7, retention=None)
    request = bench.request("r", "aaaabbbb")
    first, second = bench.take((request, 0, 8))["r"]
    for _ in range(3):  # empty blocks, then the first member of the older checkpoint
        (block,) = bench.pool.get_new_blocks(1)
    assert block.block_id in first and not bench.is_cached("aaaa") and bench.is_cached("aaaabbbb")
    (block,) = bench.pool.get_new_blocks(1)
    assert block.block_id in first
    bench.pool.get_new_blocks(2)
    assert not bench.is_cached("aaaabbbb")


@pytest.mark.parametrize(
    ("retention", "kept"),
    [(None, ["a", "ab", "abc", "abcd"]), (8, ["ab", "abcd"]), (12, ["ab", "abc", "abcd"]), (0, ["ab", "abcd"])],
)
def test_retention_and_the_ends_of_the_prompt_in_a_full_pool(retention, kept):
    """The prompt ends inside block 3; the request is resumed and goes on to 17 tokens in one step."""
    bench = Bench(30, retention)
    cached = bench.take(*((bench.request(f"old-{n}", chr(65 + n) * 4), 0, 4) for n in range(14)))
    assert all(any(blocks) for (blocks,) in cached.values())
    bench.pool.get_new_blocks(1)
    text = "aaaabbbbccccdddde"
    bench.take((bench.request("r", text[:11], text), 0, 17))
    texts = {"a": text[:4], "ab": text[:8], "abc": text[:12], "abcd": text[:16]}
    assert [name for name, prefix in texts.items() if bench.is_cached(prefix)] == kept


def test_both_ends_of_a_prompt_of_whole_blocks_are_kept_and_so_is_a_junction():
    bench = Bench(14)
    bench.take(*((bench.request(f"old-{n}", chr(65 + n) * 4), 0, 4) for n in range(6)))
    bench.pool.get_new_blocks(1)
    bench.take((bench.request("r", "aaaabbbbccccdddd", junction=5), 0, 16))
    assert [bench.is_cached("aaaabbbbccccdddd"[:k]) for k in (4, 8, 12, 16)] == [True, False, True, True]


def test_extra_boundaries_use_blocks_that_hold_nothing_and_no_others():
    bench = Bench(6)  # five blocks
    entries = bench.take((bench.request("r", "aaaabbbbccccd"), 0, 13))
    assert [any(blocks) for blocks in entries["r"]] == [False, True, True], "the kept one, and one extra from the rest"
    assert bench.ledger.drain_counts() == (2, 0), "an extra one that finds no room is not skipped"


def test_the_last_boundary_reached_takes_the_place_of_the_one_before_when_the_pool_is_full():
    bench = Bench(5)
    bench.take((bench.request("old", "zzzz"), 0, 4))
    text = "aaabbbbccccdddd"
    for end in (4, 8, 12):
        bench.take((bench.request("r", text[:3], text[: end + 1]), end - 1, end))
    assert bench.is_cached("zzzz"), "it was cached before and is none of the request's business"
    assert [bench.is_cached(text[:end]) for end in (4, 8, 12)] == [False, False, True]


def test_a_last_boundary_that_somebody_else_has_hit_is_left_alone():
    bench = Bench(7)
    bench.take((bench.request("old", "zzzz"), 0, 4))
    text = "aaabbbbccccdddd"
    bench.take((bench.request("r", text[:3], text[:5]), 3, 4))
    bench.ledger.on_resume("s", bench.pool.get_cached_block(text[:4].encode(), [0])[0])
    bench.take((bench.request("r", text[:3], text[:9]), 7, 8))
    assert bench.is_cached(text[:4]) and bench.is_cached(text[:8])


class TestUnknownToken:
    """Asynchronous scheduling: the boundary's last token is not there when its step is scheduled."""

    def bench(self, **kwargs) -> tuple[Bench, list]:
        bench = Bench(20, **kwargs)
        return bench, bench.take((bench.request("r", "aaa"), 3, 4))["r"]

    def test_it_is_published_when_the_token_is_known_and_pins_nothing_meanwhile(self):
        bench, (blocks,) = self.bench()
        assert all(blocks) and not bench.is_cached("aaab") and bench.pool.get_num_free_blocks() == 19
        late = bench.request("r", "aaa", "aaab")
        bench.ledger.publish_ready(late, 3)
        assert not bench.is_cached("aaab")
        bench.ledger.publish_ready(late, 4)
        assert bench.is_cached("aaab")

    def test_it_is_lost_when_the_request_leaves_before(self):
        bench, (blocks,) = self.bench()
        bench.ledger.on_free("r")
        bench.ledger.publish_ready(bench.request("r", "aaa", "aaab"), 4)
        assert not bench.is_cached("aaab")
        assert {block.block_id for block in bench.pool.get_new_blocks(2)} == set(blocks), "its blocks go first"

    def test_it_is_lost_when_its_blocks_are_handed_out_before(self):
        bench, _ = self.bench()
        bench.fill(leave=0)
        bench.ledger.publish_ready(bench.request("r", "aaa", "aaab"), 4)
        assert not bench.is_cached("aaab")

    def test_it_gives_way_to_the_same_boundary_of_another_request(self):
        bench, (blocks,) = self.bench()
        (others,) = bench.take((bench.request("s", "aaab"), 0, 4))["s"]
        bench.ledger.publish_ready(bench.request("r", "aaa", "aaab"), 4)
        found = bench.pool.get_cached_block(b"aaab", list(GROUPS))
        assert tuple(block.block_id for block in found) == others
        assert {block.block_id for block in bench.pool.get_new_blocks(2)} == set(blocks)

    def test_the_boundary_before_it_stays_until_it_is_published(self):
        bench = Bench(5)  # two checkpoints
        text = "aaabbbbc"
        bench.take((bench.request("r", "aaa", text[:4]), 3, 4))
        bench.take((bench.request("r", "aaa", text[:7]), 7, 8))
        assert bench.is_cached(text[:4])
        bench.ledger.on_free("r")
        assert bench.is_cached(text[:4]), "the request ended before its last token came"


def test_the_ends_of_a_request_that_leaves_are_as_new():
    bench = Bench(7)
    bench.take((bench.request("r", "aaaa"), 0, 4))
    bench.take((bench.request("s", "bbbb"), 0, 4))
    bench.ledger.on_free("r")
    bench.fill(leave=2)
    assert bench.is_cached("aaaa") and not bench.is_cached("bbbb")


def test_a_boundary_of_this_pass_is_promised_to_those_that_it_carries_further():
    bench = Bench(20)
    bench.ledger.new_step_starts()
    bench.ledger.announce(bench.request("r", "aaaabbbbcc"), 8, 1)
    twin = bench.request("s", "aaaabbbbd")
    assert bench.ledger.will_be_cached(twin, 0) and bench.ledger.will_be_cached(twin, 4)
    assert not bench.ledger.will_be_cached(twin, 8)
    assert not bench.ledger.will_be_cached(bench.request("t", "aaaabbbb"), 0), "its last token must be computed"
    assert not bench.ledger.will_be_cached(bench.request("u", "aaaaccccd"), 0), "the first boundary was there before"
    bench.ledger.new_step_starts()
    assert not bench.ledger.will_be_cached(twin, 0)


def test_a_reset_of_the_pool_leaves_nothing_behind():
    bench = Bench(9, retention=None)
    bench.take((bench.request("r", "aaaabbbbc"), 0, 9))
    assert bench.pool.reset_prefix_cache()
    assert not bench.ledger._by_key and not bench.ledger._by_block
    assert len(bench.take((bench.request("s", "aaaabbbbc"), 0, 9))["s"]) == 2
    assert bench.is_cached("aaaa") and bench.is_cached("aaaabbbb")
