# SPDX-License-Identifier: Apache-2.0
"""Our counters in vLLM's Prometheus endpoint, through vLLM's stat logger plugin door.

Owns: the Prometheus metrics. Never: counting (``core.sched.cache_stats``).

vLLM 0.30 gives a plugin's scheduler no field of its own in the stats that cross the process boundary. LoRA is refused
by this plugin, so the counts travel in ``SchedulerStats.waiting_lora_adapters`` (name -> count), which vLLM reads only
when LoRA is on. This goes when vLLM's stats get a field for plugins.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_gaudi.v1.core.sched.cache_stats import (
    BYTES,
    MISSES,
    PREFIX,
    REACHABLE,
    REASONS,
    RESTORED,
    SAVED,
    SKIPPED,
)

SLOTS = PREFIX + "slots"

_DOCS = {
    SAVED: "GDN checkpoints saved, one per cached boundary of a request.",
    SKIPPED: "GDN checkpoints not saved because no block was free for them.",
    RESTORED: "GDN checkpoints restored, one per admitted request that resumed from one.",
    BYTES: "Bytes moved between GDN slots and blocks, on one rank.",
    REACHABLE: "Prompt tokens that requests had reused, had every boundary that was ever kept still been there.",
    MISSES: "Requests that could have hit the prefix cache and did not, by reason.",
}


class GaudiStatLogger(StatLoggerBase):
    """Turns the counts of each scheduler step into Prometheus counters."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0):
        for collector in list(REGISTRY._collector_to_names):
            if getattr(collector, "_name", "").startswith(PREFIX):
                REGISTRY.unregister(collector)
        labels = {"model_name": vllm_config.model_config.served_model_name, "engine": str(engine_index)}
        self._counters: dict[str, Any] = {}
        for name, doc in _DOCS.items():
            names = [*labels, "reason"] if name == MISSES else [*labels]
            counter = Counter(name, doc, labelnames=names)
            if name == MISSES:
                for reason in REASONS:
                    self._counters[f"{name}:{reason}"] = counter.labels(**labels, reason=reason)
            else:
                self._counters[name] = counter.labels(**labels)
        slots = Gauge(SLOTS, "Slots for the GDN states of running requests.", labelnames=[*labels])
        slots.labels(**labels).set(vllm_config.scheduler_config.max_num_seqs)

    def record(
        self,
        scheduler_stats: Any | None,
        iteration_stats: Any | None,
        mm_cache_stats: Any | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        for name, count in scheduler_stats.waiting_lora_adapters.items():
            counter = self._counters.get(name)
            if counter is not None:
                counter.inc(count)

    def log_engine_initialized(self) -> None:
        """The worker has already said what was built."""
