# SPDX-License-Identifier: Apache-2.0
"""Runs a script in a process of its own that finds the stub of Gaudi's bridge, or none.

Owns: that process's environment. Never: the stub in the process of a test: importing it changes torch for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STUBS = ROOT / "tests" / "stubs"

# Names that a test's own process may carry and a new one shall not.
_DROPPED = ("VLLM_USE_FAKE_HPU", "VLLM_GAUDI_COMPILE", "PT_HPU", "RUNTIME_SCALE", "FUSER_", "ENABLE_", "PYTHONPATH")


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


def facts(*command: str, **options: Any) -> dict[str, Any]:
    """The object behind the word FACTS in the last such line that the script printed."""
    lines = [line for line in run(*command, **options).splitlines() if line.startswith("FACTS ")]
    assert lines, "the script printed no facts"
    return json.loads(lines[-1].removeprefix("FACTS "))
