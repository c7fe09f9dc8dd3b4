# SPDX-License-Identifier: Apache-2.0
"""The one table of environment variables, and their only reader.

Owns: names, defaults, parsers and the sentence that documents each variable. No other module reads
``os.environ``; none writes it, except ``set_default`` for variables that must stand before a device is taken.

Ordering rule: a value is read when it is asked for, so a test may set a variable before the engine that shall see it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


def _flag(name: str, text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"{name}={text!r} is not a switch; use one of {', '.join(_TRUE[:2] + _FALSE[:2])}")


def _positive_float(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value < math.inf):
        raise ValueError(f"{name}={text!r} is not a positive number")
    return value


def _choice(*names: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text.strip().lower() not in names:
            raise ValueError(f"{name}={text!r} is not known; use one of {', '.join(names)}")
        return text.strip().lower()

    return parse


def _text(_: str, text: str) -> str:
    return text


@dataclass(frozen=True)
class EnvVar:
    """One variable: ``default`` is the value when the variable is unset (None: unset stays None)."""

    default: Any
    parse: Callable[[str, str], Any]
    doc: str


TABLE: dict[str, EnvVar] = {
    "VLLM_SKIP_WARMUP": EnvVar(False, _flag, "Skip the warm-up over the bucket grid at start."),
    "VLLM_COMPACT_GDN": EnvVar(
        True, _flag, "Keep live GDN state in per-request slots. 0 asks for the per-block layout, which is refused."
    ),
    "VLLM_CONTIGUOUS_PA": EnvVar(None, _flag, "Contiguous paged attention of vllm-gaudi; asking for it is refused."),
    "VLLM_DEFRAG": EnvVar(None, _flag, "KV cache defragmenter of vllm-gaudi; asking for it is refused."),
    "VLLM_USE_FAKE_HPU": EnvVar(False, _flag, "Run on the CPU host even where a Gaudi is present."),
    "VLLM_GAUDI_POISON": EnvVar(
        False, _flag, "Tests only: fill the pages and slots of a hybrid model with NaN instead of zeros at start."
    ),
    "VLLM_GAUDI_HOST_MEMORY_GIB": EnvVar(
        4.0, _positive_float, "On a CPU host: GiB of memory, per rank, that count as the device's memory."
    ),
    "VLLM_GAUDI_COMPILE": EnvVar(
        None,
        _choice("none", "aot_eager", "inductor", "hpu_backend"),
        "torch.compile backend of the decoder layers: unset is hpu_backend on Gaudi and none on a CPU host, and "
        "--enforce-eager is none everywhere.",
    ),
    "VLLM_GAUDI_ROW_TILES": EnvVar(
        None,
        _flag,
        "Run every matrix product in tiles of one number of rows, so that a row's bits depend on the row alone. Unset "
        "is 1 on a CPU host, and 0 on Gaudi, where a product runs over all rows of its bucket at once.",
    ),
    "VLLM_GAUDI_EXECUTION_MODE": EnvVar(
        "host",
        _choice("host", "hpu_like"),
        "On a CPU host, where nothing is compiled: host runs each forward in the shape that it needs instead of "
        "padding it to the next bucket, packs float32 weights for decode, updates GDN states in place and cuts the "
        "products of a prompt's end short. hpu_like runs as a Gaudi does, with bucketing and padding. Results of the "
        "two may differ in the last bits.",
    ),
    "VLLM_USE_V2_MODEL_RUNNER": EnvVar(None, _flag, "vLLM's own switch; the V2 runner is refused."),
    "VLLM_BATCH_INVARIANT": EnvVar(False, _flag, "vLLM's own switch for batch-invariant kernels; they are refused."),
    "VLLM_TARGET_DEVICE": EnvVar(None, _text, "vLLM's build variable; 'cpu' at run time would hide this plugin."),
    "PT_HPU_LAZY_MODE": EnvVar(False, _flag, "Gaudi's lazy mode; only 0 (eager and torch.compile) is supported."),
}


def get(name: str) -> Any:
    """Value of a variable of ``TABLE``, parsed. Raises ValueError when its text cannot be parsed."""
    var = TABLE[name]
    text = os.environ.get(name)
    return var.default if text is None else var.parse(name, text)


def set_default(name: str, value: str) -> bool:
    """Set a variable only where the user set none. Returns whether it was set."""
    if name in os.environ:
        return False
    os.environ[name] = value
    return True
