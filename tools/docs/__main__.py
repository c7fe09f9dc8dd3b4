# SPDX-License-Identifier: Apache-2.0
"""The command.

python -m tools.docs          write the generated sections
python -m tools.docs check    print what would be written, and fail where that is not what there is
python -m tools.docs build    write them, install MkDocs into .venv where it is missing, build with --strict
"""

from __future__ import annotations

import argparse
import sys

from tools.docs import site

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description="The documentation site.")
    parser.add_argument("what", nargs="?", choices=("write", "check", "build"), default="write")
    sys.exit({"write": site.write, "check": site.check, "build": site.build}[parser.parse_args().what]())
