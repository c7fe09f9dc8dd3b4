# SPDX-License-Identifier: Apache-2.0
"""One parser for all benchmarks: each command has a line of help, its own options, and what runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command_line


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_a_command_is_named_after_its_module_and_needs_no_option(name):
    module = command_line.COMMANDS[name]
    assert module.__name__ == f"benchmarks.{name}"
    assert command_line.parser().parse_args([name]).run is module.run


def test_help_has_a_line_for_each_command(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name, module in command_line.COMMANDS.items():
        first_words = " ".join((module.__doc__ or "").split()[:3])
        assert re.search(rf"\n    {name}\s+{re.escape(first_words)}", text), name


def test_a_command_is_told_how_it_was_called(monkeypatch):
    called = []
    monkeypatch.setattr(command_line.COMMANDS["speed"], "run", called.append)
    command_line.main(["speed", "--size", "tiny", "--peer", "/a place/python"])
    assert called[0].size == "tiny"
    assert called[0].command == "python -m benchmarks speed --size tiny --peer '/a place/python'"


def test_without_a_command_nothing_runs(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main([])
    assert ended.value.code == 2 and "COMMAND" in capsys.readouterr().err


def test_the_parser_needs_neither_torch_nor_vllm():
    """A command sets variables that are read when they are imported."""
    check = "import sys, benchmarks.__main__ as b; b.parser(); print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    root = Path(command_line.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", check], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
