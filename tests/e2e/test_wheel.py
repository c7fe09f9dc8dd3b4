# SPDX-License-Identifier: Apache-2.0
"""The wheel as a user has it: built from a clean copy, installed alone, serving from a folder that is not the checkout.

Owns: a virtual environment whose only package is the wheel. Everything else it sees is a view of this environment's
packages: one link each, and none for the editable installation, so that the plugin can only be found through the wheel.
Never: a network, or a second installation of torch and vLLM.

Ordering rule: where imports come from is shown before anything is served.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools import demo
from vllm_gaudi import device

ROOT = Path(__file__).resolve().parents[2]
B = 16
PROMPT = [10 + (i * i * 7 + i * 13) % 480 for i in range(3 * B + 5)]
GROUPS = ("vllm.platform_plugins", "vllm.general_plugins", "vllm.stat_logger_plugins")

PROBE = f"""
import importlib.metadata as metadata, importlib.util, json
print(json.dumps({{
    "package": importlib.util.find_spec("vllm_gaudi").origin,
    "vllm": importlib.util.find_spec("vllm").origin,
    "version": metadata.version("vllm_gaudi"),
    "installed": sum(found.name == "vllm_gaudi" for found in metadata.distributions()),
    "points": {{g: [p.value for d in metadata.distributions() for p in d.entry_points if p.group == g and
                p.value.startswith("vllm_gaudi")] for g in {GROUPS!r}}},
}}))
"""


@dataclass(frozen=True)
class Installed:
    """``folder`` is the working directory of everything that runs here: neither the checkout nor the copy."""

    python: Path
    site: Path
    folder: Path

    def environment(self) -> dict[str, str]:
        left_out = ("PYTHONPATH", "PYTHONHOME", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_PLUGINS")
        kept = {key: value for key, value in os.environ.items() if key not in left_out}
        return kept | {"VLLM_SKIP_WARMUP": "1", "HF_HUB_OFFLINE": "1"}

    def run(self, *arguments: str) -> str:
        return run([str(self.python), *arguments], self.folder, self.environment())


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def copy_sources(target: Path) -> None:
    """What git knows of the checkout or would add to it, as it stands now; no build output, no caches."""
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT, dict(os.environ))
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def build_command() -> list[str]:
    """What ``make wheel`` would run, with this Python."""
    (line,) = [
        text for text in run(["make", "-n", "wheel"], ROOT, dict(os.environ)).splitlines() if "pip wheel" in text
    ]
    return [sys.executable, *shlex.split(line)[1:]]


def link_packages(view: Path) -> None:
    """One link for each entry of this environment's package folders, without what belongs to this project."""
    view.mkdir()
    for folder in (Path(path) for path in sys.path):
        if folder.name not in ("site-packages", "dist-packages") or not folder.is_dir():
            continue
        for entry in folder.iterdir():
            is_ours = "vllm_gaudi" in entry.name
            if not is_ours and entry.suffix != ".pth" and not (view / entry.name).exists():
                (view / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    top = tmp_path_factory.mktemp("wheel")
    source, away, view = top / "source", top / "away", top / "view"
    source.mkdir()
    away.mkdir()
    copy_sources(source)
    offline = dict(os.environ) | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    offline.pop("PYTHONPATH", None)
    run(build_command(), source, offline)
    (wheel,) = (source / "dist").glob("*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(top / "venv")], away, offline)
    python = top / "venv" / "bin" / "python"
    site = Path(
        run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], away, offline).strip()
    )
    link_packages(view)
    (site / "packages.pth").write_text(f"{view}\n")
    moved = shutil.move(wheel, away)
    shutil.rmtree(source)
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", str(moved)], away, offline)
    return Installed(python, site, away)


@pytest.fixture(scope="module")
def served(installed: Installed, checkpoint: Callable[..., Path]) -> Iterator[demo.Server]:
    port = demo.free_port()
    command = [
        *(str(installed.python), "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint("q35_dense"))),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", demo.MODEL_NAME),
        *("--dtype", "float32", "--block-size", str(B), "--max-model-len", "256", "--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(installed.environment()):
            patch.delenv(name)
        for name, value in installed.environment().items():
            patch.setenv(name, value)
        patch.chdir(installed.folder)
        server = demo.Server(command, port, installed.folder / "server.log")
    try:
        server.wait_until_healthy(timeout=300)
        yield server
    except demo.PhaseFailed as failed:
        pytest.fail("\n".join([str(failed), *server.last_lines(30)]))
    finally:
        server.stop()


def test_the_plugin_is_the_wheels_and_is_found_once(installed: Installed) -> None:
    found = json.loads(installed.run("-c", PROBE))
    assert Path(found["package"]).is_relative_to(installed.site) and not Path(found["package"]).is_relative_to(ROOT)
    assert re.fullmatch(r"0\.30\.0\.post\d+(\.dev\d+)?", found["version"])
    assert found["installed"] == 1
    assert [len(found["points"][group]) for group in GROUPS] == [1, 4, 1]
    assert len({value for values in found["points"].values() for value in values}) == 6
    assert not Path(found["vllm"]).is_relative_to(installed.site)


def complete(server: demo.Server) -> Any:
    body = {"model": demo.MODEL_NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 1, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as response:
        return json.load(response)


@pytest.mark.slow
def test_it_serves_from_another_folder_and_the_second_answer_comes_out_of_the_cache(
    served: demo.Server, installed: Installed
) -> None:
    first, second = complete(served), complete(served)
    cached = [(answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0 for answer in (first, second)]
    assert cached == [0, 3 * B]
    one, other = (answer["choices"][0] for answer in (first, second))
    assert len(one["token_ids"]) == 8 and one["token_ids"] == other["token_ids"]
    assert one["logprobs"]["token_logprobs"] == other["logprobs"]["token_logprobs"]
    log = served.log_path.read_text()
    assert len(re.findall(rf"vllm_gaudi on {device.device_type()}: B = {B} tokens", log)) == 1
