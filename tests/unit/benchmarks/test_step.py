# SPDX-License-Identifier: Apache-2.0
"""The clocks around the runner's parts, on a runner that only has the methods that are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks import step


def runner_of(calls: list[str]) -> Any:
    """An object with every method of the table; each notes its part and returns its argument."""
    whole = SimpleNamespace()
    for path, method, part in step.PHASES:
        owner = whole
        for name in filter(None, path.split(".")):
            if not hasattr(owner, name):
                setattr(owner, name, SimpleNamespace())
            owner = getattr(owner, name)
        setattr(owner, method, lambda it=None, part=part: (calls.append(part), it)[1])
    return whole


def test_a_step_ends_with_its_last_method_and_parts_of_one_name_add_up():
    calls: list[str] = []
    runner = runner_of(calls)
    clocks = step.Clocks(runner)
    for _ in range(2):
        assert runner.execute_model(3) == 3
        runner.step.store.before_forward()
        runner.step.store.save()
        runner.graphs.run()
        runner.sample_tokens()
    assert len(clocks.steps) == 2 and clocks.now == {}
    assert set(clocks.steps[0]) == {"whole", "plan and store", "forward"}
    assert calls.count("plan and store") == 4


def test_every_part_that_is_printed_has_a_phase():
    assert {part for _, _, part in step.PHASES} == {*step.MODEL_PARTS, *step.OUR_PARTS, "whole"}
