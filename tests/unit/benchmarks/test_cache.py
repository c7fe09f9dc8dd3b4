# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic: what could have been reused, what was, and how it is written down. No engine."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks import cache, engines, report, workloads
from benchmarks.workloads import Session, Turn
from vllm_gaudi.v1.worker.memory import blocks_per_request

B = 4


def request(
    prompt: list[int], answer: list[int], *, asked: float, took: float = 1.0, cached: int = 0, **more: Any
) -> dict[str, Any]:
    known = {"session": 0, "turn": 0, "n": 1, "first": 0.5, "prompt": prompt, "answers": [answer]}
    return {**known, "asked": asked, "took": took, "cached": cached, **more}


class TestReachable:
    def test_a_prompt_reaches_whole_blocks_of_an_earlier_one_and_never_its_last_token(self):
        first, again = request(list(range(10)), [90], asked=0), request(list(range(10)), [90], asked=2)
        exact, shorter = request(list(range(8)), [90], asked=3), request(list(range(3)), [90], asked=4)
        assert cache.reachable([first, again, exact, shorter], B) == [0, 8, 4, 0]

    def test_another_order_of_the_list_changes_nothing(self):
        first, again = request(list(range(10)), [90], asked=0), request(list(range(10)), [90], asked=2)
        assert cache.reachable([again, first], B) == [8, 0]

    @pytest.mark.parametrize(("took", "reached"), [(1.0, 12), (9.0, 8)])
    def test_an_answer_is_reached_once_it_has_ended_and_its_last_token_never(self, took, reached):
        first = request(list(range(9)), [50, 51, 52, 53], asked=0, took=took)  # 13 tokens, 12 of them computed
        turn = request([*range(9), 50, 51, 52, 53, 7, 7, 7, 7], [1], asked=5)
        assert cache.reachable([first, turn], B) == [0, reached]

    def test_what_is_asked_later_is_not_known(self):
        assert cache.reachable([request(list(range(9)), [1], asked=5), request(list(range(9)), [1], asked=0)], B) == [
            8,
            0,
        ]


def played(*requests: dict[str, Any], scheduled: int = 0) -> dict[str, Any]:
    return {"requests": list(requests), "wall": 2.0, "cpu": 1.0, "steps": 7, "scheduled": scheduled, "preempted": 3}


def test_measures_count_hits_of_reachable_tokens_kept_sessions_and_what_was_computed_twice():
    one = request(list(range(9)), [50, 51], asked=0, first=0.1)
    two = request([*range(9), 50, 51, 7, 8], [60], asked=3, turn=1, cached=8, first=0.3)
    other = request([*range(9), 50, 51, 7, 8], [60], asked=5, turn=1, session=1, cached=4, first=0.2)
    # 9 + 1, 5 + 0 and 9 + 0 tokens have to be computed; 30 were.
    found = cache.measures(played(one, two, other, scheduled=30), B)
    assert (found["ttft p50"], found["ttft p95"]) == (0.2, 0.3)
    assert found["hit"] == 12 / (8 + 12)
    assert found["kept"] == 0.5
    assert found["recomputed"] == 30 - 24
    assert found["tokens/s"] == (9 + 13 + 13 + 4) / 2
    assert (found["steps"], found["preempted"]) == (7, 3)


def test_of_a_request_with_several_answers_nobody_says_what_each_has_hit():
    one = request(list(range(9)), [50], asked=0)
    many = request(list(range(9)), [50], asked=2, n=2, answers=[[1], [2]])
    found = cache.measures(played(one, many, scheduled=30), B)
    assert found["hit"] is None and found["recomputed"] is None and found["kept"] is None


def test_answers_are_compared_by_session_and_turn():
    cold = played(request([1], [5], asked=0), request([1], [6], asked=0, turn=1))
    warm = played(request([1], [7], asked=0, turn=1), request([1], [5], asked=1))
    assert cache.same_answers(warm, cold) == (1, 2)


def test_cost_is_cpu_time_beside_the_run_without_a_cache():
    off = {**played(), "cpu": 4.0}
    assert cache.cost({**off, "cpu": 5.0}, off) == 1.25
    assert cache.cost({**off, "cpu": None}, off) is None, "the engine is another process"


def test_a_spread_is_median_lowest_and_highest():
    assert report.spread([3.0, None, 1.0, 2.0]) == [2.0, 1.0, 3.0]
    assert report.spread([None]) is None
    assert (report.shown([0.012, 0.01, 0.02], "ms"), report.shown([1, 1, 1], "share")) == ("12 (10..20)", "100")
    assert report.shown(None, "ms") == "-"


def test_the_table_and_the_picture_have_every_workload_and_engine(tmp_path):
    row = {key: [0.5, 0.4, 0.6] for _, key, _ in cache.TABLE} | {"hit": None, "same": [3, 4]}
    by_label = {"off": row, "on": row}
    results = {
        "machine": "a machine",
        "command": "a command",
        "sizes": {"tiny": {"block_size": 32, "workloads": {"chat": by_label, "cold": by_label}}},
    }
    text = cache.markdown(results)
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| c")]
    assert rows == [["| chat", "off"], ["| chat", "on"], ["| cold", "off"], ["| cold", "on"]]
    assert "a machine; a command" in text and "3 / 4" in text and "B = 32" in text
    (path,) = cache.plot(results, tmp_path)
    assert path.stat().st_size > 10_000


def test_a_peer_is_measured_with_our_block_size_and_as_it_is_shipped():
    options = argparse.Namespace(threads=1, dtype="float32", peer="/python", peer_env=["A=1=2"])
    found = {column.label: column for column in cache.columns(options, engines.SIZES["small"])}
    assert list(found) == ["off", "on", "peer", "peer as shipped"]
    size = engines.SIZES["small"].peer_block_size
    assert [found[label].flags.get("block_size") for label in found] == [size, size, size, None]
    assert found["peer"].environment["A"] == "1=2" and found["peer"].python == "/python"
    assert found["peer as shipped"].environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


# Workloads


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_a_workload_is_the_same_for_a_seed_and_scales_with_b(name):
    one, again = (workloads.make(name, 32, 500, 3, 1.0) for _ in range(2))
    assert one == again and one != workloads.make(name, 32, 500, 4, 1.0)
    double = workloads.make(name, 64, 500, 3, 1.0)
    assert len(double) == len(one)
    assert 1.7 < workloads.longest(double) / workloads.longest(one) < 2.3 or name in ("chat", "agent", "short", "cold")
    assert all(10 <= token < 500 for session in one for turn in session.turns for token in turn.new)
    assert len(workloads.make(name, 32, 500, 3, 0.25)) <= len(one)


def test_workloads_are_those_that_the_documentation_names():
    made = {name: workloads.make(name, 100, 500, 0, 1.0) for name in workloads.WORKLOADS}
    prompts = {name: [len(turn.new) for s in sessions for turn in s.turns] for name, sessions in made.items()}
    assert prompts["repeat"] == [120, 120, 250, 250, 810, 810]
    assert prompts["groups"] == [284 + 133] * 64
    assert len({tuple(s.turns[0].new[:284]) for s in made["groups"]}) == 8
    assert len(made["chat"]) == 12 and {len(s.turns) for s in made["chat"]} == {8}
    assert [len(made[f"alternate-{n}"]) for n in (2, 4)] == [2, 4]
    assert {len(s.turns) for s in made["agent"]} == {30}
    assert len({tuple(s.turns[0].new[:320]) for s in made["agent"]}) == 1
    assert prompts["fork"] == [460 + 70] * 17 and made["fork"][-1].turns[0].n == 4
    assert len(made["short"]) == 64 and max(prompts["short"]) < 100
    assert len({tuple(s.turns[0].new[:50]) for s in made["cold"]}) == len(made["cold"])


class TestNeededBlocks:
    def test_of_one_conversation_it_is_what_the_package_plans_for_it(self):
        for new, answer in ((10, 4), (8, 4), (1, 1), (3, 30)):
            session = Session([Turn(list(range(10, 10 + new)), answer), Turn([7] * new, answer)])
            planned = blocks_per_request(B, 3, 2 * (new + answer))
            assert workloads.needed_blocks([session], B, 3) == planned, (new, answer)

    def test_of_conversations_that_share_nothing_it_is_the_sum(self):
        sessions = [Session([Turn([first] * 9, 6)]) for first in (10, 11, 12)]
        assert workloads.needed_blocks(sessions, B, 3) == 3 * blocks_per_request(B, 3, 15)

    def test_whole_blocks_that_conversations_begin_with_are_counted_once(self):
        turn = Turn(list(range(10, 20)), answer=4)  # two whole blocks of the prompt, and two that the answer is in
        assert workloads.needed_blocks([Session([turn])] * 2, B, 3) == 2 + 2 * (2 + 3)

    def test_each_of_several_answers_ends_a_conversation(self):
        several = Turn(list(range(10, 20)), answer=4, n=3)
        assert workloads.needed_blocks([Session([several])], B, 3) == 2 + 3 * (2 + 3)
        assert workloads.needed_blocks([Session([several, Turn([7], 1)])], B, 3) == 2 + 3 * (2 + 3)

    def test_answers_of_earlier_turns_are_part_of_what_a_later_one_stands_on(self):
        turns = [Turn([10], answer=1) for _ in range(6)]
        assert workloads.needed_blocks([Session(turns)], B, 3) == 3 + 3


def test_flags_are_for_the_longest_session_and_a_share_of_the_largest_need():
    small, large = [Session([Turn([7] * 9, 6)])], [Session([Turn([n] * 90, 6)]) for n in (10, 11, 12)]
    need = workloads.needed_blocks(large, B, 3)
    plenty = engines.flags_for([small, large], B, None, 2.3, 2)
    assert plenty["max_model_len"] >= 96 and plenty["max_num_batched_tokens"] == 9
    assert plenty["num_gpu_blocks_override"] > 2 * need
    half = engines.flags_for([large, small], B, 0.5, 0.1, 16)
    assert need // 2 <= half["num_gpu_blocks_override"] <= need // 2 + 17 and half["max_num_batched_tokens"] == 16
    least = engines.flags_for([small], B, 0.01, 1, 1)
    assert least["num_gpu_blocks_override"] > blocks_per_request(B, 3, least["max_model_len"])
