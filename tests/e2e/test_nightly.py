# SPDX-License-Identifier: Apache-2.0
"""The nightly scripts on a host: each runs on a tiny model, and each turns red when what it looks for is broken.

Owns: a small configuration of every script of ``tools/nightly`` but GSM8K, which needs lm-eval (its parts are tested in
``tests/unit/tools/test_nightly.py``; ``tests/e2e/hpu/test_gsm8k.py`` runs the whole of it, on a host too).

Ordering rule: none; no test leaves an engine open.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tools.nightly import bandwidth, poison, process, ranks, state, ttft
from tools.nightly.setting import Setting, on_host


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return on_host(name="q35_moe", num_compiles=1, longest=3, out=str(tmp_path))


@pytest.fixture(autouse=True)
def no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rows_of(setting: Setting, name: str) -> list[dict[str, object]]:
    """The table as a program reads it; the one for people must be beside it."""
    assert (Path(setting.out) / f"{name}.md").read_text().count("\n| ") >= 3
    return json.loads((Path(setting.out) / f"{name}.json").read_text())["rows"]


@pytest.mark.slow
@pytest.mark.soak  # three minutes of compiling; the comparison itself is below
def test_states_are_compared_in_a_fresh_compilation(setting):
    state.run(setting)
    rows = rows_of(setting, "state")
    assert [row["step"] for row in rows] == ["narrow", "wide"]
    assert all(row["backend"] == "aot_eager" and row["bytes that differ"] == 0 for row in rows)
    assert (Path(setting.out) / "logs" / "state-0.log").stat().st_size > 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("skip_restore", "narrow: .* bytes of the hit's state"),
        ("skip_save", "narrow: .* bytes of the hit's state"),
        ("wrong_group", "narrow: .* bytes of the hit's state"),
        ("skip_staged", "wide: .* bytes of the hit's state"),
        ("neighbours_staging_row", "wide: .* bytes of the hit's state"),
    ],
)
def test_a_state_that_is_not_the_cold_one_is_seen_also_with_a_devices_tolerance(setting, fault, said):
    with process.variables(setting.environment(warm_up=False)):
        found = state.compare(setting.to_json(), fault)
    found["late_shapes"] = 0  # nothing was warmed up here
    with pytest.raises(AssertionError, match=said):
        state.check(found, is_device=False)
    assert max(found[name]["largest"] for name in ("narrow", "wide")) > 2 * state.WIDE_TOLERANCE
    with pytest.raises(AssertionError):
        state.check(found, is_device=True)


def test_a_compile_cache_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "recipe").write_text("")
    with pytest.raises(RuntimeError, match="not empty"):
        process.fresh_caches(tmp_path)


def test_a_process_that_fails_says_so_with_the_end_of_its_log(tmp_path):
    with pytest.raises(RuntimeError, match="(?s)exit code 1 and 0 results.*No module named 'nothing_of_the_kind'"):
        process.call("nothing_of_the_kind:f", {}, {}, tmp_path / "log")


def test_poison_does_not_surface_unless_zeroing_is_left_out(setting):
    poison.run(setting)
    assert [row["caches start as"] for row in rows_of(setting, "poison")] == ["zeros", "NaN"]
    with pytest.raises(AssertionError, match="not finite"):
        poison.run(setting, fault="skip_zero")


def test_first_tokens_are_timed_and_hits_are_whole(setting):
    rows = ttft.run(setting)
    assert [row["cached tokens"] for row in rows_of(setting, "ttft")] == [16, 32, 48]
    with pytest.raises(AssertionError, match="2 blocks: no whole hit"):
        ttft.check([rows[0], {**rows[1], "least hit": 16}])
    with pytest.raises(AssertionError, match="1 blocks: the cold run has reused"):
        ttft.check([{**rows[0], "cold cached": 16}])


def test_copies_are_measured_and_only_the_largest_ones_meet_a_floor(setting):
    rows = bandwidth.run(setting)
    assert len(rows_of(setting, "bandwidth")) == len(rows) == 12
    slow = [{**row, "median_ratio": 0.01} for row in rows]
    bandwidth.check([{**row, "median_ratio": 0.01 if row["requests"] == 1 else 1.0} for row in rows], bandwidth.FLOOR)
    with pytest.raises(AssertionError, match="0.010 of a plain copy"):
        bandwidth.check(slow, bandwidth.FLOOR)


@pytest.mark.slow
def test_two_ranks_agree_on_slots_and_a_hit_over_them_is_the_cold_run(setting):
    row = ranks.run(setting, 2)
    assert row["preempted"] >= 2 and row["steps compared"] > 10 and row["hit, tokens"] == 32


@pytest.mark.slow
def test_ranks_that_hand_out_slots_in_another_order_are_seen(setting):
    with pytest.raises(AssertionError, match="ranks disagree on slots"):
        ranks.compare(setting, 2, fault=True)
