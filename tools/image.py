# SPDX-License-Identifier: Apache-2.0
"""What a Gaudi image brings and must keep: its torch, and all that was built against that torch.

Owns: which distributions those are, the constraints that hold them, and the check afterwards. Runs on the standard
library alone, with the image's own Python. Never installs anything.

Ordering rule: ``write`` before pip is run the first time, ``check`` after it was run the last time.

    python3 tools/image.py write FILE    pins of what must stay, as a constraints file
    python3 tools/image.py check FILE    exit 1 when one of them is gone, or has another version
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable
from pathlib import Path

HOST_PINS = Path(__file__).resolve().parent.parent / "requirements" / "host.txt"
KEPT = re.compile(r"(torch|habana|intel).*", re.I)


def installed() -> list[tuple[str, str]]:
    """Name and version of every distribution that this Python sees."""
    return [(found.metadata["Name"], found.version) for found in importlib.metadata.distributions()]


def to_keep(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Versions by normalised name. Raises LookupError where there is no torch: then this is no image to build on."""
    kept = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found if KEPT.fullmatch(name)}
    if "torch" not in kept:
        raise LookupError("this Python has no torch: the base image must be one of Gaudi's PyTorch images")
    return dict(sorted(kept.items()))


def check_release(version: str, pins: Path = HOST_PINS) -> None:
    """Raises LookupError where the image's torch is of another minor release than the pinned one."""
    pinned = re.search(r"^torch==(\d+\.\d+)", pins.read_text(), re.M)
    if pinned is None:
        raise LookupError(f"{pins.name} holds no pin of torch")
    if version.split(".")[:2] != pinned[1].split("."):
        raise LookupError(f"the image has torch {version}, the plugin is made for {pinned[1]}: choose another image")


def constraints(kept: dict[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in kept.items())


def differences(wanted: str, kept: dict[str, str]) -> list[str]:
    """One sentence for each line of a constraints file that does not hold any more."""
    found = []
    for line in wanted.split():
        name, _, version = line.partition("==")
        if kept.get(name) != version:
            found.append(f"{name} was {version} and is {kept.get(name, 'gone')}")
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("write", "check"):
        print("usage: image.py write|check FILE", file=sys.stderr)
        return 2
    path = Path(arguments[1])
    try:
        kept = to_keep(installed())
        check_release(kept["torch"])
    except LookupError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    if arguments[0] == "write":
        path.write_text(constraints(kept))
        print(path.read_text(), end="")
        return 0
    changed = differences(path.read_text(), kept)
    for sentence in changed:
        print(f"image: {sentence}; pip must not replace it", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
