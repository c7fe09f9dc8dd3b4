# SPDX-License-Identifier: Apache-2.0
"""Importing it registers the device module ``torch.hpu``, the operators and the compile backend, as the bridge does."""

import sys

import torch as _torch

from habana_frameworks import calls
from habana_frameworks.torch import core, hpu
from habana_frameworks.torch import operators as _operators  # noqa: F401  (importing it registers them)
from habana_frameworks.torch.dynamo import compile_backend as _backend  # noqa: F401
from habana_frameworks.torch.utils import internal as _internal  # noqa: F401

_torch.hpu = hpu
sys.modules["torch.hpu"] = hpu
calls.note("import")

__all__ = ["core", "hpu"]


def autoload() -> None:
    """What the entry point of the bridge's distribution names; importing this module was all."""
