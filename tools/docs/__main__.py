# SPDX-License-Identifier: Apache-2.0
"""The command.

python -m tools.docs          write the generated sections
python -m tools.docs check    exit 1 when they are not what would be written
python -m tools.docs build    write them, install MkDocs into .venv where it is missing, build with --strict
"""

from __future__ import annotations

import argparse
import sys

from tools.docs.site import build, stale, write
from tools.install import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(description="The documentation site.")
    parser.add_argument("what", nargs="?", choices=("write", "check", "build"), default="write")
    what = parser.parse_args().what
    if what == "build":
        return build()
    if what == "check":
        found = stale()
        for path in found:
            print(f"not up to date: {path.relative_to(ROOT)}; run make docs", file=sys.stderr)
        return 1 if found else 0
    for path in write():
        print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
