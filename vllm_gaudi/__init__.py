# SPDX-License-Identifier: Apache-2.0
"""Entry points of the vLLM plugin for Intel Gaudi; this module imports nothing heavy.

vLLM calls every function here more than once and in several processes, so each is idempotent. An exception inside
``register`` would be swallowed by vLLM and end in an unrelated error later; hence it reports its own failures.

Owns: the release of vLLM that the plugin is written for. Never: an import of torch or vLLM.

Ordering rule: the release first; nothing else of vLLM is touched beside another one.
"""

from __future__ import annotations

import logging
import re
import sys

VLLM_RELEASE = "0.30.0"
PLATFORM = "vllm_gaudi.platform.HpuPlatform"

_logger = logging.getLogger("vllm.vllm_gaudi")


def register() -> str | None:
    """``vllm.platform_plugins``: the platform's class path, or None when this process could not be prepared.

    Beside another release of vLLM it is the path of a class that raises. vLLM makes the platform outside of what it
    guards, so the sentence ends the process. An exception here would be logged at debug level, and None would leave the
    process to the next platform: a vLLM built for CPUs would serve without the plugin.
    """
    if unsupported_vllm() is not None:
        return f"{__name__}.{UnsupportedVllm.__name__}"
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


def unsupported_vllm() -> str | None:
    """What to do about the vLLM that is installed, or None where it is of ``VLLM_RELEASE``.

    Builds and pre-releases of that release have it at their beginning: 0.30.0+cpu, 0.30.0rc1, 0.30.0.dev7.
    """
    from importlib import metadata

    try:
        found = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        found = "without package metadata"
    release = re.match(r"\d+(\.\d+)*", found)
    if release is not None and release[0] == VLLM_RELEASE:
        return None
    other = f", or a vllm_gaudi whose version begins with {release[0]}" if release is not None else ""
    return (
        f"vllm_gaudi is written for vLLM {VLLM_RELEASE}, and vLLM {found} is installed. "
        f"Install vLLM {VLLM_RELEASE}{other}."
    )


class UnsupportedVllm:
    """The platform beside a vLLM that the plugin is not written for: raises RuntimeError when vLLM makes it."""

    def __init__(self) -> None:
        raise RuntimeError(unsupported_vllm())


def register_utils() -> None:
    """``vllm.general_plugins``: names of our environment variables, so that vLLM does not call them unknown."""
    from vllm_gaudi import compat

    compat.register_environment_variables()


def register_ops() -> None:
    """``vllm.general_plugins``: out-of-tree layers (mixture of experts, attention backend)."""
    from vllm_gaudi import layers

    layers.register_layers()


def register_models() -> None:
    """``vllm.general_plugins``: kept for vllm-gaudi's name; vLLM's own model classes run unpatched."""


def register_tool_parsers() -> None:
    """``vllm.general_plugins``: kept for vllm-gaudi's name; vLLM's own tool parsers are used."""
