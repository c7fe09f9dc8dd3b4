# SPDX-License-Identifier: Apache-2.0
"""Several ranks: each hands out the same slots, step by step through preemptions, and a hit over them equals cold.

Owns: the load that preempts, the comparison of the ranks' slots, the hit. Never: one rank's results as the reference
for several: their sums round differently.

Ordering rule: the ranks are shown to hash differently, each process with a seed of its own, before slots are compared.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.nightly import process, report
from tools.nightly.setting import Setting

POOL_BLOCKS = 15
"""With the null block: six conversations of two blocks fit, and most of them are about to need a third."""


class Ranks:
    """An engine whose workers are processes started anew; only what every executor offers is used."""

    def __init__(self, setting: Setting, num_ranks: int):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from vllm_gaudi.testing.engine import DEFAULTS

        flags = setting.engine_flags(
            tensor_parallel_size=num_ranks,
            distributed_executor_backend="mp",
            enable_prefix_caching=True,
            max_num_seqs=6,
            max_model_len=setting.short_len,
            num_gpu_blocks_override=POOL_BLOCKS,
        )
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=setting.model, **{**DEFAULTS, **flags}))
        self.preempted: set[str] = set()
        self.scheduler = scheduler = self.engine.engine_core.engine_core.scheduler
        self.block_size: int = scheduler.cache_config.block_size
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.preempted.update(output.preempted_req_ids or ())
            return output

        scheduler.schedule = watched
        self._count = 0

    def ask(self, function: Callable[[Any], Any]) -> list[Any]:
        """``function`` of each rank's worker."""
        return self.engine.collective_rpc(function)

    def generate(
        self, texts: Sequence[Sequence[int]], num_tokens: int, salt: str = "", after_step: Callable[[], object] = bool
    ) -> list[tuple[int, list[int], list[float]]]:
        """Cached tokens, tokens and their logprobs of each text, all run together."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=1)
        names = []
        for text in texts:
            names.append(f"r{self._count}")
            self._count += 1
            inputs = {"prompt_token_ids": list(text), **({"cache_salt": salt} if salt else {})}
            self.engine.add_request(names[-1], inputs, params)
        found = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    (said,) = output.outputs
                    pairs = zip(said.token_ids, said.logprobs or (), strict=True)
                    logprobs = [position[token].logprob for token, position in pairs]
                    found[output.request_id] = (output.num_cached_tokens, list(said.token_ids), logprobs)
            after_step()
        return [found[name] for name in names]

    def close(self) -> None:
        from vllm_gaudi.testing.engine import close_sockets

        try:
            self.engine.engine_core.shutdown()
        finally:
            close_sockets()


def slots_of(worker: Any) -> tuple[int, int, dict[str, int | None]]:
    """Of one rank: process, the hash of a name, and the slot of every request that it knows."""
    table = worker.model_runner.step.requests
    return os.getpid(), hash("a request id"), {name: state.state_slot for name, state in table._requests.items()}


def disturb(worker: Any) -> None:
    """The fault switch: this rank, if it is not the first, hands out its highest slot first."""
    if worker.rank:
        pool = worker.model_runner.step.state_slots

        def highest() -> int:
            slot = max(pool._free)
            pool._free.remove(slot)
            pool._taken.add(slot)
            return slot

        pool.take = highest


def compare(setting: Setting, num_ranks: int, fault: bool = False) -> dict[str, Any]:
    """The row of one number of ranks; raises AssertionError when ranks disagree or a hit is not the cold run."""
    source = random.Random(3)

    def draw(length: int) -> list[int]:
        return [source.randrange(10, 500) for _ in range(length)]

    environment = {
        **setting.environment(warm_up=setting.is_device, poison=True),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    with process.variables(environment):
        os.environ.pop("PYTHONHASHSEED", None)  # with it all ranks would hash alike
        several = Ranks(setting, num_ranks)
    try:
        if fault:
            several.ask(disturb)
        seen: list[dict[str, int | None]] = []

        def look() -> None:
            pids, hashes, slots = zip(*several.ask(slots_of), strict=True)
            assert len({os.getpid(), *pids}) == num_ranks + 1, "the ranks are not processes of their own"
            assert len(set(hashes)) == num_ranks, "two ranks hash alike: their order proves nothing"
            for other in slots[1:]:
                assert other == slots[0], f"ranks disagree on slots: {slots[0]} and {other}"
            taken = [slot for slot in slots[0].values() if slot is not None]
            assert len(set(taken)) == len(taken), f"one slot for two requests: {slots[0]}"
            seen.append(slots[0])

        size = several.block_size
        load = [draw(2 * size - 4 - n) for n in range(10)]
        several.generate(load, setting.num_answer_tokens, after_step=look)
        assert several.preempted, "nobody was preempted"
        assert any(None in slots.values() for slots in seen), "no preempted request was looked at"

        several.scheduler.max_num_scheduled_tokens = size  # cold and hit then end in the same chunks
        text = draw(int(2.3 * size))
        cold, filling, hit = (several.generate([text], setting.num_answer_tokens, salt)[0] for salt in ("cold", "", ""))
        assert (cold[0], filling[0], hit[0]) == (0, 0, 2 * size), f"cached: {cold[0]}, {filling[0]}, {hit[0]}"
        assert hit[1] == cold[1], "the hit says other tokens than the cold run"
        off = max(abs(a - b) for a, b in zip(hit[2], cold[2], strict=True))
        assert off <= (0.05 if setting.is_device else 0.0), f"a logprob of the hit is off by {off}"
    finally:
        several.close()
    return {
        "ranks": num_ranks,
        "steps compared": len(seen),
        "slots in use at most": max(sum(slot is not None for slot in slots.values()) for slots in seen),
        "preempted": len(several.preempted),
        "hit, tokens": hit[0],
        "largest logprob difference": off,
    }


def run(setting: Setting, num_ranks: int) -> dict[str, Any]:
    row = compare(setting, num_ranks)
    report.write(Path(setting.out), f"ranks-{num_ranks}", f"{num_ranks} ranks", [row])
    return row
