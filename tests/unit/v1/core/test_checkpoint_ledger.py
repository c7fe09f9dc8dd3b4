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


class LedgerSetup:
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
    setup = LedgerSetup(20, retention=None)
    entries = setup.take((setup.request("r", "aaaabbbbccccd"), 0, 13))
    assert len(entries["r"]) == 3 and len({block for blocks in entries["r"] for block in blocks}) == 6
    assert all(setup.is_cached(text) for text in ("aaaa", "aaaabbbb", "aaaabbbbcccc"))
    assert setup.pool.get_num_free_blocks() == 19
    assert setup.ledger.drain_counts() == (3, 0) and len(setup.ledger.drain_published()) == 3


def test_nothing_is_taken_between_boundaries():
    setup = LedgerSetup(20)
    assert setup.take((setup.request("r", "aaaabbbb"), 4, 7)) == {}


def test_blocks_of_one_pass_are_never_given_twice_and_the_end_comes_first():
    setup = LedgerSetup(4, retention=None)  # three blocks: one checkpoint
    entries = setup.take((setup.request("r", "aaaabbbbcccc"), 0, 12))
    assert [any(blocks) for blocks in entries["r"]] == [False, False, True]
    assert setup.ledger.drain_counts() == (1, 2)


def test_all_groups_or_none():
    setup = LedgerSetup(20)
    setup.fill(leave=1)
    entries = setup.take((setup.request("r", "aaaa"), 0, 4))
    assert entries["r"] == [(0, 0)] and setup.pool.get_num_free_blocks() == 1
    assert setup.ledger.drain_counts() == (0, 1)


def test_what_is_cached_is_not_taken_again():
    setup = LedgerSetup(20)
    first = setup.take((setup.request("r", "aaaa"), 0, 4))["r"]
    second = setup.take((setup.request("s", "aaaab"), 0, 5), (setup.request("t", "aaaab"), 0, 5))
    assert any(first[0]) and second == {"s": [(0, 0)], "t": [(0, 0)]}


def test_an_evicted_member_takes_its_siblings_along_and_they_go_next():
    setup = LedgerSetup(7, retention=None)
    request = setup.request("r", "aaaabbbb")
    first, second = setup.take((request, 0, 8))["r"]
    for _ in range(3):  # empty blocks, then the first member of the older checkpoint
        (block,) = setup.pool.get_new_blocks(1)
    assert block.block_id in first and not setup.is_cached("aaaa") and setup.is_cached("aaaabbbb")
    (block,) = setup.pool.get_new_blocks(1)
    assert block.block_id in first
    setup.pool.get_new_blocks(2)
    assert not setup.is_cached("aaaabbbb")


@pytest.mark.parametrize(
    ("retention", "kept"),
    [(None, ["a", "ab", "abc", "abcd"]), (8, ["ab", "abcd"]), (12, ["ab", "abc", "abcd"]), (0, ["ab", "abcd"])],
)
def test_retention_and_the_ends_of_the_prompt_in_a_full_pool(retention, kept):
    """The prompt ends inside block 3; the request is resumed and goes on to 17 tokens in one step."""
    setup = LedgerSetup(30, retention)
    cached = setup.take(*((setup.request(f"old-{n}", chr(65 + n) * 4), 0, 4) for n in range(14)))
    assert all(any(blocks) for (blocks,) in cached.values())
    setup.pool.get_new_blocks(1)
    text = "aaaabbbbccccdddde"
    setup.take((setup.request("r", text[:11], text), 0, 17))
    texts = {"a": text[:4], "ab": text[:8], "abc": text[:12], "abcd": text[:16]}
    assert [name for name, prefix in texts.items() if setup.is_cached(prefix)] == kept


def test_both_ends_of_a_prompt_of_whole_blocks_are_kept_and_so_is_a_junction():
    setup = LedgerSetup(14)
    setup.take(*((setup.request(f"old-{n}", chr(65 + n) * 4), 0, 4) for n in range(6)))
    setup.pool.get_new_blocks(1)
    setup.take((setup.request("r", "aaaabbbbccccdddd", junction=5), 0, 16))
    assert [setup.is_cached("aaaabbbbccccdddd"[:k]) for k in (4, 8, 12, 16)] == [True, False, True, True]


def test_extra_boundaries_use_blocks_that_hold_nothing_and_no_others():
    setup = LedgerSetup(6)  # five blocks
    entries = setup.take((setup.request("r", "aaaabbbbccccd"), 0, 13))
    assert [any(blocks) for blocks in entries["r"]] == [False, True, True], "the kept one, and one extra from the rest"
    assert setup.ledger.drain_counts() == (2, 0), "an extra one that finds no room is not skipped"


def test_the_last_boundary_reached_takes_the_place_of_the_one_before_when_the_pool_is_full():
    setup = LedgerSetup(5)
    setup.take((setup.request("old", "zzzz"), 0, 4))
    text = "aaabbbbccccdddd"
    for end in (4, 8, 12):
        setup.take((setup.request("r", text[:3], text[: end + 1]), end - 1, end))
    assert setup.is_cached("zzzz"), "it was cached before and is none of the request's business"
    assert [setup.is_cached(text[:end]) for end in (4, 8, 12)] == [False, False, True]


def test_a_last_boundary_that_somebody_else_has_hit_is_left_alone():
    setup = LedgerSetup(7)
    setup.take((setup.request("old", "zzzz"), 0, 4))
    text = "aaabbbbccccdddd"
    setup.take((setup.request("r", text[:3], text[:5]), 3, 4))
    setup.ledger.on_resume("s", setup.pool.get_cached_block(text[:4].encode(), [0])[0])
    setup.take((setup.request("r", text[:3], text[:9]), 7, 8))
    assert setup.is_cached(text[:4]) and setup.is_cached(text[:8])


class TestUnknownToken:
    """Asynchronous scheduling: the boundary's last token is not there when its step is scheduled."""

    def setup(self, **kwargs) -> tuple[LedgerSetup, list]:
        setup = LedgerSetup(20, **kwargs)
        return setup, setup.take((setup.request("r", "aaa"), 3, 4))["r"]

    def test_it_is_published_when_the_token_is_known_and_pins_nothing_meanwhile(self):
        setup, (blocks,) = self.setup()
        assert all(blocks) and not setup.is_cached("aaab") and setup.pool.get_num_free_blocks() == 19
        late = setup.request("r", "aaa", "aaab")
        setup.ledger.publish_ready(late, 3)
        assert not setup.is_cached("aaab")
        setup.ledger.publish_ready(late, 4)
        assert setup.is_cached("aaab")

    def test_it_is_lost_when_the_request_leaves_before(self):
        setup, (blocks,) = self.setup()
        setup.ledger.on_free("r")
        setup.ledger.publish_ready(setup.request("r", "aaa", "aaab"), 4)
        assert not setup.is_cached("aaab")
        assert {block.block_id for block in setup.pool.get_new_blocks(2)} == set(blocks), "its blocks go first"

    def test_it_is_lost_when_its_blocks_are_handed_out_before(self):
        setup, _ = self.setup()
        setup.fill(leave=0)
        setup.ledger.publish_ready(setup.request("r", "aaa", "aaab"), 4)
        assert not setup.is_cached("aaab")

    def test_it_gives_way_to_the_same_boundary_of_another_request(self):
        setup, (blocks,) = self.setup()
        (others,) = setup.take((setup.request("s", "aaab"), 0, 4))["s"]
        setup.ledger.publish_ready(setup.request("r", "aaa", "aaab"), 4)
        found = setup.pool.get_cached_block(b"aaab", list(GROUPS))
        assert tuple(block.block_id for block in found) == others
        assert {block.block_id for block in setup.pool.get_new_blocks(2)} == set(blocks)

    def test_the_boundary_before_it_stays_until_it_is_published(self):
        setup = LedgerSetup(5)  # two checkpoints
        text = "aaabbbbc"
        setup.take((setup.request("r", "aaa", text[:4]), 3, 4))
        setup.take((setup.request("r", "aaa", text[:7]), 7, 8))
        assert setup.is_cached(text[:4])
        setup.ledger.on_free("r")
        assert setup.is_cached(text[:4]), "the request ended before its last token came"


def test_the_ends_of_a_request_that_leaves_are_as_new():
    setup = LedgerSetup(7)
    setup.take((setup.request("r", "aaaa"), 0, 4))
    setup.take((setup.request("s", "bbbb"), 0, 4))
    setup.ledger.on_free("r")
    setup.fill(leave=2)
    assert setup.is_cached("aaaa") and not setup.is_cached("bbbb")


def test_a_boundary_of_this_pass_is_promised_to_those_that_it_carries_further():
    setup = LedgerSetup(20)
    setup.ledger.new_step_starts()
    setup.ledger.announce(setup.request("r", "aaaabbbbcc"), 8, 1)
    twin = setup.request("s", "aaaabbbbd")
    assert setup.ledger.will_be_cached(twin, 0) and setup.ledger.will_be_cached(twin, 4)
    assert not setup.ledger.will_be_cached(twin, 8)
    assert not setup.ledger.will_be_cached(setup.request("t", "aaaabbbb"), 0), "its last token must be computed"
    assert not setup.ledger.will_be_cached(setup.request("u", "aaaaccccd"), 0), "the first boundary was there before"
    setup.ledger.new_step_starts()
    assert not setup.ledger.will_be_cached(twin, 0)


def test_a_reset_of_the_pool_leaves_nothing_behind():
    setup = LedgerSetup(9, retention=None)
    setup.take((setup.request("r", "aaaabbbbc"), 0, 9))
    assert setup.pool.reset_prefix_cache()
    assert not setup.ledger._by_key and not setup.ledger._by_block
    assert len(setup.take((setup.request("s", "aaaabbbbc"), 0, 9))["s"]) == 2
    assert setup.is_cached("aaaa") and setup.is_cached("aaaabbbb")
