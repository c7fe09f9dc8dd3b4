# SPDX-License-Identifier: Apache-2.0
"""Makes .venv and installs into it what requirements/ pins, vLLM and this package; does nothing when that is done
already.

Owns the order of the phases and the stamp. Runs on the standard library alone, as it runs before anything is
installed. Never changes anything outside .venv. The stamp is written last: an interrupted run starts over and pip
skips what is there.

On a Gaudi image (one whose Python has Gaudi's torch plugin) torch and vLLM are the image's own: .venv then sees the
image's packages and only the test tools and this package are installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".install-stamp"
LOG = VENV / "install.log"
HOST_PINS = ROOT / "requirements" / "host.txt"
BUILD_PINS = ROOT / "requirements" / "build.txt"
TEST_PINS = ROOT / "requirements" / "test.txt"
# Everything whose change asks for a new installation. setup.py and pyproject.toml carry the entry points.
INPUTS = (HOST_PINS, BUILD_PINS, TEST_PINS, ROOT / "setup.py", ROOT / "pyproject.toml", Path(__file__).resolve())
GAUDI_TORCH_PLUGIN = "habana-torch-plugin"
HEARTBEAT_SECONDS = 30
FAILURE_LINES = 40
LINE_WIDTH = 200  # pip lists all versions of a package on one line


class PhaseFailed(Exception):
    """A phase that did not finish; the message says what failed, the log holds the output."""


@dataclass(frozen=True)
class Phase:
    name: str
    run: Callable[[], None]


def stamp_key(inputs: Iterable[Path] = INPUTS, root: Path = ROOT) -> str:
    """Hash over the inputs' contents and the checkout's place (scripts in .venv/bin carry absolute paths)."""
    digest = hashlib.sha256(str(root).encode())
    for path in inputs:
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def is_installed(key: str, stamp: Path = STAMP) -> bool:
    return stamp.is_file() and stamp.read_text().strip() == key


def read_pin(name: str, pins: Path = HOST_PINS) -> str:
    """The requirement ``name==version`` of a pins file. Raises PhaseFailed where it is missing."""
    for line in pins.read_text().splitlines():
        requirement = line.partition("#")[0].strip()
        if re.match(rf"{re.escape(name)}\s*==", requirement):
            return requirement
    raise PhaseFailed(f"{pins.name} holds no pin of {name}")


def is_gaudi_image() -> bool:
    """Whether the Python that .venv is made from has Gaudi's torch plugin."""
    try:
        importlib.metadata.version(GAUDI_TORCH_PLUGIN)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run_logged(command: list[str], extra_env: dict[str, str] | None = None) -> None:
    """Runs a command with its output in the log. Raises PhaseFailed when it exits non-zero."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VLLM_TARGET_DEVICE")}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", **(extra_env or {})}
    start = time.monotonic()
    with LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    code = process.wait(timeout=HEARTBEAT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    print(f"      ... {time.monotonic() - start:.0f} s", flush=True)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code != 0:
        raise PhaseFailed(f"exit code {code} of: {' '.join(command[:8])}{' ...' if len(command) > 8 else ''}")


def pip_install(*arguments: str, extra_env: dict[str, str] | None = None) -> None:
    run_logged([str(VENV / "bin" / "python"), "-m", "pip", "install", *arguments], extra_env)


def make_venv() -> None:
    """Creates .venv, or makes it anew where it belongs to another place or another Python."""
    if (VENV / "bin" / "python").exists() and venv_is_usable():
        return
    venv.create(VENV, clear=True, with_pip=True, symlinks=True, system_site_packages=is_gaudi_image())


def venv_is_usable() -> bool:
    """Whether .venv/bin/python starts, is of a supported version and has a pip made for this very directory."""
    probe = "import sys, pip; print(sys.prefix); sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))"
    done = subprocess.run([VENV / "bin" / "python", "-c", probe], capture_output=True, text=True, check=False)
    scripts = VENV / "bin" / "pip"
    first_line = scripts.read_text(errors="replace").partition("\n")[0] if scripts.is_file() else ""
    return done.returncode == 0 and Path(done.stdout.strip()) == VENV and str(VENV) in first_line


def install_tools() -> None:
    pip_install("-r", str(BUILD_PINS), "-r", str(TEST_PINS), "-c", str(HOST_PINS))


def install_torch() -> None:
    pip_install(read_pin("torch"), "-c", str(HOST_PINS), "-c", str(BUILD_PINS))


def install_vllm() -> None:
    """vLLM from its source archive for the "empty" target: its Python code, no device code, any platform plugin."""
    requirement = read_pin("vllm")
    if installed_version("vllm") == requirement.partition("==")[2]:
        return
    build_env = {
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": requirement.partition("==")[2],
        "CARGO_NET_OFFLINE": "true",  # the optional Rust parts would fetch hundreds of crates and are not used
    }
    pip_install("--no-deps", "--no-build-isolation", "--no-binary", "vllm", requirement, extra_env=build_env)


def install_vllm_requirements() -> None:
    """What the installed vLLM's metadata asks for, without its extras, under the pins."""
    probe = "import importlib.metadata as m; print(*(m.requires('vllm') or ()), sep='\\n')"
    done = subprocess.run([VENV / "bin" / "python", "-c", probe], capture_output=True, text=True, check=True)
    requirements = [line for line in done.stdout.splitlines() if not re.search(r";.*\bextra\s*==", line)]
    listing = VENV / "vllm-requirements.txt"
    listing.write_text("\n".join(requirements) + "\n")
    pip_install("-r", str(listing), "-c", str(HOST_PINS), "-c", str(BUILD_PINS), "-c", str(TEST_PINS))


def install_torchvision() -> None:
    pip_install("--no-deps", read_pin("torchvision"))


def install_plugin() -> None:
    pip_install("--no-deps", "--no-build-isolation", "-e", str(ROOT))


def check_gaudi_image() -> None:
    """On a Gaudi image vLLM has to be there already, in the pinned release."""
    expected, found = read_pin("vllm").partition("==")[2], installed_version("vllm")
    if found is None or found.partition("+")[0] != expected:
        raise PhaseFailed(
            f"this Gaudi image has vLLM {found}, the plugin needs {expected}. Over the image's torch: "
            f"VLLM_TARGET_DEVICE=empty pip install --no-build-isolation --no-binary vllm vllm=={expected}"
        )


def check_installation() -> None:
    run_logged([str(VENV / "bin" / "python"), "-m", "pip", "check"])


def installed_version(distribution: str) -> str | None:
    """Version of a distribution that .venv sees, or None."""
    probe = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    done = subprocess.run([VENV / "bin" / "python", "-c", probe], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def phases(on_gaudi: bool) -> list[Phase]:
    """In order. Tools come first (vLLM's build imports them), torch before vLLM (its setup.py imports torch)."""
    tools = Phase("build and test tools", install_tools)
    plugin = Phase("vllm_gaudi itself, editable", install_plugin)
    if on_gaudi:
        return [tools, Phase("the image's own torch and vLLM: checked, not touched", check_gaudi_image), plugin]
    return [
        tools,
        Phase(read_pin("torch").replace("==", " "), install_torch),
        Phase(
            read_pin("vllm").replace("==", " ") + ", built from its source archive without device code", install_vllm
        ),
        Phase("what vLLM asks for", install_vllm_requirements),
        Phase(read_pin("torchvision").replace("==", " "), install_torchvision),
        plugin,
        Phase("check that all requirements hold", check_installation),
    ]


def last_log_lines(log: Path = LOG, count: int = FAILURE_LINES) -> list[str]:
    if not log.is_file():
        return []
    lines = log.read_text(errors="replace").splitlines()
    return [line[:LINE_WIDTH] for line in lines if not line.startswith("WARNING: Location")][-count:]


def run_phases(todo: list[Phase]) -> bool:
    """Runs all phases with a line before and after each; on a failure says which, shows the log's end, returns
    False."""
    for number, phase in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {phase.name}", flush=True)
        start = time.monotonic()
        try:
            phase.run()
        except (PhaseFailed, subprocess.SubprocessError, OSError) as error:
            print("\n".join(f"  | {line}" for line in last_log_lines()), file=sys.stderr)
            print(f"install: phase {number}/{len(todo)} failed: {phase.name}\n  {error}", file=sys.stderr)
            print(f"  whole output: {LOG.relative_to(ROOT)}", file=sys.stderr)
            return False
        print(f"      done in {time.monotonic() - start:.1f} s", flush=True)
    return True


def have_extra(pins: Path) -> bool:
    """Install what one more pins file names into .venv, unless its stamp says that this is done. Says what failed."""
    name = pins.stem
    key, stamp = stamp_key((pins,)), VENV / f".{name}-stamp"
    if is_installed(key, stamp):
        return True
    constraints = [part for path in (HOST_PINS, BUILD_PINS, TEST_PINS) for part in ("-c", str(path))]
    phase = Phase(f"requirements/{pins.name}", lambda: pip_install("-r", str(pins), *constraints))
    if not run_phases([phase]):
        return False
    stamp.write_text(key + "\n")
    return True


def main() -> int:
    """Without arguments .venv itself; with names of pins files what those name, into a .venv that is there."""
    if sys.argv[1:]:
        return 0 if all(have_extra(Path(name).resolve()) for name in sys.argv[1:]) else 1
    key = stamp_key()
    if is_installed(key):
        return 0
    lock_path = ROOT / ".cache" / "install.lock"
    lock_path.parent.mkdir(exist_ok=True)
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(key):  # another make finished it meanwhile
            return 0
        start = time.monotonic()
        print("Setting up .venv: a few minutes the first time, nothing after", flush=True)
        make_venv()
        LOG.unlink(missing_ok=True)
        STAMP.unlink(missing_ok=True)
        if not run_phases(phases(is_gaudi_image())):
            return 1
        STAMP.write_text(key + "\n")
        print(f"Setting up .venv took {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("install: interrupted; the next run goes on from here", file=sys.stderr)
        sys.exit(130)
