# SPDX-License-Identifier: Apache-2.0
"""An engine process ends when the process that started it is gone, however that ended: a card belongs to one process.

Owns: the thread that waits for it.
Never: a process that is not vLLM's own; an engine in a user's process is the user's to end.

Ordering rule: first a signal, on which vLLM shuts down as it does on any; ``GRACE`` seconds later the process ends.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import connection

logger = logging.getLogger("vllm.vllm_gaudi.parent_watch")

GRACE = 20.0
"""Seconds for an orderly end. Requests that run have nobody left who reads their answers."""

PROCESSES = ("EngineCore", "VllmWorker")
"""Beginnings of the names that vLLM gives to its engine and worker processes."""


@functools.cache
def end_with_parent() -> bool:
    """Whether this process is watched from here on: one of vLLM's, which a server or an engine has started.

    vLLM's workers see the end of their engine, but nothing in an engine sees the end of its server.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(PROCESSES):
        return False
    sentinel = parent.sentinel
    threading.Thread(target=_wait, args=(sentinel,), name="ParentWatch", daemon=True).start()
    return True


def _wait(sentinel: int) -> None:
    connection.wait([sentinel])
    logger.error("The process that started this one is gone; this one ends, too")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
