# SPDX-License-Identifier: Apache-2.0
"""The device: the only importer of ``habana_frameworks``, and the CPU twin of everything asked from it.

Owns: which device this process runs on, and synchronisation, memory figures, device-to-host copies that do not block.
Never: vLLM types, environment variables other than through ``envs``.

Ordering rule: ``is_hpu`` decides once per process; everything else follows from it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

from vllm_gaudi import envs


@functools.cache
def is_hpu() -> bool:
    """True where Gaudi's PyTorch bridge can be imported and the user did not ask for the CPU host."""
    if envs.get("VLLM_USE_FAKE_HPU"):
        return False
    return "habana_frameworks" in sys.modules or importlib.util.find_spec("habana_frameworks") is not None


def device_type() -> str:
    """The torch device string, which vLLM uses verbatim."""
    return "hpu" if is_hpu() else "cpu"


def distributed_backend() -> str:
    return "hccl" if is_hpu() else "gloo"


@functools.cache
def bridge() -> Any:
    """``habana_frameworks.torch``; importing it registers the device with torch. Only on an HPU."""
    import habana_frameworks.torch as bridge_module

    return bridge_module


def _torch_hpu() -> Any:
    """``torch.hpu``, which exists once the bridge is imported."""
    import torch

    bridge()
    return torch.hpu  # type: ignore[attr-defined]


@functools.cache
def kernels() -> Any:
    """Namespace of Gaudi's fused kernels (``FusedSDPA`` and others). Only on an HPU."""
    import habana_frameworks.torch.hpex.kernels as kernel_module

    return kernel_module


def compile_backend() -> str | None:
    """The torch.compile backend that the user asked for, or the device's own; None runs eagerly."""
    asked = envs.get("VLLM_GAUDI_COMPILE")
    if asked is None:
        return "hpu_backend" if is_hpu() else None
    return None if asked == "none" else asked


def initialize() -> None:
    """Make the device usable in this process."""
    if is_hpu():
        bridge()


def synchronize() -> None:
    """Wait until all device work issued by this process is done."""
    if is_hpu():
        _torch_hpu().synchronize()


class HostCopy:
    """A device tensor on its way to the host. ``get`` blocks until it has arrived."""

    def __init__(self, tensor: Any):
        """``tensor``: any device tensor; kept alive until ``get`` returns."""
        if is_hpu():
            self._device_tensor = tensor
            self._event = _torch_hpu().Event()
            self._host_tensor = tensor.to("cpu", non_blocking=True)
            self._event.record()
        else:
            self._event = None
            self._host_tensor = tensor

    def get(self) -> Any:
        """The host tensor. Safe to call again, and from another thread."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._event = self._device_tensor = None
        return self._host_tensor


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no field {field}")


def total_memory() -> int:
    """Bytes of device memory. On the host: the share set aside by VLLM_GAUDI_HOST_MEMORY_GIB."""
    if is_hpu():
        return int(_torch_hpu().mem_get_info()[1])
    return int(envs.get("VLLM_GAUDI_HOST_MEMORY_GIB") * 2**30)


def used_memory() -> int:
    """Bytes in use now: of the device on an HPU, of this process on the host."""
    if is_hpu():
        free, total = _torch_hpu().mem_get_info()
        return int(total - free)
    return _status_kib("VmRSS") * 1024


class PeakMemory(contextlib.AbstractContextManager["PeakMemory"]):
    """Peak bytes that were used inside the ``with`` beyond what was in use at its start (``.bytes`` afterwards)."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        if is_hpu():
            _torch_hpu().reset_peak_memory_stats()
        else:
            # "5" resets the high-water mark of resident memory (proc(5)); where the kernel forbids it the old, higher
            # mark stays and the peak is over-estimated, never under-estimated.
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        self._start = used_memory()
        return self

    def __exit__(self, *exc: object) -> None:
        peak = int(_torch_hpu().max_memory_allocated()) if is_hpu() else _status_kib("VmHWM") * 1024
        self.bytes = max(0, peak - self._start)


def set_graph_defaults() -> None:
    """Bridge variables that Gaudi needs for compact GDN slots; set only where the user set none, never at import."""
    if is_hpu():
        # Synapse may reuse a persistent input's memory inside the recipe that only reads it, which would destroy slots.
        envs.set_default("PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE", "0")
