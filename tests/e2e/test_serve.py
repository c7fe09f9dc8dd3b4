# SPDX-License-Identifier: Apache-2.0
"""The command line as users run it: one ``vllm serve`` for all requests of this file, and vLLM's benchmarks.

The server is a multi-process engine in its own process group on a free port of this machine. A test that ends a server
has one of its own, and looks that its whole group is gone.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks import serve
from benchmarks.engines import SIZES
from benchmarks.worker import Session, Turn
from tests.support.served import CLI, FLAGS, MODEL, PROMPT, environment
from tools import demo
from vllm_gaudi.testing.checkpoints import VOCAB_SIZE
from vllm_gaudi.v1.parent_watch import GRACE


def run_cli(*arguments: str, timeout: float = 300) -> str:
    done = subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, env=environment(), timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def in_process(checkpoint) -> Any:
    """What an engine of the same flags says in this process: tokens, and the logprobs of the likeliest five."""
    from vllm_gaudi.testing.engine import engine

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    flags = {**FLAGS, "skip_tokenizer_init": False, "num_gpu_blocks_override": None}
    with engine(checkpoint("q35_dense"), **flags) as it:
        return it.generate([PROMPT], params)[0]


# One server


def test_it_is_healthy_and_says_what_it_serves(served):
    assert served.get("/health")[0] == 200
    code, models = served.get("/v1/models")
    assert code == 200
    (model,) = json.loads(models)["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 512)
    assert json.loads(served.get("/version")[1])["version"] == "0.30.0"


def test_the_log_says_what_was_built(served):
    log = served.server.log_path.read_text()
    (line,) = [line for line in log.splitlines() if "vllm_gaudi on cpu" in line]
    assert "B = 16 tokens" in line and "3 GDN group(s) + 1 attention group" in line and "blocks" in line
    assert "slots" in line and "weights" in line and "maximum concurrency for 512 tokens per request" in line
    assert "Unknown vLLM environment variable" not in log


def test_completion_equals_the_in_process_engine(served, in_process):
    answer = served.complete(logprobs=5, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == in_process.tokens
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) and answer["usage"]["completion_tokens"] == 8
    for position, token in enumerate(in_process.tokens):
        expected = in_process.logprobs[position]
        assert abs(choice["logprobs"]["token_logprobs"][position] - expected[token].logprob) < 1e-5
        found = sorted(choice["logprobs"]["top_logprobs"][position].values())
        assert found == pytest.approx(
            sorted({p.decoded_token: p.logprob for p in expected.values()}.values()), abs=1e-5
        )


def test_prompt_logprobs_over_http(served):
    answer = served.complete(prompt_logprobs=2)
    found = answer["choices"][0]["prompt_logprobs"]
    assert found[0] is None and len(found) == len(PROMPT)
    assert all(str(token) in position for token, position in zip(PROMPT[1:], found[1:], strict=True))


def test_chat_streams_what_it_says_at_once(served):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How many apples are left in the basket?"}],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    code, whole = served.post("/v1/chat/completions", body)
    assert code == 200
    events = served.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    pieces = [c["delta"].get("content") or "" for e in events for c in e["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert len([p for p in pieces if p]) > 8
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 24 and usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] is not None


def test_sampling_parameters_over_http(served):
    seeded = {"temperature": 1.0, "seed": 3, "n": 2, "top_p": 0.9, "return_token_ids": True}
    first, second = (served.complete(**seeded)["choices"] for _ in range(2))
    assert [c["token_ids"] for c in first] == [c["token_ids"] for c in second]
    assert first[0]["token_ids"] != first[1]["token_ids"]
    (choice,) = served.complete(logit_bias={"77": 100}, return_token_ids=True)["choices"]
    assert choice["token_ids"] == [77] * 8
    text = served.complete(max_tokens=20)["choices"][0]["text"]
    cut = served.complete(max_tokens=20, stop=[text[8:11]])["choices"][0]
    assert cut["text"] == text[: text.index(text[8:11])] and cut["finish_reason"] == "stop"


def test_structured_output_over_http(served):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Is it?"}],
        "max_tokens": 100,
        "temperature": 0,
        "structured_outputs": {"regex": r"(yes|no), [0-9]{2}"},
    }
    code, answer = served.post("/v1/chat/completions", body)
    assert code == 200
    assert re.fullmatch(r"(yes|no), [0-9]{2}", answer["choices"][0]["message"]["content"])
    body["structured_outputs"] = {"choice": ['{"ok": true}', '{"ok": false}']}
    _, answer = served.post("/v1/chat/completions", body)
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"ok"}
    del body["structured_outputs"]
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    code, answer = served.post("/v1/chat/completions", body)
    content = answer["choices"][0]["message"]["content"]
    assert code == 200 and content.lstrip().startswith("{")
    if answer["choices"][0]["finish_reason"] == "stop":
        assert set(json.loads(content)) == {"ok"}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BAD: dict[str, tuple[str, Any, int]] = {
    "temperature": ("/v1/completions", {"prompt": PROMPT, "temperature": 9}, 400),
    "top-p": ("/v1/completions", {"prompt": PROMPT, "top_p": 2}, 400),
    "empty-prompt": ("/v1/completions", {"prompt": []}, 400),
    "too-long": ("/v1/completions", {"prompt": [5] * 600}, 400),
    "too-many-tokens": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 5000}, 400),
    "negative-token": ("/v1/completions", {"prompt": [5, -1]}, 400),
    "huge-token": ("/v1/completions", {"prompt": [5, 10**9]}, 400),
    "logprobs": ("/v1/completions", {"prompt": PROMPT, "logprobs": 100}, 400),
    "seed": ("/v1/completions", {"prompt": PROMPT, "seed": 2**70}, 400),
    "bias": ("/v1/completions", {"prompt": PROMPT, "logit_bias": {"600": 1}}, 400),
    "no-prompt": ("/v1/completions", {}, 400),
    "other-model": ("/v1/completions", {"prompt": PROMPT, "model": "other"}, 404),
    "not-json": ("/v1/completions", b"{", 400),
    "schema": ("/v1/completions", {"prompt": PROMPT, "structured_outputs": {"json": {"type": "objectt"}}}, 400),
    "regex": ("/v1/completions", {"prompt": PROMPT, "structured_outputs": {"regex": "["}}, 400),
    "image": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400),
    "no-messages": ("/v1/chat/completions", {"messages": []}, 400),
    "embedding": ("/v1/embeddings", {"input": "text"}, 404),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_the_client_s_fault(served, in_process, name):
    path, body, expected = BAD[name]
    code, answer = served.post(path, body if isinstance(body, bytes) else {"model": MODEL, **body})
    assert code == expected, answer
    assert served.get("/health")[0] == 200
    assert served.complete(return_token_ids=True)["choices"][0]["token_ids"] == in_process.tokens


def test_a_client_that_hangs_up_frees_its_place(served):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    for _ in range(4):
        assert len(served.stream("/v1/completions", body, stop_after=3)) == 3
    served.complete(max_tokens=40)  # time for the aborts, and a place for one more
    assert served.metric("vllm:num_requests_running") == served.metric("vllm:num_requests_waiting") == 0


def test_metrics_count(served):
    before = served.metric("vllm:generation_tokens_total"), served.metric("vllm:prompt_tokens_total")
    served.complete(max_tokens=7)
    after = served.metric("vllm:generation_tokens_total"), served.metric("vllm:prompt_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (7, len(PROMPT))


@pytest.mark.slow
def test_bench_serve(served, checkpoint, tmp_path):
    run_cli(
        *("bench", "serve", "--backend", "openai", "--base-url", served.server.url, "--model", MODEL),
        *("--tokenizer", str(checkpoint("q35_dense")), "--dataset-name", "random", "--random-input-len", "20"),
        *("--random-output-len", "6", "--num-prompts", "5", "--ignore-eos", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (5, 30)
    assert result["mean_ttft_ms"] > 0 and result["output_throughput"] > 0


def test_the_benchmark_of_a_server_runs_vllms_and_a_chat(served, checkpoint, tmp_path, monkeypatch):
    """As ``python -m benchmarks serve`` does, with six requests and a session of two turns."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = serve.Server(served.server.url, MODEL, checkpoint("q35_dense"))
    load = serve.PrefixRepetition(prefix_len=32, suffix_len=8, output_len=4, num_prefixes=2, num_prompts=6)
    bench = functools.partial(serve.prefix_repetition, load, seed=0, log=tmp_path / "log")
    chat = functools.partial(serve.multi_turn, [Session([Turn(PROMPT[:40], 4), Turn(PROMPT[:9], 4)])])
    for run in (bench, chat):
        measured = serve.counted(server, run)
        assert measured["requests/s"] > 0 and 0 < measured["ttft median"] <= measured["ttft p99"]
    assert measured["hit"] >= 32 / (40 + 53), "the second turn did not hit"
    assert "Serving Benchmark Result" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("caching", "enabled"), [("on", True), ("off", False)])
def test_the_benchmarks_server_takes_its_options_and_the_loads_fit(caching, enabled):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = serve.serve_options(SIZES["tiny"], Path("/a/checkpoint"), 1234, caching)
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    assert (given.model_tag, given.port, given.enable_prefix_caching) == ("/a/checkpoint", 1234, enabled)
    assert (given.block_size, given.max_num_seqs, given.enforce_eager) == (32, serve.CONCURRENCY, True)
    load = serve.PrefixRepetition.of(32)
    assert given.max_model_len >= load.prefix_len + load.suffix_len + load.output_len
    assert given.num_gpu_blocks_override > 40 * (3 + 3) + 5 * 8


def test_the_first_token_id_beyond_the_vocabulary_does_not_end_the_server(served):
    code, answer = served.post("/v1/completions", {"model": MODEL, "prompt": [5, VOCAB_SIZE], "max_tokens": 2})
    assert code == 400, answer
    assert f"0 to {VOCAB_SIZE - 1}" in json.dumps(answer)
    assert served.get("/health")[0] == 200


def test_stopping_leaves_no_process_behind(lone_server):
    group = lone_server.server.process.pid
    lone_server.server.stop()
    assert demo.living_processes(group) == []
    assert lone_server.server.process.poll() is not None


def test_an_engine_whose_server_is_killed_ends_too(lone_server):
    """It would keep its card."""
    group = lone_server.server.process.pid
    os.kill(group, signal.SIGKILL)
    lone_server.server.process.wait(timeout=10)
    deadline = time.monotonic() + GRACE + 10
    while demo.living_processes(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert demo.living_processes(group) == []
    assert "The process that started this one is gone" in lone_server.server.log_path.read_text()


# Without a server


@pytest.mark.soak  # the server above is started by the same command
def test_help():
    text = run_cli("serve", "--help")
    assert "--port" in text or "usage: vllm serve" in text


SMALL = ["--max-model-len", "256", "--max-num-seqs", "4", "--dtype", "float32", "--block-size", "16"]
SMALL += ["--kv-cache-memory-bytes", str(64 << 20)]


@pytest.mark.slow
def test_bench_latency(checkpoint, tmp_path):
    """Its prompts are random ids below 10,000, more than the tiny vocabulary: hence dummy weights of a larger one."""
    run_cli(
        *("bench", "latency", "--model", str(checkpoint("q35_dense")), *SMALL),
        *("--load-format", "dummy", "--hf-overrides", json.dumps({"vocab_size": 10240})),
        *("--input-len", "16", "--output-len", "4", "--batch-size", "2"),
        *("--num-iters-warmup", "1", "--num-iters", "2", "--output-json", str(tmp_path / "latency.json")),
    )
    result = json.loads((tmp_path / "latency.json").read_text())
    assert result["avg_latency"] > 0 and len(result["latencies"]) == 2


@pytest.mark.soak  # as latency, with another loop of vLLM's around the same engine
def test_bench_throughput(checkpoint, tmp_path):
    run_cli(
        *("bench", "throughput", "--model", str(checkpoint("q35_dense")), *SMALL, "--dataset-name", "random"),
        *("--random-input-len", "16", "--random-output-len", "4", "--random-range-ratio", "0", "--num-prompts", "6"),
        *("--output-json", str(tmp_path / "throughput.json")),
    )
    result = json.loads((tmp_path / "throughput.json").read_text())
    # Prompts are texts of random tokens, which need not be as many tokens again.
    assert result["num_requests"] == 6 and 6 * 12 < result["total_num_tokens"] < 6 * 28
