# SPDX-License-Identifier: Apache-2.0
"""Our metrics in vLLM's Prometheus endpoint, through vLLM's plugin group for stat loggers.

Owns: the Prometheus metrics, each created once in a process and labelled by model and engine. Never: counting
(``core.sched.cache_stats``).

The counts come in ``SchedulerStats.waiting_lora_adapters``; ``compat`` says why. vLLM takes an installed stat logger
for the wish to have statistics, so ``--disable-log-stats`` does not turn them off (``docs/metrics.md``).

Ordering rule: vLLM sets PROMETHEUS_MULTIPROC_DIR before prometheus_client is imported, in servers of several processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_gaudi.v1.core.sched.cache_stats import COUNTERS, MISSES, PREFIX, REASONS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

SLOTS = PREFIX + "state_slots"

_LABELS = ("model_name", "engine")
_COUNTERS = {
    name: Counter(name, doc, labelnames=(*_LABELS, "reason") if name == MISSES else _LABELS)
    for name, doc in COUNTERS.items()
}
# As vLLM's own gauges: of several server processes one tells what all of them know.
_SLOTS_GAUGE = Gauge(
    SLOTS, "Slots for the GDN states of running requests.", labelnames=_LABELS, multiprocess_mode="mostrecent"
)


class GaudiStatLogger(StatLoggerBase):
    """Adds the counts of each step of one engine to its Prometheus counters."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0):
        labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self._counters: dict[str, Counter] = {}
        for name, counter in _COUNTERS.items():
            if name == MISSES:
                self._counters.update({f"{name}:{reason}": counter.labels(*labels, reason) for reason in REASONS})
            else:
                self._counters[name] = counter.labels(*labels)
        _SLOTS_GAUGE.labels(*labels).set(vllm_config.scheduler_config.max_num_seqs)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
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
