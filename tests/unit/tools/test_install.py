# SPDX-License-Identifier: Apache-2.0
"""The installer's stamp, its pins and its failure report; nothing here installs anything."""

import re
import sys
from pathlib import Path

import pytest

from tools import install

ROOT = Path(__file__).resolve().parents[3]
PIN = re.compile(r'[A-Za-z0-9-]+==[\w.]+(; python_version [<>]=? "[\d.]+")?')


def test_the_stamp_holds_until_an_input_changes(tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("torch==1.0\n")
    stamp = tmp_path / "stamp"
    key = install.stamp_key([pins], tmp_path)
    assert not install.is_installed(key, stamp)
    stamp.write_text(key + "\n")
    assert install.is_installed(install.stamp_key([pins], tmp_path), stamp)
    pins.write_text("torch==1.1\n")
    assert not install.is_installed(install.stamp_key([pins], tmp_path), stamp)


def test_the_stamp_does_not_hold_in_a_moved_checkout(tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("torch==1.0\n")
    assert install.stamp_key([pins], tmp_path) != install.stamp_key([pins], tmp_path / "elsewhere")


def test_moving_text_from_one_input_to_the_next_changes_the_stamp(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("one two")
    second.write_text("")
    before = install.stamp_key([first, second], tmp_path)
    first.write_text("one ")
    second.write_text("two")
    assert install.stamp_key([first, second], tmp_path) != before


def test_every_input_of_the_stamp_is_there():
    assert all(path.is_file() for path in install.INPUTS)


@pytest.mark.parametrize("pins", [install.BUILD_PINS, install.HOST_PINS, install.TEST_PINS], ids=lambda path: path.name)
def test_every_requirement_is_an_exact_pin_that_says_why_or_is_plainly_a_tool(pins):
    lines = [line for line in pins.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert lines
    for line in lines:
        requirement, hash_sign, why = line.partition("#")
        assert PIN.fullmatch(requirement.strip()), line
        assert (hash_sign and why.strip()) or requirement.startswith("pytest=="), line


def test_read_pin_finds_whole_names_only():
    assert install.read_pin("torch").startswith("torch==")
    assert install.read_pin("torchvision").startswith("torchvision==")
    with pytest.raises(install.PhaseFailed, match="no pin of vision"):
        install.read_pin("vision")


def test_torch_comes_before_vllm_and_the_plugin_after_both():
    names = [phase.name for phase in install.phases(on_gaudi=False)]
    order = [
        next(i for i, name in enumerate(names) if name.startswith(start)) for start in ("torch ", "vllm ", "vllm_gaudi")
    ]
    assert order == sorted(order)


def test_a_gaudi_image_keeps_its_own_torch_and_vllm():
    runs = {phase.run for phase in install.phases(on_gaudi=True)}
    assert not runs & {install.install_torch, install.install_vllm, install.install_vllm_requirements}
    assert install.install_plugin in runs and install.check_gaudi_image in runs


def test_a_gaudi_image_with_another_vllm_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(install, "installed_version", lambda name: "0.29.0")
    with pytest.raises(install.PhaseFailed, match=r"has vLLM 0\.29\.0, the plugin needs .*VLLM_TARGET_DEVICE=empty"):
        install.check_gaudi_image()
    monkeypatch.setattr(install, "installed_version", lambda name: "0.30.0+empty")
    install.check_gaudi_image()


def test_a_failing_phase_is_named_with_the_end_of_its_output(tmp_path, monkeypatch, capsys):
    log = tmp_path / "install.log"
    monkeypatch.setattr(install, "LOG", log)
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install.last_log_lines, "__defaults__", (log, 40))
    command = [sys.executable, "-c", "print('WARNING: Location x'); print('no such package'); raise SystemExit(7)"]
    todo = [
        install.Phase("first", lambda: None),
        install.Phase("second", lambda: install.run_logged(command)),
        install.Phase("third", lambda: pytest.fail("must not run")),
    ]
    assert not install.run_phases(todo)
    out, err = capsys.readouterr()
    assert "[1/3] first" in out and "[3/3]" not in out
    assert "phase 2/3 failed: second" in err and "exit code 7" in err
    assert "| no such package" in err and "| WARNING: Location" not in err


def test_commands_do_not_see_the_target_device_of_the_shell(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "LOG", tmp_path / "log")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    install.run_logged([sys.executable, "-c", "import os; print(os.environ.get('VLLM_TARGET_DEVICE', 'unset'))"])
    assert (tmp_path / "log").read_text().splitlines()[-1] == "unset"


def test_an_extra_that_is_installed_is_not_installed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "VENV", tmp_path)
    pins = tmp_path / "more.txt"
    pins.write_text("a==1\n")
    asked: list[str] = []
    monkeypatch.setattr(install, "run_phases", lambda phases: asked.append(phases[0].name) or True)
    assert install.have_extra(pins) and install.have_extra(pins)
    assert asked == ["requirements/more.txt"]
    pins.write_text("a==2\n")
    assert install.have_extra(pins)
    assert asked == ["requirements/more.txt"] * 2
    monkeypatch.setattr(install, "run_phases", lambda phases: False)
    pins.write_text("a==3\n")
    assert not install.have_extra(pins) and not install.have_extra(pins)
