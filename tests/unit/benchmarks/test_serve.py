# SPDX-License-Identifier: Apache-2.0
"""The served benchmark without a server of vLLM: its command lines, its chat client, and how its table reads."""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tqdm import tqdm

from benchmarks import serve
from benchmarks.engines import SIZES
from benchmarks.worker import Session, Turn

LOAD = serve.PrefixRepetition.of(32)
METRICS = """# HELP vllm:prompt_tokens_total Prefill tokens.
vllm:prompt_tokens_total{engine="0",model_name="m"} %f
vllm:prefix_cache_hits_total{engine="0",model_name="m"} %f
vllm:prefix_cache_hits_total_of_something_else 7.0
"""


class Stub:
    """Answers every prompt with its number of tokens, counted up; says hits of a half of all prompt tokens."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                tokens = sum(map(len, stub.prompts))
                self.wfile.write((METRICS % (tokens, tokens / 2)).encode())

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert request["stream"] and request["ignore_eos"] and request["return_token_ids"]
                stub.prompts.append(request["prompt"])
                self.send_response(200)
                self.end_headers()
                first = len(request["prompt"])
                for n in range(min(request["max_tokens"], 5)):
                    self.event({"choices": [{"token_ids": [first + n]}]})
                if request["prompt"][0] == 0:
                    self.event({"error": {"message": "no such token"}})
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, it):
                self.wfile.write(f"data: {json.dumps(it)}\n\n".encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.served = serve.Server(f"http://127.0.0.1:{self.server.server_port}", "m", Path("nowhere"))
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def stub() -> Iterator[Stub]:
    it = Stub()
    yield it
    it.server.shutdown()
    it.server.server_close()


def test_the_sessions_that_the_pool_is_sized_for_have_the_datasets_shape():
    prompts = [session.turns[0].new for session in LOAD.sessions()]
    assert len(prompts) == 40 and {len(prompt) for prompt in prompts} == {256 + 64}
    assert len({tuple(prompt[:256]) for prompt in prompts}) == 5
    assert len({tuple(prompt) for prompt in prompts}) == 40


class TestChat:
    SESSIONS = (Session([Turn([1, 2], 3), Turn([4], 2)]), Session([Turn([5], 1)]))

    def test_each_turn_comes_after_all_that_was_said_and_answered(self, stub):
        measured = serve.multi_turn(self.SESSIONS, stub.served)
        assert sorted(stub.prompts) == [[1, 2], [1, 2, 2, 3, 4, 4], [5]]
        assert measured["output tokens/s"] == pytest.approx(2 * measured["requests/s"])
        assert 0 < measured["ttft median"] <= measured["ttft p99"]

    def test_hits_are_a_share_of_the_prompts_tokens(self, stub):
        measured = serve.counted(stub.served, functools.partial(serve.multi_turn, self.SESSIONS))
        assert measured["hit"] == 0.5
        assert serve.counters(stub.served) == (9, 4.5)

    @pytest.mark.parametrize(("prompt", "said"), [([0], "no such token"), ([1], "5 of 6 tokens")])
    def test_a_request_that_fails_or_is_cut_is_no_measurement(self, stub, prompt, said):
        with pytest.raises(RuntimeError, match=said):
            serve.ask(stub.served, prompt, 6)


def test_servers_take_turns_and_no_load_comes_twice(monkeypatch, tmp_path):
    played = []

    def bench(load, server, seed, log):
        played.append(("bench", server.url, seed, load.num_prompts))
        return {"requests/s": 1.0}

    def chat(sessions, server):
        played.append(("chat", server.url, sessions == serve.chat_of(SIZES["tiny"], 0), len(sessions)))
        return {"requests/s": 2.0}

    monkeypatch.setattr(serve, "prefix_repetition", bench)
    monkeypatch.setattr(serve, "multi_turn", chat)
    monkeypatch.setattr(serve, "counters", lambda server: (len(played), 0))
    servers = {caching: serve.Server(f"u{n}", "m", tmp_path) for n, caching in enumerate(("off", "on"))}
    with tqdm(disable=True) as progress:
        found = serve.measure(servers, SIZES["tiny"], 2, tmp_path / "log", progress)
    assert played == [
        *(("bench", "u0", 2, 2), ("bench", "u1", 2, 2)),  # left out
        *(("bench", "u0", 0, 40), ("bench", "u1", 0, 40), ("chat", "u0", True, 12), ("chat", "u1", True, 12)),
        *(("bench", "u1", 1, 40), ("bench", "u0", 1, 40), ("chat", "u1", False, 12), ("chat", "u0", False, 12)),
    ]
    assert {name: {c: len(v) for c, v in row.items()} for name, row in found.items()} == {
        "prefix_repetition": {"off": 2, "on": 2},
        "multi-turn chat": {"off": 2, "on": 2},
    }


def test_a_server_that_does_not_start_is_told_with_its_log_and_the_others_are_stopped(monkeypatch, tmp_path):
    started = []
    real = serve.demo.Server

    def start(command, port, log):
        code = "import sys; sys.exit('this flag does not fit')" if "bad" in command else "import time; time.sleep(60)"
        started.append(real([sys.executable, "-c", code], port, log))
        if "bad" not in command:
            monkeypatch.setattr(started[-1], "wait_until_healthy", lambda **_: None)
        return started[-1]

    monkeypatch.setattr(serve.demo, "Server", start)
    with (
        pytest.raises(RuntimeError, match="(?s)caching off: .*exit code 1 .*this flag does not fit"),
        serve.serving({"on": (["good"], 1), "off": (["bad"], 2)}, tmp_path),
    ):
        raise AssertionError("not reached")
    assert [serve.demo.living_processes(server.process.pid) for server in started] == [[], []]


def test_the_table_has_the_commands_and_a_row_for_each_load_and_caching():
    row = {"requests/s": 2.25, "output tokens/s": 100.0, "ttft median": 0.05, "ttft p99": 0.2, "hit": 0.75}
    text = serve.markdown(
        {
            "machine": "device cpu, 2 cores",
            "load": "load 1.0 before and 2.0 after",
            "command": "python -m benchmarks serve",
            "commands": ["vllm serve m", "vllm bench serve --seed 0"],
            "loads": {"prefix_repetition": {"off": [{**row, "hit": 0.0}], "on": [row, {**row, "hit": 0.7}, row]}},
        }
    )
    assert text.startswith("device cpu, 2 cores; load 1.0 before and 2.0 after; python -m benchmarks serve\n")
    assert "    vllm bench serve --seed 0\n" in text
    assert "| prefix_repetition | off | 2.2 | 100 | 50 | 200 | 0 |" in text
    assert "| prefix_repetition | on | 2.2 | 100 | 50 | 200 | 75 (70..75) |" in text
