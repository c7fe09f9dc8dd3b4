# SPDX-License-Identifier: Apache-2.0
"""One engine under the benchmark: starts with given flags, plays sessions, says what happened. A process of its own.

Owns: the clock (first token of a request, wall and CPU seconds of a play), the count of scheduled tokens, and the pipe
to the process that drives it. Never: our package, or another module of this one: the file runs as it is in the peer's
environment, on the standard library and vLLM's public engine alone.

Commands are lines of JSON on stdin, answers lines of JSON on what was stdout; what the engine prints goes to stderr.

    {"do": "start", "flags": {...}}        -> {"seconds": s, "block_size": B, "num_blocks": n, "num_groups": n}
    {"do": "play", "sessions": [{...}]}    -> {"requests": [...], "wall": s, "cpu": s, ...}
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Turn:
    """``new``: tokens that are added; ``answer``: tokens to generate; ``gap``: steps to wait before it is asked."""

    new: list[int]
    answer: int
    gap: int = 0
    n: int = 1


@dataclass(frozen=True)
class Session:
    """``turns`` follow one another, each on what was said before, the model's answers included."""

    turns: list[Turn]
    arrival: int = 0  # steps after the start
    after: int | None = None  # waits until this session has ended


class Player:
    """An engine, and how it is driven."""

    def __init__(self, flags: dict[str, Any], stat_loggers: list[Any] | None = None):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        gc.collect()
        began = time.perf_counter()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**flags), stat_loggers=stat_loggers)
        self.seconds = time.perf_counter() - began
        self.scheduled = 0
        self.preempted = 0
        self.num_played = 0
        core = getattr(self.engine.engine_core, "engine_core", None)  # None: the core is another process
        self.scheduler: Any = getattr(core, "scheduler", None)
        if self.scheduler is not None:
            self._count()

    def _count(self) -> None:
        schedule = self.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.scheduled += output.total_num_scheduled_tokens
            self.preempted += len(output.preempted_req_ids or ())
            return output

        self.scheduler.schedule = counted

    def facts(self) -> dict[str, Any]:
        config = self.engine.vllm_config.cache_config
        manager = None if self.scheduler is None else self.scheduler.kv_cache_manager
        return {
            "seconds": self.seconds,
            "block_size": config.block_size,
            "num_blocks": config.num_gpu_blocks if manager is None else manager.block_pool.num_gpu_blocks,
            "num_groups": None if manager is None else len(manager.coordinator.single_type_managers),
        }

    def play(self, sessions: Sequence[Session], each_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Run all sessions to their end, from an empty cache."""
        from vllm import SamplingParams

        self.engine.reset_prefix_cache()
        self.num_played += 1
        self.scheduled = self.preempted = 0
        said = [list[int]() for _ in sessions]
        turn_of = [0] * len(sessions)
        due = {n: s.arrival for n, s in enumerate(sessions) if s.after is None}
        running: dict[str, dict[str, Any]] = {}
        done: list[dict[str, Any]] = []
        step = waited = 0  # steps so far, and those of them that nobody ran in
        began, cpu_began = time.perf_counter(), cpu_seconds()
        while due or running:
            if not running:
                next_due = max(step, min(due.values()))
                step, waited = next_due, waited + next_due - step
            for n in [n for n, at in sorted(due.items()) if at <= step]:
                del due[n]
                turn = sessions[n].turns[turn_of[n]]
                said[n] = said[n] + turn.new
                name = f"{self.num_played}-{n}-{turn_of[n]}"
                params = SamplingParams(
                    temperature=0 if turn.n == 1 else 1.0,
                    seed=None if turn.n == 1 else n,
                    n=turn.n,
                    max_tokens=turn.answer,
                    ignore_eos=True,
                    detokenize=False,
                )
                self.engine.add_request(name, {"prompt_token_ids": said[n]}, params)
                running[name] = {
                    "session": n,
                    "turn": turn_of[n],
                    "prompt": said[n],
                    "n": turn.n,
                    "asked": time.perf_counter(),
                    "first": None,
                }
            outputs = self.engine.step()
            step += 1
            each_step()
            now = time.perf_counter()
            for output in outputs:
                request = running[output.request_id]
                if request["first"] is None and any(choice.token_ids for choice in output.outputs):
                    request["first"] = now - request["asked"]
                if not output.finished:
                    continue
                del running[output.request_id]
                n = request["session"]
                answers = [list(choice.token_ids) for choice in output.outputs]
                done.append(
                    {
                        **request,
                        "answers": answers,
                        "cached": output.num_cached_tokens or 0,
                        "asked": request["asked"] - began,
                        "took": now - request["asked"],
                    }
                )
                said[n] = said[n] + answers[0]
                turn_of[n] += 1
                if turn_of[n] < len(sessions[n].turns):
                    due[n] = step + sessions[n].turns[turn_of[n]].gap
                else:
                    due.update({m: step for m, other in enumerate(sessions) if other.after == n})
        wall, cpu = time.perf_counter() - began, cpu_seconds() - cpu_began
        told = self.scheduler is not None  # an engine core that is another process tells none of these
        return {
            "requests": done,
            "wall": wall,
            "cpu": cpu if told else None,
            "steps": step - waited,
            "scheduled": self.scheduled if told else None,
            "preempted": self.preempted if told else None,
        }

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def sessions_of(command: Mapping[str, Any]) -> list[Session]:
    """The sessions of a command, which are dataclasses written as JSON."""
    return [
        Session(**{**session, "turns": [Turn(**turn) for turn in session["turns"]]}) for session in command["sessions"]
    ]


def answer_commands(load: Callable[[], Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]]) -> None:
    """Runs until stdin ends. ``load`` imports what is measured and returns what does each command."""
    # Only answers go where the driver listens.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(it: dict[str, Any]) -> None:
        answers.write(json.dumps(it) + "\n")
        answers.flush()

    began = time.perf_counter()
    commands = load()
    answer({"import": time.perf_counter() - began})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(commands[command["do"]](command))
        except Exception as error:  # noqa: BLE001  (whatever fails is the driver's to tell)
            answer({"error": f"{type(error).__name__}: {error}"})


class Worker:
    """vLLM's side of the pipe: at most one engine at a time."""

    def __init__(self) -> None:
        self._player: Player | None = None

    def load(self) -> Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        import vllm  # noqa: F401

        return {"start": self.start, "play": self.play}

    def start(self, command: dict[str, Any]) -> dict[str, Any]:
        self.close()
        self._player = Player(command["flags"])
        return self._player.facts()

    def play(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._player is None:
            raise RuntimeError("no engine was started")
        return self._player.play(sessions_of(command))

    def close(self) -> None:
        player, self._player = self._player, None
        if player is not None:
            player.close()


if __name__ == "__main__":
    worker = Worker()
    answer_commands(worker.load)
    worker.close()
