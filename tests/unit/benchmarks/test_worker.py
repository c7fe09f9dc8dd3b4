# SPDX-License-Identifier: Apache-2.0
"""The pipe between a benchmark and the process of an engine, without an engine; and what a worker may import."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import worker, workloads
from benchmarks.engines import Column, Engine

EXIT = 99
STUB = """
import sys
sys.path.insert(0, {root!r})
from benchmarks import worker

def load():
    print("what an import prints")
    return {{"start": lambda command: {{"flags": command["flags"]}}, "play": play}}

def play(command):
    print("what an engine prints")
    sessions = worker.sessions_of(command)
    if not sessions:
        raise ValueError("nothing to play")
    if sessions[0].turns[0].answer == {exit}:
        sys.exit(1)
    return {{"answers": [turn.answer for session in sessions for turn in session.turns]}}

worker.answer_commands(load)
"""


@pytest.fixture
def engine(tmp_path):
    program = tmp_path / "stub.py"
    program.write_text(STUB.format(root=str(Path(worker.__file__).parents[1]), exit=EXIT))
    opened = Engine(Column("stub", sys.executable, {"dtype": "float32"}, {}, (str(program),)), tmp_path / "log")
    yield opened
    opened.close()


def test_a_command_gets_one_answer_whatever_the_engine_prints(engine, tmp_path):
    assert engine.start(model="m") == {"flags": {"model": "m", "dtype": "float32"}}
    assert engine.play(workloads.of_prompts([[1, 2], [3]], 4)) == {"answers": [4, 4]}
    engine.close()
    assert (tmp_path / "log").read_text() == "what an import prints\nwhat an engine prints\n"


def test_a_command_that_fails_leaves_the_worker_running(engine):
    with pytest.raises(RuntimeError, match="stub: ValueError: nothing to play"):
        engine.play([])
    assert engine.play(workloads.of_prompts([[1]], 2)) == {"answers": [2]}


def test_a_worker_that_ends_is_told_with_its_log(engine, tmp_path):
    with pytest.raises(RuntimeError, match=f"stub: the process ended; see {tmp_path / 'log'}"):
        engine.play(workloads.of_prompts([[1]], EXIT))


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_sessions_are_the_same_on_the_other_side(name):
    sessions = workloads.make(name, 8, 500, 1, 0.3)
    command = json.loads(json.dumps({"sessions": [asdict(session) for session in sessions]}))
    assert worker.sessions_of(command) == sessions


def test_prompts_are_played_at_once_or_one_after_the_other():
    sessions = workloads.of_prompts([[1, 2], [3]], 4)
    assert [(s.turns[0].new, s.turns[0].answer, s.after) for s in sessions] == [([1, 2], 4, None), ([3], 4, None)]
    assert [session.after for session in workloads.in_turn(sessions)] == [None, 0]


def test_the_worker_runs_where_only_vllm_is_installed():
    imported = set()
    for node in ast.walk(ast.parse(Path(worker.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"vllm"}


def test_no_module_beside_the_worker_hides_another_one():
    """A script's folder is searched first for what it imports."""
    names = {file.stem for file in Path(worker.__file__).parent.glob("*.py")}
    assert not names & {*sys.stdlib_module_names, "vllm", "torch", "transformers", "numpy"}
