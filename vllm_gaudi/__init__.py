# SPDX-License-Identifier: Apache-2.0
"""Entry points of the vLLM plugin for Intel Gaudi; this module imports nothing heavy.

vLLM calls every function here more than once and in several processes, so each is idempotent. An exception inside
``register`` would be swallowed by vLLM and end in an unrelated error later; hence it reports its own failures.
"""

from __future__ import annotations

import logging
import sys

PLATFORM = "vllm_gaudi.platform.HpuPlatform"

_logger = logging.getLogger("vllm.vllm_gaudi")


def register() -> str | None:
    """``vllm.platform_plugins``: the platform's class path, or None when vLLM was told to be something else."""
    try:
        from vllm_gaudi import compat

        compat.define_torchvision_schemas()
    except Exception:
        _logger.exception("vllm_gaudi could not prepare this process; the HPU platform is not registered")
        return None
    # `import vllm` already asks for the platform. Where our own module began that import, it has no class yet: vLLM
    # imports it anew and whole, and that one stays.
    module, _, class_name = PLATFORM.rpartition(".")
    if not hasattr(sys.modules.get(module), class_name):
        sys.modules.pop(module, None)
    return PLATFORM


def register_utils() -> None:
    """``vllm.general_plugins``: names of our environment variables, so that vLLM does not call them unknown."""
    from vllm_gaudi import compat

    compat.register_environment_variables()


def register_ops() -> None:
    """``vllm.general_plugins``: out-of-tree layers (mixture of experts, attention backend)."""
    from vllm_gaudi import models

    models.register_layers()


def register_models() -> None:
    """``vllm.general_plugins``: kept for vllm-gaudi's name; vLLM's own model classes run unpatched."""


def register_tool_parsers() -> None:
    """``vllm.general_plugins``: kept for vllm-gaudi's name; vLLM's own tool parsers are used."""
