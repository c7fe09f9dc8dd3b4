# SPDX-License-Identifier: Apache-2.0
"""transformers under the benchmark: its own model of a checkpoint, doing what ``worker.py`` is told. A process.

Owns: the clock around one forward over all prompts. Never: a cache between prompts, or tokens after the first.

The prompts of one command are the first turns of its sessions, have one length and run as one batch. ``start`` answers
``{"error": ...}`` where transformers lacks the model. Commands and answers are those of ``worker.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import worker


class Worker:
    """transformers' side of the pipe: at most one model at a time."""

    def __init__(self) -> None:
        self._model: Any = None

    def load(self) -> Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        from vllm_gaudi.compat import define_torchvision_schemas

        define_torchvision_schemas()
        import torch  # noqa: F401
        import transformers  # noqa: F401

        return {"start": self.start, "play": self.play}

    def start(self, command: dict[str, Any]) -> dict[str, Any]:
        import torch
        import transformers

        flags = command["flags"]
        self._model = None
        began = time.perf_counter()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(flags["model"], dtype=getattr(torch, flags["dtype"])).eval()
        return {"seconds": time.perf_counter() - began}

    def play(self, command: dict[str, Any]) -> dict[str, Any]:
        import torch

        prompts = [session.turns[0].new for session in worker.sessions_of(command)]
        token_ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            self._model(input_ids=token_ids, use_cache=True, logits_to_keep=1)
        took = time.perf_counter() - began
        return {"requests": [{"prompt": prompt, "first": took, "took": took, "cached": 0} for prompt in prompts]}


if __name__ == "__main__":
    worker.answer_commands(Worker().load)
