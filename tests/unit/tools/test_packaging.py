# SPDX-License-Identifier: Apache-2.0
"""The wheel: name, version, what it needs (nothing), entry points under vllm-gaudi's names, the command; and the
version from git."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import setup as packaging

ROOT = Path(__file__).resolve().parents[3]
ENTRY_POINTS = {
    "console_scripts": {"vllm-gaudi": "vllm_gaudi.cli:main"},
    "vllm.platform_plugins": {"hpu": "vllm_gaudi:register"},
    "vllm.general_plugins": {
        "01.hpu_custom_utils": "vllm_gaudi:register_utils",
        "02.hpu_custom_ops": "vllm_gaudi:register_ops",
        "03.hpu_custom_models": "vllm_gaudi:register_models",
        "04.hpu_tool_parsers": "vllm_gaudi:register_tool_parsers",
    },
    "vllm.stat_logger_plugins": {"vllm_gaudi": "vllm_gaudi.v1.metrics:GaudiStatLogger"},
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without an index from a copy without git: the package, and folders that are not to be packed."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("vllm_gaudi", "tests/support", "tools"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        target,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = target.iterdir()
    with zipfile.ZipFile(path) as archive:
        yield path.name, archive


def read_info(archive, name):
    (path,) = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
    return archive.read(path).decode()


def test_it_is_pure_python_of_the_fallback_version_without_git(wheel):
    name, _ = wheel
    assert name == f"vllm_gaudi-{packaging.FALLBACK}-py3-none-any.whl"


def test_it_installs_neither_torch_nor_vllm_nor_anything_else(wheel):
    metadata = HeaderParser().parsestr(read_info(wheel[1], "METADATA"))
    assert metadata.get_all("Requires-Dist") is None
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.13"}


def test_it_carries_the_entry_points_that_vllm_looks_for_and_the_command(wheel):
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(read_info(wheel[1], "entry_points.txt"))
    assert {section: dict(parser[section]) for section in parser.sections()} == ENTRY_POINTS


def test_it_holds_every_module_of_the_package_and_nothing_else(wheel):
    packed = {name for name in wheel[1].namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vllm_gaudi").rglob("*.py")}
    assert packed - {"vllm_gaudi/py.typed"} == sources


def test_of_the_tests_support_it_holds_what_reproduces_a_problem_without_weights(wheel):
    found = {name for name in wheel[1].namelist() if name.startswith("vllm_gaudi/testing/")}
    kept = ("__init__", "checkpoints", "engine", "model_free")
    assert found == {f"vllm_gaudi/testing/{name}.py" for name in kept}, "tests/support is the place for the others"


@pytest.mark.parametrize(
    ("described", "version"),
    [
        ("v0.30.0.post1-0-gabc1234", "0.30.0.post1"),
        ("v0.30.0.post4-0-gabc1234", "0.30.0.post4"),
        ("v0.30.0.post4-7-gabc1234", "0.30.0.post5.dev7"),
    ],
)
def test_the_version_counts_from_the_last_tag(described, version):
    assert packaging.version_from_describe(described) == version


@pytest.mark.parametrize("described", ["v0.30.0-1-gabc", "v0.29.0.post1-0-gabc", "v0.30.0.post1", ""])
def test_a_tag_of_another_shape_is_an_error_and_not_a_guess(described):
    with pytest.raises(ValueError, match="expected v0.30.0.postN"):
        packaging.version_from_describe(described)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """An empty repository in setup.py's place; returns a function that runs git there."""
    monkeypatch.setattr(packaging, "ROOT", tmp_path)
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false"]

    def git(*arguments):
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    return git


def test_tags_of_the_line_give_the_version(repository):
    assert packaging.version() == packaging.FALLBACK
    repository("tag", "v0.30.0.post2")
    assert packaging.version() == "0.30.0.post2"
    repository("commit", "-q", "--allow-empty", "-m", "second")
    assert packaging.version() == "0.30.0.post3.dev1"
    repository("tag", "unrelated")
    assert packaging.version() == "0.30.0.post3.dev1"


def test_a_source_archive_keeps_its_own_version(tmp_path, monkeypatch):
    monkeypatch.setattr(packaging, "ROOT", tmp_path)
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm_gaudi\nVersion: 0.30.0.post9\n")
    assert packaging.version() == "0.30.0.post9"


def test_a_copy_inside_another_repository_does_not_take_its_version(repository, tmp_path, monkeypatch):
    repository("tag", "v0.30.0.post2")
    copy = tmp_path / "vendored"
    copy.mkdir()
    monkeypatch.setattr(packaging, "ROOT", copy)
    assert packaging.version() == packaging.FALLBACK
