# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks COMMAND``, from the checkout's root: every measurement is a command of one parser.

Owns: the names of the commands. Never: an import of torch or vLLM: a command imports what it measures when it runs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from types import ModuleType

from benchmarks import cache, checkpoint, panels, retention, serve, speed, step

PROG = "python -m benchmarks"
COMMANDS: dict[str, ModuleType] = {
    "cache": cache,
    "serve": serve,
    "speed": speed,
    "step": step,
    "retention": retention,
    "checkpoint": checkpoint,
    "panels": panels,
}


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog=PROG, description="Measurements, each beside something else in the same run.")
    commands = whole.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        says = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=says, description=says)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return whole


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given, argparse.Namespace(command=f"{PROG} {shlex.join(given)}"))
    options.run(options)


if __name__ == "__main__":
    main()
