# SPDX-License-Identifier: Apache-2.0
"""``torch.hpu``: streams, events and memory figures. A stream runs at once; what is proved is who waited for whom."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from habana_frameworks.calls import check, note
from habana_frameworks.torch.hpu import metrics, random

GIB = 2**30

__all__ = ["metrics", "random"]


class Stream:
    _count = 0

    def __init__(self, device: Any = None, priority: int = 0):
        self.id = Stream._count
        Stream._count += 1
        note("Stream", stream=self.id)

    def wait_stream(self, stream: Stream) -> None:
        check(isinstance(stream, Stream) and stream is not self, "a stream waits for another stream")
        note("wait_stream", stream=self.id, other=stream.id)

    def wait_event(self, event: Event) -> None:
        check(event.is_recorded, "a stream waits for an event that was recorded")
        note("wait_event", stream=self.id)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        note("Stream.synchronize", stream=self.id)

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self.is_recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self.is_recorded = True
        note("Event.record", stream=(stream or current_stream()).id)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.is_recorded

    def synchronize(self) -> None:
        check(self.is_recorded, "an event that was never recorded is waited for")
        note("Event.synchronize")


_default = Stream()
_local = threading.local()


def default_stream(device: Any = None) -> Stream:
    return _default


def current_stream(device: Any = None) -> Stream:
    return getattr(_local, "stream", _default)


@contextlib.contextmanager
def stream(stream: Stream) -> Iterator[None]:
    before = current_stream()
    _local.stream = stream
    note("stream", stream=stream.id)
    try:
        yield
    finally:
        _local.stream = before


def synchronize(device: Any = None) -> None:
    note("synchronize")


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    check(device in (0, "hpu", "hpu:0"), f"no device {device}")


def get_device_name(device: Any = None) -> str:
    return "GAUDI-STUB"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes: of the 6 GiB in use, 4 are tensors and 2 the driver's and the bridge's own."""
    note("mem_get_info")
    return 90 * GIB, 96 * GIB


def memory_allocated(device: Any = None) -> int:
    return 4 * GIB


def max_memory_allocated(device: Any = None) -> int:
    return 5 * GIB


def reset_peak_memory_stats(device: Any = None) -> None:
    note("reset_peak_memory_stats")


def wrap_in_hpu_graph(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("stub of the bridge: HPU graphs exist in lazy mode only")
