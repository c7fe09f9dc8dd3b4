# SPDX-License-Identifier: Apache-2.0
"""The asynchronous scheduler, vLLM's default, with the same overrides as the synchronous one."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_gaudi.v1.core.sched.hpu_scheduler import GDNSchedulerMixin


class HPUAsyncScheduler(GDNSchedulerMixin, AsyncScheduler):
    """Schedules the next step before the last one's tokens have arrived."""
