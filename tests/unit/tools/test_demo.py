# SPDX-License-Identifier: Apache-2.0
"""The demo's flow against a stub server: the table, every failure names its phase, no process stays behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tools import demo

ROOT = Path(__file__).resolve().parents[3]
STUB = Path(__file__).with_name("stub_server.py")


def start_demo(tmp_path: Path, mode: str) -> subprocess.Popen:
    """The demo in a process of its own, with the stub in vLLM's place and no checkpoint made."""
    script = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from tools import demo
        demo.make_checkpoint = lambda name, dtype: Path("checkpoint")
        demo.START_SECONDS = 3.0
        demo.Server.wait_until_healthy.__defaults__ = (3.0, 0.5)
        command = lambda checkpoint, port: [sys.executable, {str(STUB)!r}, str(port), {mode!r}]
        sys.exit(demo.run("name", "float32", command, Path({str(tmp_path)!r})))
        """
    )
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def child_of_stub(tmp_path: Path) -> int:
    """Process id of the stub's child, from the server's log."""
    match = re.search(r"child (\d+)", (tmp_path / "server.log").read_text())
    assert match is not None
    return int(match[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_good_run_prints_every_phase_and_the_table(tmp_path):
    process = start_demo(tmp_path, "works")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert re.findall(r"^\[(\d)/4\]", out, re.M) == ["1", "2", "3", "4"]
    assert out.count("done in") == 4
    rows = [line.split() for line in out.splitlines() if re.match(r"\s*\d\s+\d", line)]
    assert [row[:3] for row in rows] == [["1", "10", "0"], ["2", "20", "1"], ["3", "30", "2"]]
    assert [row[-3:] for row in rows] == [["Answer", "number", str(turn)] for turn in (1, 2, 3)]
    assert not is_running(child_of_stub(tmp_path))


def test_a_server_that_ends_early_is_shown_with_its_last_lines(tmp_path):
    process = start_demo(tmp_path, "crash")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "phase 2/4 failed: start `vllm serve`" in err
    assert "exit code 3" in err
    assert "| ValueError: this flag does not fit" in err


def test_a_server_that_never_gets_healthy_is_given_up_and_ended(tmp_path):
    process = start_demo(tmp_path, "never-healthy")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "not ready after 3 s" in err
    assert re.search(r"\.\.\. \d s: child \d+", out)
    assert not is_running(child_of_stub(tmp_path))


@pytest.mark.parametrize(
    ("mode", "complaint"),
    [
        ("no-hit", "turn 2: nothing was reused"),
        ("other-answer", "turn 1: the answer differs from a cold run by inf"),
        ("other-logprobs", "turn 1: the answer differs from a cold run by 0.001"),
    ],
)
def test_a_miss_or_a_difference_from_the_cold_run_fails_the_demo(tmp_path, mode, complaint):
    process = start_demo(tmp_path, mode)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "phase 3/4 failed" in err and complaint in err
    assert not is_running(child_of_stub(tmp_path))


def test_an_api_error_names_the_chat_phase_and_the_turn(tmp_path):
    process = start_demo(tmp_path, "chat-error")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "phase 3/4 failed" in err
    assert "turn 1" in err and "no such prompt" in err
    assert not is_running(child_of_stub(tmp_path))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_behind(tmp_path, signum):
    process = start_demo(tmp_path, "never-healthy")
    deadline = time.monotonic() + 30
    log = tmp_path / "server.log"
    while time.monotonic() < deadline and not (log.is_file() and "child" in log.read_text()):
        time.sleep(0.02)
    os.kill(process.pid, signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert f"{signal.Signals(signum).name} in phase 2/4" in err
    assert not is_running(child_of_stub(tmp_path))


def test_a_signal_while_the_server_is_being_started_is_raised_once_it_is_known():
    previous = {signum: signal.getsignal(signum) for signum in demo.STOP_SIGNALS}
    reached_end = False
    try:
        with pytest.raises(demo.Stopped) as stopped, demo.signals_wait():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            reached_end = True
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    assert reached_end
    assert stopped.value.exit_code == 128 + signal.SIGTERM


def test_the_command_is_what_a_user_would_type(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "vllm").touch()
    command = demo.serve_command(Path("some/checkpoint"), 1234)
    assert command[:3] == [str(tmp_path / "vllm"), "serve", "some/checkpoint"]
    assert "--enable-prompt-tokens-details" in command
    assert command[command.index("--host") + 1] == "127.0.0.1"


def test_a_vllm_outside_the_environment_is_started_with_this_python(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = demo.serve_command(Path("some/checkpoint"), 1234)
    assert command[:2] == [str(tmp_path / "python"), "-m"] and command[3] == "serve"


def test_the_table_shows_unprintable_answers_on_one_line():
    text = "two\nlines\x00 and more than fits into the column"
    warm = demo.Answer(100, 96, 0.25, 40.0, text, ("two", "lines"), (-0.5, -0.25))
    cold = demo.Answer(100, 0, 0.5, 40.0, text, ("two", "lines"), (-0.5, -0.25 + 1e-6))
    turn = demo.Turn(1, warm, cold)
    assert turn.verdict == "yes, to 1e-06"
    table = demo.format_table([turn])
    assert len(table.splitlines()) == 3
    assert "two.lines. and more" in table and table.endswith("...")
