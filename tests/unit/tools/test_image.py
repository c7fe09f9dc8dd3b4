# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile against the tree and the pins, and what holds an image's torch in place. Nothing is built here."""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import setup as packaging
from tools import image
from vllm_gaudi import device, envs

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "docker" / "Dockerfile.gaudi").read_text()
IGNORED = (ROOT / ".dockerignore").read_text()
OTHER_VARIABLES = {"PIP_BREAK_SYSTEM_PACKAGES", "HABANA_LOGS"}  # pip's and Gaudi's own


@dataclass(frozen=True)
class Instruction:
    stage: int  # 0 before the first FROM
    name: str
    text: str


def instructions(source: str) -> list[Instruction]:
    lines = [line for line in source.splitlines() if not line.lstrip().startswith("#")]
    stage, found = 0, []
    for text in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if text.strip():
            name, _, rest = text.strip().partition(" ")
            stage += name == "FROM"
            found.append(Instruction(stage, name, rest.strip()))
    return found


def pin(name: str) -> str:
    (found,) = re.findall(rf"^{name}==([\w.]+) ", image.HOST_PINS.read_text(), re.M)
    return found


def reaches_the_build(path: str) -> bool:
    """Whether .dockerignore lets a path of the tree through; the last line that matches decides."""
    parts = path.split("/")
    above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    passes = True
    for line in IGNORED.splitlines():
        pattern = line.strip().removeprefix("!")
        if pattern and not pattern.startswith("#"):
            pattern = pattern.removeprefix("**/")
            if any(fnmatch.fnmatch(name, pattern) for name in (*above, parts[-1])):
                passes = line.startswith("!")
    return passes


def faults(source: str) -> list[str]:
    """What is wrong with a Dockerfile of ours."""
    found = []
    all_of_it = instructions(source)
    last = all_of_it[-1].stage
    args = [it.text for it in all_of_it if it.name == "ARG"]
    if all_of_it[0] != Instruction(0, "ARG", "BASE_IMAGE"):
        found.append("BASE_IMAGE has a default, or is not the first word")
    if [it.text.split()[0] for it in all_of_it if it.name == "FROM"] != ["${BASE_IMAGE}"] * last or last < 2:
        found.append("a stage is built on something else than BASE_IMAGE, or there is one stage only")
    for name, _, value in (arg.partition("=") for arg in args if arg != "BASE_IMAGE"):
        if name != "VLLM_VERSION":
            found.append(f"nobody checks the argument {name}")
        elif {value} != {pin("vllm"), packaging.VLLM_RELEASE}:
            found.append(f"vLLM {value} is not the one of requirements/host.txt and setup.py")
    for text in re.findall(r"[a-z]+://\S+|\b[\w-]+(?:\.[\w-]+)+/[\w-]+\S*:\S+", source):
        if not text.startswith("http://127.0.0.1"):
            found.append(f"names a place outside: {text}")
    for it in all_of_it:
        words = it.text.split()
        if it.name == "COPY" and not it.text.startswith("--from"):
            found += [f"copies {path}, which is not there" for path in words[:-1] if not (ROOT / path).exists()]
            found += [f"{p} is kept out by .dockerignore" for p in words[:-1] if p != "." and not reaches_the_build(p)]
        if it.name == "ENV":
            names = [word.partition("=")[0] for word in words]
            known = {*envs.TABLE, *OTHER_VARIABLES, *device.BRIDGE_DEFAULTS} - {"VLLM_TARGET_DEVICE"}
            found += [f"sets {name}" for name in names if name not in known]
        if "VLLM_TARGET_DEVICE=" in it.text and (it.name, it.stage) != ("RUN", 1):
            found.append("VLLM_TARGET_DEVICE is set outside the build of vLLM")
        if it.name == "RUN":
            found += pip_faults(it.text)
    runs = [it.text for it in all_of_it if it.name == "RUN" and it.stage == last and "pip install" in it.text]
    if len(runs) != 1 or not re.search(r"image\.py write .*pip install.*image\.py check constraints\.txt$", runs[0]):
        found.append("pip runs in the last stage and the image's torch is not looked at before and after")
    users = [it.text for it in all_of_it if it.name == "USER" and it.stage == last]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("the server runs as root")
    entry = [it.text for it in all_of_it if it.name == "ENTRYPOINT"]
    if [json.loads(text) for text in entry] != [["env", "-u", "VLLM_TARGET_DEVICE", "vllm", "serve"]]:
        found.append("the entrypoint is not `vllm serve` without VLLM_TARGET_DEVICE")
    if not any(it.name == "HEALTHCHECK" for it in all_of_it):
        found.append("has no HEALTHCHECK")
    return found


def pip_faults(text: str) -> list[str]:
    found = []
    for command in re.split(r"&&", text):
        if " pip install" in command and not re.search(r"-c \S*constraints\.txt|--no-deps", command):
            found.append(f"pip may replace torch: {command.strip()}")
        if " pip wheel" in command and "--no-deps" not in command:
            found.append(f"pip builds more than it is told to: {command.strip()}")
    return found


def test_the_dockerfile_agrees_with_the_tree_and_the_pins():
    assert not faults(DOCKERFILE)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ARG BASE_IMAGE\n", "ARG BASE_IMAGE=registry.example.org/image:1\n", "BASE_IMAGE has a default"),
        ("ARG BASE_IMAGE\n", "ARG BASE_IMAGE\n# registry.example.org/image:1\n", "names a place outside"),
        ("FROM ${BASE_IMAGE}\n", "FROM debian:13\n", "on something else"),
        ("ARG VLLM_VERSION=0.30.0\n", "ARG VLLM_VERSION=0.30.1\n", "0.30.1 is not the one of"),
        ("ARG VLLM_VERSION=0.30.0\n", "ARG VLLM_VERSION=0.30.0\nARG TORCH=2.12\n", "nobody checks the argument TORCH"),
        ("COPY tools/image.py ", "COPY tools/other.py ", "tools/other.py, which is not there"),
        ("COPY requirements ", "COPY docs ", "docs is kept out"),
        ("ENV PT_HPU_LAZY_MODE=0", "ENV VLLM_TARGET_DEVICE=empty", "sets VLLM_TARGET_DEVICE"),
        ("ENV PT_HPU_LAZY_MODE=0", "ENV PT_HPU_LAZYMODE=0", "sets PT_HPU_LAZYMODE"),
        ("-c constraints.txt -c", "-c", "pip may replace torch"),
        ("--no-deps /wheels", "/wheels", "pip may replace torch"),
        ("--no-cache-dir --no-deps --no-build-isolation", "--no-build-isolation", "more than it is told to"),
        ("    && python3 tools/image.py check constraints.txt\n", "    && true\n", "is not looked at"),
        ("USER 10001", "USER root", "as root"),
        ('"env", "-u", "VLLM_TARGET_DEVICE", ', "", "without VLLM_TARGET_DEVICE"),
        ("HEALTHCHECK", "STOPSIGNAL", "no HEALTHCHECK"),
    ],
    ids=range(16),
)
def test_a_planted_fault_is_found(old, new, said):
    assert old in DOCKERFILE
    found = faults(DOCKERFILE.replace(old, new))
    assert any(said in fault for fault in found), found


def test_everything_that_the_wheel_is_built_from_reaches_the_build_and_no_more():
    for path in ("setup.py", "pyproject.toml", "README.md", "LICENSE", ".git", "vllm_gaudi/v1/worker/state_slots.py"):
        assert (ROOT / path).exists() or path == ".git"
        assert reaches_the_build(path), path
    for path in (".venv", ".cache/checkpoints", "tests/unit", "docs/index.md", "dist", "vllm_gaudi/__pycache__"):
        assert not reaches_the_build(path), path


FOUND = [("torch", "2.13.0a0+git1234"), ("Habana_Torch.Plugin", "1.24.2.1"), ("numpy", "2.0"), ("torchvision", "0.28")]


def test_what_is_kept_is_torch_and_what_was_built_against_it():
    assert image.constraints(image.to_keep(FOUND)) == (
        "habana-torch-plugin==1.24.2.1\ntorch==2.13.0a0+git1234\ntorchvision==0.28\n"
    )
    with pytest.raises(LookupError, match="no torch"):
        image.to_keep([("torchvision", "0.28")])


def test_a_replaced_or_removed_package_is_named():
    kept = image.to_keep(FOUND)
    wanted = image.constraints(kept)
    assert not image.differences(wanted, kept | {"torchdata": "0.9"})
    replaced = kept | {"torch": "2.13.0"}
    del replaced["habana-torch-plugin"]
    assert image.differences(wanted, replaced) == [
        "habana-torch-plugin was 1.24.2.1 and is gone",
        "torch was 2.13.0a0+git1234 and is 2.13.0",
    ]


def test_a_torch_of_another_minor_release_is_refused():
    release = ".".join(pin("torch").split(".")[:2])
    image.check_release(f"{release}.7a0+git1234")
    for other in ("1.13.0", "2.1.0", "2.130.0"):
        with pytest.raises(LookupError, match=f"has torch {re.escape(other)}.* made for {release}"):
            image.check_release(other)


def test_write_then_check(tmp_path, monkeypatch, capsys):
    path = tmp_path / "constraints.txt"
    monkeypatch.setattr(image, "installed", lambda: FOUND)
    assert image.main(["write", str(path)]) == 0 == image.main(["check", str(path)])
    monkeypatch.setattr(image, "installed", lambda: [*FOUND[1:], ("torch", pin("torch"))])
    assert image.main(["check", str(path)]) == 1
    assert "pip must not replace it" in capsys.readouterr().err


def test_the_image_sets_what_the_bridge_shall_find():
    """torch may load the bridge before the plugin could."""
    wanted = {name: value for name, (value, _) in device.BRIDGE_DEFAULTS.items()}
    found = dict(re.findall(r"^(?:ENV|   ) *(\w+)=(\S+)", DOCKERFILE, re.M))
    assert {name: found.get(name) for name in wanted} == wanted
