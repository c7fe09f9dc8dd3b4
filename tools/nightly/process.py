# SPDX-License-Identifier: Apache-2.0
"""A function in a process of its own: it takes JSON, gives JSON, and whatever it held is free when it has ended.

Owns: the command, the log, which process it is, and the empty caches of a fresh compilation. Never: an import of torch
or vLLM here: a Gaudi belongs to the process that touched it first, until that one ends.

Ordering rule: the caches of a fresh compilation are shown to be empty before the process starts.

    python -m tools.nightly.process MODULE:FUNCTION JSON
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.nightly.setting import ROOT, Setting

RESULT = "RESULT "
LAST_LINES = 30
NOISE = re.compile(r"leaked|nanobind|skipped remainder|Warming up")  # what libraries say at an exit, and progress bars
NEVER_KEPT = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}


def call(target: str, arguments: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> Any:
    """``MODULE:FUNCTION`` of ``arguments`` in a new process. Raises RuntimeError with the log's end when it fails."""
    command = [sys.executable, "-m", "tools.nightly.process", target, json.dumps(arguments)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    merged = {**os.environ, **environment, "PYTHONPATH": path}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=merged, stdout=file, stderr=subprocess.STDOUT, check=False)
    lines = log.read_text(errors="replace").splitlines()
    results = [line for line in lines if line.startswith(RESULT)]
    if done.returncode != 0 or len(results) != 1:
        told = [line for line in lines if not NOISE.search(line)]
        last = "\n".join(f"  | {line}" for line in told[-LAST_LINES:])
        raise RuntimeError(f"{target} ended with exit code {done.returncode} and {len(results)} results\n{last}")
    return json.loads(results[0].removeprefix(RESULT))


def apply(setting: Setting, target: str, arguments: Mapping[str, Any], environment: Mapping[str, str], log: str) -> Any:
    """``MODULE:FUNCTION`` of ``arguments``: in a process of its own on a device, here on a host. ``log``: its name."""
    if setting.is_device:
        return call(target, arguments, environment, Path(setting.out) / "logs" / f"{log}.log")
    with variables(environment):
        return _function(target)(**arguments)


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """``values`` in this process's environment while inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def fresh_caches(folder: Path) -> dict[str, str]:
    """Variables that make a process compile everything anew, with what it keeps in ``folder``, which must be empty."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise RuntimeError(f"{folder} is not empty: what is in it could be used again")
    return {
        "PT_HPU_RECIPE_CACHE_CONFIG": f"{folder / 'recipes'},false,8192",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        **NEVER_KEPT,
    }


def _function(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def main(arguments: list[str]) -> None:
    target, text = arguments
    found = _function(target)(**json.loads(text))
    print("\n" + RESULT + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
