#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Finds a Python 3.10-3.12 and hands over to install.py. PYTHON=... chooses one; an existing .venv is re-used.
set -eu
cd "$(dirname "$0")/.."

fits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1
}

for candidate in .venv/bin/python ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
    if fits "$candidate"; then
        exec "$candidate" tools/install.py "$@"
    fi
done
echo "install: found no Python 3.10, 3.11 or 3.12 with the venv module (tried: ${PYTHON:-python3 python3.12 python3.11" \
    "python3.10}). Install one, or name it: make PYTHON=/path/to/python3.11" >&2
exit 1
