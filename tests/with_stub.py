# SPDX-License-Identifier: Apache-2.0
"""Runs a script in a process of its own that finds the stub of Gaudi's bridge, or none.

Owns: that process's environment. Never: the stub in the process of a test: importing it changes torch for good.

Ordering rule: ``run`` starts Python anew. ``facts`` forks a process that has imported torch and what else is neither
vLLM's, nor ours, nor the bridge's: importing those costs several times what most scripts do.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STUBS = ROOT / "tests" / "stubs"

# Names that a test's own process may carry and a new one shall not.
_DROPPED = ("VLLM_USE_FAKE_HPU", "VLLM_GAUDI_COMPILE", "PT_HPU", "RUNTIME_SCALE", "FUSER_", "ENABLE_", "PYTHONPATH")

# torchvision is not among them: it can be imported only once the package has prepared torch for it.
_IMPORTED = ("torch", "torch._dynamo.backends.registry", "torch._inductor.config", "transformers", "openai", "triton")


def environment(with_stub: bool = True, **variables: str) -> dict[str, str]:
    path = [str(STUBS)] * with_stub + [str(ROOT)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    return {**kept, "PYTHONPATH": os.pathsep.join(path), **variables}


def run(*command: str, with_stub: bool = True, timeout: float = 500, **variables: str) -> str:
    """What ``python command`` printed. Fails with the end of its errors."""
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(with_stub, **variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def forked(*command: str, with_stub: bool = True, **variables: str) -> str:
    """As ``run``, for ``-c script`` or ``-m module arguments``, by ``fork``."""
    done = fork(command, environment(with_stub, **variables))
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def fork(command: tuple[str, ...], variables: dict[str, str], timeout: float = 500) -> subprocess.CompletedProcess[str]:
    """``python command`` in an environment of ``variables``, from a process that has imported much already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = context.Process(target=_script, args=(command, variables, out, err))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"{command} runs after {timeout} seconds: {err.read_text()[-4000:]}")
        assert process.exitcode is not None
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def _script(command: tuple[str, ...], variables: dict[str, str], out: Path, err: Path) -> None:
    """In the forked process: what ``python command`` does in an environment of ``variables``."""
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        stream.flush()
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    importlib.invalidate_caches()
    (kind, what), sys.argv[1:] = command[:2], command[2:]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(what, "<script>", "exec"), main.__dict__)
    except Exception:  # noqa: BLE001 (told by the exit code, as a process of its own would)
        traceback.print_exc()
        sys.exit(1)


def facts(*command: str, is_fresh: bool = False, **options: Any) -> dict[str, Any]:
    """What the script found out: see ``facts_in``. ``is_fresh``: by ``run``."""
    return facts_in((run if is_fresh else forked)(*command, **options))


def facts_in(printed: str) -> dict[str, Any]:
    """The object after the word FACTS in the last such line."""
    lines = [line for line in printed.splitlines() if line.startswith("FACTS ")]
    assert lines, "the script printed no facts"
    return json.loads(lines[-1].removeprefix("FACTS "))
