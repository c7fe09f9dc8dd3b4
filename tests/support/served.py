# SPDX-License-Identifier: Apache-2.0
"""A live ``vllm serve`` of a tiny checkpoint, and a client that sees errors as answers.

Owns: the flags and the environment of that server, and that it is gone afterwards.
Never: a check of what it answers. Ordering rule: the server is healthy before a test sees it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import demo

MODEL = "tiny"
PROMPT = [10 + (i * i * 7 + i * 13) % 480 for i in range(50)]
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "block_size": 16,
    "kv_cache_memory_bytes": 64 << 20,
}
CLI = [str(Path(sys.executable).with_name("vllm"))]


def environment() -> dict[str, str]:
    """As a user's: the engine in a process of its own; no warm-up, which other tests are about."""
    left_out = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_TARGET_DEVICE", "VLLM_LOGGING_LEVEL")
    return {k: v for k, v in os.environ.items() if k not in left_out} | {"VLLM_SKIP_WARMUP": "1"}


def as_options(flags: dict[str, Any]) -> list[str]:
    return [text for name, value in flags.items() for text in ("--" + name.replace("_", "-"), str(value))]


class Served:
    """The running server; ``post`` and ``get`` return status and body, also of an error."""

    def __init__(self, server: demo.Server):
        self.server = server
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> tuple[int, str]:
        return self._send(urllib.request.Request(self.server.url + path))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        code, text = self._send(urllib.request.Request(self.server.url + path, data, headers))
        try:
            return code, json.loads(text)
        except json.JSONDecodeError:
            return code, text

    def stream(self, path: str, body: dict[str, Any], stop_after: int | None = None) -> list[dict[str, Any]]:
        """The events of a streamed answer; the client hangs up after ``stop_after`` of them."""
        data = json.dumps({**body, "stream": True}).encode()
        request = urllib.request.Request(self.server.url + path, data, {"Content-Type": "application/json"})
        events: list[dict[str, Any]] = []
        with self._opener.open(request, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line.removeprefix(b"data: ")))
                if stop_after is not None and len(events) >= stop_after:
                    break
        return events

    def complete(self, **values: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **values}
        code, answer = self.post("/v1/completions", body)
        assert code == 200, answer
        return answer

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        _, text = self.get("/metrics")
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)
        assert values, name
        return sum(map(float, values))

    def _send(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with self._opener.open(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextlib.contextmanager
def serving(checkpoint: Path, log_path: Path) -> Iterator[Served]:
    """One server for the ``with`` block."""
    port = demo.free_port()
    command = [*CLI, "serve", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", MODEL, "--enable-prompt-tokens-details", *as_options(FLAGS)]
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment())
    try:
        server = demo.Server(command, port, log_path)
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        server.wait_until_healthy(timeout=300)
        yield Served(server)
    finally:
        server.stop()
