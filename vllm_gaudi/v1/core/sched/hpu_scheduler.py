# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with prefill chunks kept on the GDN chunk grid. Never torch, never the worker: another process.

Owns: where a prefill chunk may end. The GDN chunk form gives the same bits for every split whose pieces end on
multiples of the chunk C counted from token 0, and only for those (design: determinism).
Never: the live ``cache_config.block_size``; B and C are read once from the KV cache config.

Ordering rule: vLLM's own split runs first, ours only shortens its result.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_gaudi.v1.core.sched.block_size import attention_block_size, gdn_chunk_size

logger = init_logger("vllm.vllm_gaudi.scheduler")

_SPLIT_PARAMETERS = (
    "self",
    "request",
    "num_new_tokens",
    "num_new_local_computed_tokens",
    "num_external_computed_tokens",
)


def _check_split_signature() -> None:
    found = tuple(inspect.signature(Scheduler._mamba_block_aligned_split).parameters)
    if found != _SPLIT_PARAMETERS:
        raise ImportError(
            f"vLLM's Scheduler._mamba_block_aligned_split takes {found}, the plugin is written for "
            f"{_SPLIT_PARAMETERS}; install vllm==0.30.0 or update vllm_gaudi"
        )


_check_split_signature()


def chunk_end_on_grid(start: int, end: int, prefill_end: int, chunk: int, max_tokens: int) -> int:
    """Where a prefill chunk of tokens ``start``..``end`` shall end so that the next one starts on the grid.

    The prompt's last chunk ends where it ends. ``max_tokens``: most tokens that any step could give this prompt; where
    that is less than ``chunk`` the grid is out of reach and the chunk only never runs over a grid point. The result may
    equal ``start``: the request waits for a step with more budget.
    """
    if end >= prefill_end:
        return end
    on_grid = end // chunk * chunk
    if on_grid > start or chunk <= max_tokens:
        return max(on_grid, start)
    return min(end, (start // chunk + 1) * chunk)


class GDNGridMixin:
    """Overrides of ``Scheduler``; goes before it in the bases."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._caches_gdn_blocks: bool = self.need_mamba_block_aligned_split  # type: ignore[has-type]
        if self.has_mamba_layers:  # type: ignore[attr-defined]
            self._gdn_chunk = gdn_chunk_size(attention_block_size(self.kv_cache_config))  # type: ignore[attr-defined]
            self.need_mamba_block_aligned_split = True
            room = self.max_num_scheduled_tokens - self.scheduler_config.max_num_seqs  # type: ignore[attr-defined]
            if room < self._gdn_chunk:
                logger.warning(
                    "--max-num-batched-tokens %d leaves less than one GDN chunk (%d tokens) beside %d decoding "
                    "sequences: prefills may wait for decodes. Pass at least %d.",
                    self.max_num_scheduled_tokens,  # type: ignore[attr-defined]
                    self._gdn_chunk,
                    self.scheduler_config.max_num_seqs,  # type: ignore[attr-defined]
                    self._gdn_chunk + self.scheduler_config.max_num_seqs,  # type: ignore[attr-defined]
                )

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Tokens of this step's chunk: vLLM's choice, shortened to the GDN grid."""
        if self._caches_gdn_blocks:
            num_new_tokens = super()._mamba_block_aligned_split(  # type: ignore[misc]
                request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
            )
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return num_new_tokens
        max_tokens = self.max_num_scheduled_tokens  # type: ignore[attr-defined]
        threshold = self.scheduler_config.long_prefill_token_threshold  # type: ignore[attr-defined]
        if threshold > 0:
            max_tokens = min(max_tokens, threshold)
        return chunk_end_on_grid(start, start + num_new_tokens, prefill_end, self._gdn_chunk, max_tokens) - start


class HPUScheduler(GDNGridMixin, Scheduler):
    """Synchronous scheduler."""
