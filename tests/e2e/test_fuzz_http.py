# SPDX-License-Identifier: Apache-2.0
"""No request over HTTP ends the engine: whatever one asks, the next one is answered with the same bits.

Requests are drawn from the live server's own OpenAPI schema, mixed with values that are hostile to a property. The
canary is a completion that the server answered before any of them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support import hostile_http
from tests.support.hostile_http import HostileRequest
from tests.support.served import PROMPT, Served
from tools import demo

REQUEST_SECONDS = 60.0
CANARY = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "seed": 1, "logprobs": 5, "return_token_ids": True}
SERVER_ERRORS: dict[str, tuple[str, str]] = {
    "a parser or validator of the front end, on nested brackets": ("maximum recursion depth exceeded", ""),
    "a validator of the front end that runs before the types are checked": (r"object has no attribute '\w+'", ""),
    "a grammar that cannot be compiled, or that no token satisfies: vLLM ends the request": (
        "Internal server error",
        "Failed to compile grammar|grammar rejected tokens",
    ),
    "a priority beyond 64 bits, which only the body's is checked for": ('"message":""', "X-Vllm-Priority"),
}
"""Why vLLM itself answers 500: what its message says, and what the request or the log says besides."""


class EngineEnded(AssertionError):
    """The server does not answer the canary as before."""


class Canary:
    """Says whether the server still answers as when this was made."""

    def __init__(self, served: Served):
        self._served = served
        self._ask()  # from now on every answer has its hit of the prefix cache
        self.expected = self._ask()

    def check(self, last: object) -> None:
        """Raises EngineEnded, with the request that went before."""
        try:
            found = self._ask()
            health = self._served.get("/health")[0]
        except (OSError, http.client.HTTPException, AssertionError) as error:
            raise EngineEnded(f"no answer to the canary ({error!r}) after {last}") from error
        if health != 200:
            raise EngineEnded(f"/health says {health} after {last}")
        if found != self.expected:
            raise EngineEnded(f"{found}, before {self.expected}, after {last}")

    def _ask(self) -> Any:
        (choice,) = self._served.complete(**CANARY)["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]


class Fuzzed:
    """A server with its canary; remembers the first request that did harm, which later ones would hide."""

    def __init__(self, served: Served):
        self.served = served
        self.canary = Canary(served)
        self.answers: Counter[tuple[str, int]] = Counter()
        self._harm: AssertionError | None = None

    def play(self, request: HostileRequest) -> None:
        """Sends it, and asks the canary. Raises AssertionError, from then on always the same one."""
        with self._remembering_harm():
            logged = self.served.server.log_path.stat().st_size
            status, text = self.send(request)
            self.answers[request.path, status] += 1
            if status >= 500:
                time.sleep(0.3)  # the server logs where it raised once it has answered
                log = self.log_from(logged)
                known = any(
                    re.search(message, text) and re.search(besides, f"{request} {log}")
                    for message, besides in SERVER_ERRORS.values()
                )
                ours = "vllm_gaudi/" in log
                assert known and not ours, f"{status} that nobody has looked at: {text[:500]} after {request}"
            self.canary.check(request)

    def log_from(self, byte: int) -> str:
        return self.served.server.log_path.read_bytes()[byte:].decode(errors="replace")

    @contextlib.contextmanager
    def _remembering_harm(self) -> Iterator[None]:
        if self._harm is not None:
            raise self._harm
        try:
            yield
        except AssertionError as harm:
            self._harm = harm
            raise

    def send(self, request: HostileRequest) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.served.server.url.removeprefix("http://"), timeout=REQUEST_SECONDS)
        try:
            connection.putrequest(request.method, request.path)
            for name, value in request.headers.items():
                connection.putheader(name, value.encode("latin-1"))
            connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders()
            connection.send(request.body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise EngineEnded(f"no answer ({error!r}) to {request}") from error
        finally:
            connection.close()


@pytest.fixture(scope="module")
def fuzzed(served) -> Fuzzed:
    return Fuzzed(served)


@pytest.fixture(scope="module")
def hostile(served) -> st.SearchStrategy[HostileRequest]:
    return hostile_http.requests(json.loads(served.get("/openapi.json")[1]))


@pytest.mark.random
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_request_ends_the_engine(fuzzed, hostile, share):
    """Without shrinking: once the engine has ended, every request would seem to have ended it."""

    @settings(max_examples=share(40), phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(hostile)
    def play(request: HostileRequest) -> None:
        fuzzed.play(request)

    play()
    answered = {path for path, status in fuzzed.answers if status == 200}
    assert {"/v1/completions", "/v1/chat/completions"} <= answered, "nothing legal was drawn"
    assert any(status == 400 for _, status in fuzzed.answers), "nothing hostile was drawn"


CIRCLE = {"grammar": "root ::= a\na ::= b\nb ::= a"}
KNOWN: dict[str, HostileRequest] = {
    name: HostileRequest("POST", path, body if isinstance(body, bytes) else hostile_http.encode(body), headers)
    for name, path, body, headers in [
        ("token", "/v1/completions", {"prompt": [5, 512], "max_tokens": 2}, {}),
        ("second-prompt", "/v1/completions", {"prompt": [[5], [5, 512]], "max_tokens": 2}, {}),
        ("seed", "/v1/completions", {"prompt": [5], "max_tokens": 2, "seed": 2**63, "temperature": 1}, {}),
        (
            "last-seed",
            "/v1/completions",
            {"prompt": [5], "max_tokens": 2, "seed": 2**63 - 1, "temperature": 1, "n": 2},
            {},
        ),
        ("bias", "/v1/completions", {"prompt": [5], "max_tokens": 2, "logit_bias": {"5": float("nan")}}, {}),
        ("no-token-left", "/v1/completions", {"prompt": [5], "max_tokens": 2, "logit_bias": hostile_http.NO_TOKEN}, {}),
        ("xargs", "/v1/completions", {"prompt": [5], "max_tokens": 2, "vllm_xargs": {"a": 10**30}}, {}),
        ("transfer", "/v1/completions", {"prompt": [5], "max_tokens": 2, "kv_transfer_params": {"a": 10**30}}, {}),
        ("rank", "/v1/completions", {"prompt": [5], "max_tokens": 2}, {"X-data-parallel-rank": "9" * 40}),
        (
            "tag",
            "/v1/completions",
            {"prompt": [5], "max_tokens": 2, "structured_outputs": {"structural_tag": "{}"}},
            {},
        ),
        ("no-word-of-grammar", "/v1/completions", {"prompt": [5], "max_tokens": 2, "structured_outputs": CIRCLE}, {}),
        ("priority", "/v1/completions", {"prompt": [5], "max_tokens": 2}, {"X-Vllm-Priority": "9" * 40}),
        ("detokenize", "/detokenize", {"tokens": [10**30]}, {}),
        ("deep", "/v1/completions", b"[" * 100000, {}),
    ]
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_request_of_a_known_kind(fuzzed, name):
    fuzzed.play(KNOWN[name])


# The gate turns red


def test_a_changed_answer_is_noticed(fuzzed):
    """One logprob, by its last bit."""
    canary = Canary(fuzzed.served)
    tokens, logprobs, top = canary.expected
    canary.expected = tokens, [math.nextafter(logprobs[0], 0.0), *logprobs[1:]], top
    with pytest.raises(EngineEnded, match="before .*, after the request"):
        canary.check("the request")


def test_a_server_error_that_nobody_has_looked_at_is_noticed(fuzzed, monkeypatch):
    it = Fuzzed(fuzzed.served)
    monkeypatch.setattr(it, "send", lambda request: (500, "list index out of range"))
    with pytest.raises(AssertionError, match="500 that nobody has looked at: list index out of range"):
        it.play(KNOWN["token"])


def test_a_server_error_of_this_plugin_is_noticed(fuzzed, monkeypatch):
    """Even one with a message that vLLM's own have."""
    it = Fuzzed(fuzzed.served)
    monkeypatch.setattr(it, "send", lambda request: (500, "'list' object has no attribute 'get'"))
    monkeypatch.setattr(it, "log_from", lambda byte: "")
    it.play(KNOWN["token"])
    frame = 'File "/x/vllm_gaudi/request_checks.py", line 1, in check_token_ids'
    monkeypatch.setattr(it, "log_from", lambda byte: frame)
    with pytest.raises(AssertionError, match="500 that nobody has looked at"):
        it.play(KNOWN["token"])


def test_an_engine_that_ends_is_noticed(lone_server):
    """As where a step raises: the process of the engine is gone, the server's is not."""
    fuzzed = Fuzzed(lone_server)
    (engine,) = [pid for pid in demo.living_processes(fuzzed.served.server.process.pid) if "EngineCore" in title(pid)]
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(EngineEnded, match="token"):
        for _ in range(100):  # until the server has heard of it
            fuzzed.play(KNOWN["token"])
            time.sleep(0.1)
    with pytest.raises(EngineEnded, match="512"):
        fuzzed.play(KNOWN["deep"])  # which is not the one that did it


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/comm").read_text()
