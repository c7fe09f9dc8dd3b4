# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve`: the engine core in its own process schedules on B after the hand-shake, not on any other value.

Owns: one served engine whose token budget is no multiple of B, over HTTP. Never: reaches into the engine.

Ordering rule: the server's process group is gone when the module is done.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools import dashboard, demo

B = 64
ANSWER = 6


@dataclass(frozen=True)
class Answer:
    cached_tokens: int
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    others: tuple[dict[str, float], ...]


class Served:
    """``counts``: of requests sent, to compare with the metrics."""

    def __init__(self, server: demo.Server):
        self.url = server.url
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> str:
        with self._opener.open(f"{self.url}{path}", timeout=60) as response:
            return response.read().decode()

    def complete(self, prompt: list[int], **extra: Any) -> Answer:
        body = {
            "model": demo.MODEL_NAME,
            "prompt": prompt,
            "max_tokens": ANSWER,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            **extra,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with self._opener.open(request, timeout=120) as response:
            said = json.load(response)
        (choice,) = said["choices"]
        details = said["usage"]["prompt_tokens_details"]
        assert said["usage"]["prompt_tokens"] == len(prompt)
        return Answer(
            cached_tokens=(details or {}).get("cached_tokens") or 0,
            tokens=tuple(choice["logprobs"]["tokens"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            others=tuple(choice["logprobs"]["top_logprobs"]),
        )

    def counter(self, name: str, **labels: str) -> float | None:
        """Sum over the engines of a counter in /metrics, None where it is not there."""
        found = None
        for line in self.get("/metrics").splitlines():
            match = re.fullmatch(r"([\w:]+)\{([^}]*)\} (\S+)", line)
            if match and match[1] == name and all(f'{key}="{value}"' in match[2] for key, value in labels.items()):
                found = (found or 0.0) + float(match[3])
        return found


@pytest.fixture(scope="module")
def served(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    port = demo.free_port()
    script = Path(sys.executable).with_name("vllm")
    command = [
        *([str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]),
        *("serve", str(checkpoint("q35_dense")), "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", demo.MODEL_NAME, "--dtype", "float32", "--block-size", str(B)),
        *("--max-model-len", "1024", "--max-num-seqs", "4", "--max-num-batched-tokens", "100"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        server = demo.Server(command, port, tmp_path_factory.mktemp("serve") / "server.log")
    try:
        server.wait_until_healthy()
        yield Served(server)
    except demo.PhaseFailed as failed:
        pytest.fail("\n".join([str(failed), *server.last_lines(30)]))
    finally:
        server.stop()


@pytest.mark.parametrize("blocks", [2.4, 2.0, 3.4, 1.0, 3.0, 0.9])
def test_the_first_repeat_hits_on_b_and_equals_its_cold_twin(
    blocks: float, served: Served, prompt: Callable[[int], list[int]]
) -> None:
    text = [10 + (token + int(97 * blocks)) % 480 for token in prompt(int(blocks * B))]  # another one for each length
    cold = served.complete(text, cache_salt="of its own")
    first, second = served.complete(text), served.complete(text)
    assert (cold.cached_tokens, first.cached_tokens) == (0, 0)
    assert second.cached_tokens == (len(text) - 1) // B * B
    for answer in (first, second):
        assert len(answer.tokens) == ANSWER
        assert (answer.tokens, answer.logprobs, answer.others) == (cold.tokens, cold.logprobs, cold.others)


def test_the_checkpoints_reach_prometheus(served: Served, prompt: Callable[[int], list[int]]) -> None:
    installed = importlib.metadata.entry_points(group="vllm.stat_logger_plugins")
    if not any(point.value == "vllm_gaudi.v1.metrics:GaudiStatLogger" for point in installed):
        pytest.skip("the installed metadata is older: no entry point vllm.stat_logger_plugins; run make install")

    def read() -> dict[str, float | None]:
        names = ("checkpoints_saved", "checkpoints_restored", "checkpoint_bytes_moved")
        return {name: served.counter(f"vllm_gaudi:{name}_total") for name in names}

    text = [10 + (token + 211) % 480 for token in prompt(3 * B + 7)]
    before, short = read(), served.counter("vllm_gaudi:prefix_cache_misses_total", reason="shorter_than_block")
    assert None not in before.values() and short is not None
    served.complete(text)
    assert served.complete(text).cached_tokens == 3 * B
    served.complete(text[:9])
    after = read()
    moved = {name: after[name] - before[name] for name in after}  # type: ignore[operator]
    # A budget of 100 takes one block a step: three boundaries, and one restore.
    assert (moved["checkpoints_saved"], moved["checkpoints_restored"]) == (3, 1)
    assert moved["checkpoint_bytes_moved"] > 0 and moved["checkpoint_bytes_moved"] % 4 == 0
    assert served.counter("vllm_gaudi:prefix_cache_misses_total", reason="shorter_than_block") == short + 1


def test_every_metric_of_the_dashboard_is_served(served: Served) -> None:
    exposed = {line.split("{")[0] for line in served.get("/metrics").splitlines() if line and line[0] != "#"}
    assert dashboard.metrics() - exposed == set()
    labels = {curve.by for panel in dashboard.PANELS for curve in panel.curves if curve.by}
    assert labels == {"reason"} and served.counter(dashboard.MISSES, reason="no_checkpoint") is not None
    assert served.counter("vllm_gaudi:state_slots") == 4
