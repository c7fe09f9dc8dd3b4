# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_gaudi.cli`, the same as `vllm-gaudi`."""

import sys

from vllm_gaudi.cli import main

if __name__ == "__main__":
    sys.exit(main())
