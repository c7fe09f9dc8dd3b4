# SPDX-License-Identifier: Apache-2.0
"""GSM8K through lm-eval, against `vllm serve` with caching on and then off: a floor, and what caching changes.

Owns: the task (GSM8K's questions after one and the same examples, so that prompts share a prefix that can be cached;
lm-eval's own task draws other examples for every question, and nothing would ever be hit), the two servers, and the
comparison.
Never: lm-eval in this environment. It has one of its own and sees the server through HTTP only.

Ordering rule: that answers came out of the cache is shown before scores are compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import demo
from tools.nightly import report
from tools.nightly.process import variables
from tools.nightly.setting import ROOT

PINS = ROOT / "requirements" / "nightly.txt"
EVALUATOR = ROOT / ".cache" / "lm-eval"
TASK = "gsm8k_shared_prefix"
SCORE = "exact_match,strict-match"
HITS, PROMPTS = "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total"


@dataclass(frozen=True)
class Gate:
    """``floor`` of the score, with caching on and with caching off. ``apart``: most that the two scores may differ."""

    name: str
    variable: str
    floor: float
    apart: float = 0.03  # of 256 questions: seven or eight; one standard error of such a score is 0.02
    num_examples: int = 16  # about 2,500 tokens, so that two blocks of 1,152 are shared
    limit: int = 256


GATES = (
    Gate("Qwen3.5-35B-A3B", "NIGHTLY_QWEN35_35B_A3B", floor=0.90),
    # To be set to what the first night shows, less 0.02: no score of this model is known yet.
    Gate("Qwen3.6-27B", "NIGHTLY_QWEN36_27B", floor=0.90),
)


@dataclass(frozen=True)
class Answers:
    """One run. ``texts``: what was answered, by question. ``hits`` of ``prompts``: tokens, as the server counted."""

    score: float
    texts: Mapping[str, str]
    hits: float
    prompts: float


# The task


def task(data: str, num_examples: int, num_tokens: int = 512) -> dict[str, Any]:
    """The task's configuration. ``data``: folder with train.jsonl and test.jsonl, empty for the hub's data set."""
    files = {split: str(Path(data).resolve() / f"{split}.jsonl") for split in ("train", "test")}
    where: dict[str, Any] = {"dataset_path": "openai/gsm8k", "dataset_name": "main"}
    if data:
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
    return {
        "task": TASK,
        **where,
        "training_split": "train",
        "test_split": "test",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": num_examples,
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {
            "until": ["Question:", "<|im_end|>"],
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": num_tokens,
        },
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [{"function": "regex", "regex_pattern": r"#### (-?[\d.,]+)"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "regexes_to_ignore": [",", r"\$", r"(?s).*#### ", r"\.$"],
            }
        ],
        "metadata": {"version": 1.0},
    }


def write_task(folder: Path, configuration: Mapping[str, Any]) -> None:
    """JSON is YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{TASK}.yaml").write_text(json.dumps(configuration, indent=1))


def write_questions(folder: Path, num_examples: int, num_questions: int) -> None:
    """Questions in GSM8K's form, of our own, where the data set cannot be had."""
    source = random.Random(9)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", num_examples), ("test", num_questions)):
        lines = []
        for _ in range(count):
            who, what = source.choice(("Ada", "Ben", "Eva", "Tom")), source.choice(("apples", "books", "cards"))
            had, more = source.randrange(3, 40), source.randrange(2, 20)
            question = f"{who} has {had} {what} and gets {more} more. How many {what} does {who} have then?"
            answer = f"{who} has {had} + {more} = <<{had}+{more}={had + more}>>{had + more} {what}.\n#### {had + more}"
            lines.append(json.dumps({"question": question, "answer": answer}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


# lm-eval


def install_evaluator() -> Path:
    """Python of an environment that holds lm-eval as pinned; made, or made anew, only when the pins have changed."""
    python, stamp = EVALUATOR / "bin" / "python", EVALUATOR / "stamp"
    key = hashlib.sha256(PINS.read_bytes() + sys.version.encode()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != key:
        venv.create(EVALUATOR, clear=True, with_pip=True, symlinks=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", PINS], check=True)
        stamp.write_text(key)
    return python


def evaluators_environment(tasks: Path) -> dict[str, str]:
    """This one's without our modules; the hub is asked only where the task's data set is the hub's."""
    is_local = json.loads((tasks / f"{TASK}.yaml").read_text())["dataset_path"] == "json"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"HF_HUB_OFFLINE": "1" if is_local else "0"}


def command(python: Path, url: str, model: str, tasks: Path, out: Path, limit: int) -> list[str]:
    """What is run against a server. Its tokenizer stays out: prompts go as text and the server cuts them."""
    about = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "None",
        "tokenized_requests": "False",
        "num_concurrent": "8",
        "max_retries": "1",
        "timeout": "1800",
    }
    return [
        *(str(python), "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in about.items())),
        *("--tasks", TASK, "--include_path", str(tasks), "--limit", str(limit), "--batch_size", "1"),
        *("--output_path", str(out), "--log_samples"),
    ]


def read_answers(out: Path, hits: float, prompts: float) -> Answers:
    """What lm-eval has written below ``out``, which must be one run. Raises RuntimeError where it is not."""
    results, samples = sorted(out.rglob("results_*.json")), sorted(out.rglob(f"samples_{TASK}_*.jsonl"))
    if len(results) != 1 or len(samples) != 1:
        raise RuntimeError(f"{out} holds {len(results)} results and {len(samples)} lists of samples, not one of each")
    score = json.loads(results[0].read_text())["results"][TASK][SCORE]
    texts = {}
    for line in samples[0].read_text().splitlines():
        sample = json.loads(line)
        texts[str(sample["doc_id"])] = sample["resps"][0][0]
    return Answers(float(score), texts, hits, prompts)


# One model


def serve_command(model: str, port: int, flags: Sequence[str], is_caching: bool) -> list[str]:
    script = Path(sys.executable).with_name("vllm")
    vllm = [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    return [
        *(*vllm, "serve", model, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", TASK),
        *("--enable-prefix-caching" if is_caching else "--no-enable-prefix-caching", *flags),
    ]


def metric(url: str, name: str) -> float:
    """Sum of a counter over its labels; 0 where the server does not have it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)))


def ask(
    python: Path, model: str, flags: Sequence[str], is_caching: bool, tasks: Path, out: Path, limit: int
) -> Answers:
    """Start a server, run lm-eval against it, stop it. Raises RuntimeError when either fails."""
    out.mkdir(parents=True, exist_ok=True)
    port = demo.free_port()
    with variables({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}):
        server = demo.Server(serve_command(model, port, flags, is_caching), port, out / "server.log")
    try:
        server.wait_until_healthy(timeout=7200, every=60)
        arguments = command(python, server.url, TASK, tasks, out / "lm-eval", limit)
        with (out / "lm-eval.log").open("w") as log:
            environment = evaluators_environment(tasks)
            done = subprocess.run(arguments, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"lm-eval ended with exit code {done.returncode}; {out / 'lm-eval.log'} has its output")
        return read_answers(out / "lm-eval", metric(server.url, HITS), metric(server.url, PROMPTS))
    finally:
        server.stop()


def check(gate: Gate, on: Answers, off: Answers, is_exact: bool) -> None:
    """Raises AssertionError when a score is below the floor, caching moves it, or the cache was not used.

    ``is_exact``: every answer must be the same text with caching on and off.
    """
    assert on.texts.keys() == off.texts.keys() and on.texts, "the two runs have not answered the same questions"
    assert on.hits > 0, f"{gate.name}: no token of {on.prompts:.0f} came out of the cache"
    assert off.hits == 0, f"{gate.name}: {off.hits:.0f} tokens came out of a cache that was off"
    for name, answers in (("on", on), ("off", off)):
        assert answers.score >= gate.floor, f"{gate.name}, caching {name}: {answers.score:.3f}, floor {gate.floor:.3f}"
    apart = abs(on.score - off.score)
    assert apart <= gate.apart, f"{gate.name}: caching moves the score by {apart:.3f}, at most {gate.apart:.3f}"
    if is_exact:
        other = [key for key, text in on.texts.items() if text != off.texts[key]]
        assert not other, f"{gate.name}: caching changes the answers to questions {', '.join(other)}"


def run(gate: Gate, model: str, data: str, out: Path, flags: Sequence[str], is_exact: bool) -> list[dict[str, Any]]:
    """Both servers and the check; returns the table's rows."""
    python = install_evaluator()
    folder = out / f"gsm8k-{gate.name}"
    shutil.rmtree(folder, ignore_errors=True)  # results of two nights must not mix
    write_task(folder / "task", task(data, gate.num_examples, num_tokens=32 if is_exact else 512))
    runs = {
        name: ask(python, model, flags, name == "on", folder / "task", folder / name, gate.limit)
        for name in ("on", "off")
    }
    rows = [
        {
            "model": gate.name,
            "caching": name,
            "questions": len(it.texts),
            "score": it.score,
            "floor": gate.floor,
            "same answers": sum(text == runs["off"].texts.get(key) for key, text in it.texts.items()),
            "prompt tokens": it.prompts,
            "of them cached": it.hits,
        }
        for name, it in runs.items()
    ]
    report.write(out, f"gsm8k-{gate.name}", f"GSM8K, {gate.num_examples} examples, {gate.name}", rows)
    check(gate, runs["on"], runs["off"], is_exact)
    return rows
