# SPDX-License-Identifier: Apache-2.0
"""The device: the only importer of ``habana_frameworks``, and the CPU counterpart of all that it offers.

Owns: which device this process runs on, the bridge's defaults, and synchronisation, memory figures, device-to-host
copies that do not block, compiling without running.
Never: vLLM types, environment variables other than through ``envs``, lazy mode.

Ordering rule: ``is_hpu`` decides once per process; everything else follows from it. ``initialize`` comes before
anything that touches the device, and only in a process that is to own one: a Gaudi belongs to one process at a time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi import envs

if TYPE_CHECKING:
    import numpy as np
    import torch

logger = logging.getLogger("vllm.vllm_gaudi.device")

BRIDGE_DEFAULTS: dict[str, tuple[str, str]] = {
    "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE": (
        "0",
        "Synapse may use a persistent input's memory as scratch in a recipe that only reads it, as GDN slots are read.",
    ),
    "PT_HPU_WEIGHT_SHARING": ("0", "No weights shared between graphs."),
    "RUNTIME_SCALE_PATCHING": ("1", "Scales are patched into a recipe, not compiled into it."),
    "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS": ("1", "The graph compiler's fuser may use several threads."),
    "ENABLE_EXPERIMENTAL_FLAGS": ("true", "Allows the next one."),
    "ENABLE_SKIP_REMOVAL_OF_GRAPH_INPUT_IDENTITY_NODES": (
        "true",
        "Identity nodes on graph inputs stay; recommended for Qwen3.5 hybrids.",
    ),
}
"""What the bridge and Synapse shall find in the environment: value and reason. Set by ``initialize``, in the process
that owns the device, and only where the user set nothing: before the bridge is imported there, unless torch has loaded
it already (``TORCH_DEVICE_BACKEND_AUTOLOAD``); an image therefore sets them itself."""


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


def bridge() -> Any:
    """``habana_frameworks.torch``; importing it registers the device with torch. Only on an HPU."""
    import habana_frameworks.torch as bridge_module

    return bridge_module


def _torch_hpu() -> Any:
    """``torch.hpu``, which exists once the bridge is imported."""
    import torch

    bridge()
    return torch.hpu  # type: ignore[attr-defined]


def kernels() -> Any:
    """Namespace of Gaudi's fused kernels (``FusedSDPA`` and others). Only on an HPU; may be called inside a graph."""
    import habana_frameworks.torch.hpex.kernels as kernel_module

    return kernel_module


def normalization() -> Any:
    """Namespace of Gaudi's fused norms. Only on an HPU; may be called inside a graph."""
    import habana_frameworks.torch.hpex.normalization as normalization_module

    return normalization_module


_is_initialized = False


def initialize() -> None:
    """Make the device usable in this process. Raises RuntimeError where the bridge is in lazy mode."""
    global _is_initialized
    if not is_hpu() or _is_initialized:
        return
    came_with_torch = "habana_frameworks.torch" in sys.modules
    late = [f"{name}={value}" for name, (value, _) in BRIDGE_DEFAULTS.items() if envs.set_default(name, value)]
    if came_with_torch and late:
        logger.warning(
            "Gaudi's bridge was loaded with torch, before these variables were set, and may not see them: %s. Set them "
            "in the environment that Python starts in, as docker/Dockerfile.gaudi does",
            " ".join(late),
        )
    bridge()
    import habana_frameworks.torch.distributed.hccl  # noqa: F401  (registers the process-group backend)
    import habana_frameworks.torch.utils.internal as internal

    if internal.is_lazy():
        raise RuntimeError(
            "Gaudi's bridge runs in lazy mode, which is not supported; unset PT_HPU_LAZY_MODE or set it to 0 before "
            "Python starts"
        )
    _is_initialized = True


def is_initialized() -> bool:
    """Whether this process owns its device. A host needs no call."""
    return _is_initialized or not is_hpu()


def synchronize() -> None:
    """Wait until all device work issued by this process is done."""
    if is_hpu():
        _torch_hpu().synchronize()


def seed_all(seed: int) -> None:
    """Seed the generators of torch and of the device, which a process that owns none has not."""
    import torch

    torch.manual_seed(seed)
    if is_hpu() and _is_initialized:
        _torch_hpu().random.manual_seed_all(seed)


@contextlib.contextmanager
def compile_only() -> Iterator[bool]:
    """Graphs that run inside are compiled and, on an HPU, not executed: what they return and write is undefined there.

    Yields whether that is so. On a host everything inside just runs.
    """
    if not is_hpu():
        yield False
        return
    import habana_frameworks.torch.internal.bridge_config as bridge_config

    with bridge_config.env_setting("PT_COMPILE_ONLY_MODE", True):
        yield True


@functools.cache
def _copy_stream() -> Any:
    """The stream of all copies to the host, beside the one that computes."""
    return _torch_hpu().Stream()


class HostCopy:
    """A device tensor on its way to the host. ``get`` blocks until it has arrived."""

    def __init__(self, tensor: Any):
        """``tensor``: any device tensor; kept alive until ``get`` returns."""
        self._event: Any = None
        self._device_tensor: Any = None
        if not is_hpu():
            self._host_tensor = tensor
            return
        hpu = _torch_hpu()
        stream = _copy_stream()
        stream.wait_stream(hpu.current_stream())  # what was issued so far computes the tensor
        with hpu.stream(stream):
            self._device_tensor = tensor
            self._host_tensor = tensor.to("cpu", non_blocking=True)
            self._event = hpu.Event()
            self._event.record()

    def get(self) -> Any:
        """The host tensor. Safe to call again, and from another thread."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._event = self._device_tensor = None
        return self._host_tensor


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of ``array`` on ``device``, not waited for: on a Gaudi the host goes on while it travels."""
    import numpy as np
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


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


def taken_memory(weight_bytes: int) -> int:
    """Bytes of the budget that are gone once weights of ``weight_bytes`` are loaded.

    On an HPU what the driver says, if that is more: collectives and the bridge itself hold memory that belongs to no
    tensor of ours. A host's budget is a share set aside for weights, states and blocks; the process is beside it.
    """
    return max(weight_bytes, used_memory()) if is_hpu() else weight_bytes


class PeakMemory(contextlib.AbstractContextManager["PeakMemory"]):
    """Peak bytes that were used inside the ``with`` beyond what was in use at its start (``.bytes`` afterwards).

    On an HPU by two meters, each from its own start, and the larger one counts: the allocator's peak of tensors, and
    what the driver has given out by the end, which the allocator keeps and which holds recipes and workspaces, too.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._start_allocated = 0

    def __enter__(self) -> PeakMemory:
        if is_hpu():
            hpu = _torch_hpu()
            hpu.reset_peak_memory_stats()
            self._start_allocated = int(hpu.memory_allocated())
        else:
            # "5" resets the high-water mark of resident memory (proc(5)); where the kernel forbids it the old, higher
            # mark stays and the peak is over-estimated, never under-estimated.
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        self._start = used_memory()
        return self

    def __exit__(self, *exc: object) -> None:
        if is_hpu():
            allocated = int(_torch_hpu().max_memory_allocated()) - self._start_allocated
            self.bytes = max(0, allocated, used_memory() - self._start)
        else:
            self.bytes = max(0, _status_kib("VmHWM") * 1024 - self._start)
