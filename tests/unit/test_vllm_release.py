# SPDX-License-Identifier: Apache-2.0
"""Beside another release of vLLM the plugin is no platform: vLLM ends with a sentence and does not take another one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import vllm_gaudi
from vllm_gaudi import cli, compat, envs

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "vllm_gaudi.platform.HpuPlatform"


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """``version`` of vLLM is installed, as far as its package metadata say; None: it has none."""
    monkeypatch.setattr(compat, "define_torchvision_schemas", lambda: None)
    monkeypatch.setattr(envs, "set_default", lambda name, value: None)

    def found(name: str) -> str:
        assert name == "vllm"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)


@pytest.mark.parametrize(
    "version",
    ["0.30.0", "0.30.0+cpu", "0.30.0+gaudi", "0.30.0.dev0", "0.30.0.dev7+g1a2b3c4", "0.30.0rc1", "0.30.0.post1"],
)
def test_builds_of_the_release_are_supported(monkeypatch, version):
    install(monkeypatch, version)
    assert vllm_gaudi.unsupported_vllm() is None
    assert vllm_gaudi.register() == PLATFORM


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.31.0", "0.31.0"),
        ("0.30.1", "0.30.1"),
        ("0.30.1.dev3+g1a2b3c4", "0.30.1"),
        ("0.29.0+cpu", "0.29.0"),
        ("0.30.01", "0.30.01"),
        ("0.3.0", "0.3.0"),
        ("10.30.0", "10.30.0"),
    ],
)
def test_another_release_is_named_beside_the_supported_one_and_what_to_install(monkeypatch, version, release):
    install(monkeypatch, version)
    path = vllm_gaudi.register()
    assert path is not None and path != PLATFORM
    module, _, name = path.rpartition(".")
    with pytest.raises(RuntimeError) as raised:  # as vLLM makes its platform
        getattr(sys.modules[module], name)()
    said = str(raised.value)
    assert f"written for vLLM {vllm_gaudi.VLLM_RELEASE}" in said
    assert f"vLLM {version} is installed" in said
    assert f"Install vLLM {vllm_gaudi.VLLM_RELEASE}, or a vllm_gaudi whose version begins with {release}." in said


@pytest.mark.parametrize("version", [None, "dev"])
def test_a_vllm_of_unknown_release_is_not_taken_on_trust(monkeypatch, version):
    install(monkeypatch, version)
    said = vllm_gaudi.unsupported_vllm()
    assert said is not None and said.endswith(f"Install vLLM {vllm_gaudi.VLLM_RELEASE}.")
    assert vllm_gaudi.register() != PLATFORM


def test_vllm_ends_with_the_sentence_where_its_own_platform_could_serve(tmp_path):
    """A vLLM built for CPUs has a platform of its own, which it would take if this one were merely absent."""
    info = tmp_path / "vllm-0.31.0+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n")
    done = subprocess.run(
        [sys.executable, "-c", "from vllm.platforms import current_platform; print('PLATFORM', current_platform)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 1 and "PLATFORM" not in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: vllm_gaudi is written for vLLM 0.30.0, and vLLM 0.31.0+cpu is installed.")


@pytest.mark.parametrize("arguments", [("plan", "MODEL"), ("why", "a", "b", "--model", "MODEL")])
def test_the_command_ends_with_the_sentence_too(monkeypatch, capsys, arguments):
    install(monkeypatch, "0.31.0")
    assert cli.main(arguments) == 2
    assert "vLLM 0.31.0 is installed" in capsys.readouterr().err


def test_a_command_that_needs_no_vllm_runs(monkeypatch, capsys):
    install(monkeypatch, None)
    assert cli.main(("why", "[1, 2, 3, 4, 5]", "[1, 2, 3, 4, 6]", "--block-size", "2")) == 0
