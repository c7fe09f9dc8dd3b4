# SPDX-License-Identifier: Apache-2.0
"""transformers under the benchmark: its own model of a checkpoint, answering what ``worker.py`` is asked. A process.

Owns: the clock around one forward over all prompts. Never: a cache between prompts, or tokens after the first.

Prompts of one command have one length and run as one batch. ``start`` answers ``{"error": ...}`` where transformers
lacks the model. Commands and answers are those of ``worker.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def play(model: Any, prompts: list[list[int]]) -> dict[str, Any]:
    import torch

    token_ids = torch.tensor(prompts)
    began = time.perf_counter()
    with torch.inference_mode():
        model(input_ids=token_ids, use_cache=True, logits_to_keep=1)
    took = time.perf_counter() - began
    return {"requests": [{"prompt": prompt, "first": took, "took": took, "cached": 0} for prompt in prompts]}


def main() -> None:
    # Only answers go where the driver listens.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(it: dict[str, Any]) -> None:
        answers.write(json.dumps(it) + "\n")
        answers.flush()

    began = time.perf_counter()
    from vllm_gaudi.compat import define_torchvision_schemas

    define_torchvision_schemas()
    import torch
    import transformers

    answer({"import": time.perf_counter() - began})
    model: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "start":
                began = time.perf_counter()
                load = transformers.AutoModelForCausalLM.from_pretrained
                model = load(command["flags"]["model"], dtype=getattr(torch, command["flags"]["dtype"])).eval()
                answer({"seconds": time.perf_counter() - began})
            elif command["do"] == "play":
                answer(play(model, command["prompts"]))
        except Exception as error:  # noqa: BLE001  (told to the benchmark)
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
