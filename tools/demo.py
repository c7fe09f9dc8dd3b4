# SPDX-License-Identifier: Apache-2.0
"""`make demo`: serve a tiny Gated-DeltaNet hybrid as a user would and chat with it over the OpenAI API.

Owns the phases, the server process and the table. Never reaches into the engine: everything goes through `vllm serve`
and HTTP. Ordering rule: whatever happens after the server was started, its whole process group is gone before this
exits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".cache" / "demo"
CHECKPOINTS = ROOT / ".cache" / "checkpoints"
MODEL_NAME = "tiny-gdn-hybrid"
NUM_PHASES = 4
START_SECONDS = 600.0
PROGRESS_SECONDS = 5.0
STOP_SECONDS = 10.0
ANSWER_TOKENS = 32
FAILURE_LINES = 30
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

SYSTEM = "You are a helpful assistant and you answer in one short sentence."
QUESTIONS = (
    "How many apples are left in the basket when there were seven and three were eaten?",
    "And how many are left when two more are eaten after that?",
    "Please tell me a short story about a river that wanted to see the sea.",
)
COLUMNS = (
    "turn",
    "prompt tokens",
    "cached tokens",
    "first token (s)",
    "cold (s)",
    "tokens/s",
    "identical to cold",
    "first answer tokens",
)
BLOCK_SIZE = 64
# A state that decode made equals the same tokens prefilled to rounding only; in fp32 that is far below this.
TOLERANCE = 1e-4


class PhaseFailed(Exception):
    """A phase that did not finish; the message is for the user."""


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


@dataclass(frozen=True)
class Answer:
    """One answered question, as the user saw it."""

    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    tokens_per_second: float
    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Turn:
    """A turn of the conversation, and the same prompt answered cold, under a cache salt of its own."""

    number: int
    warm: Answer
    cold: Answer

    @property
    def largest_difference(self) -> float:
        """Between the logprobs of the two answers; infinite where their tokens differ."""
        if self.warm.tokens != self.cold.tokens:
            return float("inf")
        return max((abs(a - b) for a, b in zip(self.warm.logprobs, self.cold.logprobs, strict=True)), default=0.0)

    @property
    def verdict(self) -> str:
        if self.largest_difference == 0.0:
            return "yes, every bit"
        return f"yes, to {self.largest_difference:.0e}" if self.largest_difference <= TOLERANCE else "NO"


@dataclass
class Phases:
    """Prints what is done and how long it took; remembers the last one for the failure message."""

    total: int = NUM_PHASES
    number: int = 0
    name: str = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.number, self.name = self.number + 1, name
        print(f"[{self.number}/{self.total}] {name}", flush=True)
        start = time.monotonic()
        yield
        print(f"      done in {time.monotonic() - start:.1f} s", flush=True)


class Server:
    """A server in its own process group, with its output in a log file."""

    def __init__(self, command: Sequence[str], port: int, log_path: Path):
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        # At run time VLLM_TARGET_DEVICE would select one of vLLM's own platforms.
        environment = {key: value for key, value in os.environ.items() if key != "VLLM_TARGET_DEVICE"}
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait_until_healthy(self, timeout: float = START_SECONDS, every: float = PROGRESS_SECONDS) -> None:
        """Returns once /health answers 200. Raises PhaseFailed when the process ends or the time is over."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        start = shown = time.monotonic()
        while True:
            code = self.process.poll()
            if code is not None:
                raise PhaseFailed(f"the server ended with exit code {code} before it was ready")
            try:
                with opener.open(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                pass
            now = time.monotonic()
            if now - start > timeout:
                raise PhaseFailed(f"the server was not ready after {timeout:.0f} s")
            if now - shown >= every:
                shown = now
                last = (self.last_lines(1) or ["no output yet"])[0]
                print(f"      ... {now - start:.0f} s: {printable(last, 100)}", flush=True)
            time.sleep(0.25)

    def last_lines(self, count: int) -> list[str]:
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-count:]

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Ends the whole process group: asks, waits, then kills. Raises PhaseFailed if a process outlives even that."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)
            deadline = time.monotonic() + timeout
            while time.monotonic() < deadline:
                self.process.poll()  # reaps the leader
                if not living_processes(self.process.pid):
                    return
                time.sleep(0.1)
        raise PhaseFailed(f"still running after SIGKILL: processes {living_processes(self.process.pid)}")


def living_processes(group: int) -> list[int]:
    """Ids of a process group's members, without zombies: in a container nobody may reap those."""
    living = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _parent, process_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(process_group) == group and state not in "ZX":
            living.append(int(entry.name))
    return sorted(living)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_checkpoint(name: str, dtype: str) -> Path:
    command = [sys.executable, "-m", "vllm_gaudi.testing.checkpoints", "--name", name, "--dtype", dtype]
    done = subprocess.run([*command, "--out", str(CHECKPOINTS)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PhaseFailed("\n".join([*done.stderr.splitlines()[-FAILURE_LINES:], "the checkpoint was not made"]))
    return Path(done.stdout.strip().splitlines()[-1])


def serve_command(checkpoint: Path, port: int) -> list[str]:
    """What a user would type, with a small pool and a short context so that it starts fast on any machine."""
    script = Path(sys.executable).with_name("vllm")
    # Where vLLM is a Gaudi image's own, its script starts the image's Python, which does not see this installation.
    vllm = [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    return [
        *vllm,
        "serve",
        str(checkpoint),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", MODEL_NAME),
        *("--max-model-len", "2048", "--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", str(256 << 20)),
        *("--block-size", str(BLOCK_SIZE), "--dtype", "float32"),
        "--enable-prompt-tokens-details",
    ]


def chat(url: str, questions: Sequence[str] = QUESTIONS, clock: Callable[[], float] = time.monotonic) -> list[Turn]:
    """Asks one question after the other in one conversation, streaming. Raises PhaseFailed on an API error."""
    import openai

    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=120.0,
        http_client=openai.DefaultHttpxClient(
            trust_env=False
        ),  # a proxy has no business with this machine's own address
    )
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    turns = []
    with client:
        for number, question in enumerate(questions, start=1):
            messages.append({"role": "user", "content": question})
            try:
                turn = ask(client, number, messages, clock)
            except openai.OpenAIError as error:
                raise PhaseFailed(f"turn {number}: {error}") from error
            messages.append({"role": "assistant", "content": turn.warm.text})
            turns.append(turn)
            reused = f"{turn.warm.cached_tokens} of {turn.warm.prompt_tokens} prompt tokens from the cache"
            print(f"      turn {number}: {reused}, identical to cold: {turn.verdict}", flush=True)
    return turns


def check(turns: Sequence[Turn]) -> None:
    """Raises PhaseFailed when a later turn reused nothing or an answer differs from its cold run."""
    for turn in turns:
        if turn.cold.cached_tokens:
            raise PhaseFailed(f"turn {turn.number}: the cold run reused {turn.cold.cached_tokens} tokens")
        if turn.number > 1 and not turn.warm.cached_tokens:
            raise PhaseFailed(f"turn {turn.number}: nothing was reused")
        if turn.largest_difference > TOLERANCE:
            raise PhaseFailed(f"turn {turn.number}: the answer differs from a cold run by {turn.largest_difference:g}")


def ask(client: Any, number: int, messages: Sequence[Any], clock: Callable[[], float]) -> Turn:
    """The turn as the chat goes on, then the same prompt cold."""
    warm = stream_answer(client, number, messages, clock, {})
    return Turn(number, warm, stream_answer(client, number, messages, clock, {"cache_salt": f"cold-{number}"}))


def stream_answer(
    client: Any, number: int, messages: Sequence[Any], clock: Callable[[], float], extra: dict[str, Any]
) -> Answer:
    start = clock()
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=list(messages),
        max_tokens=ANSWER_TOKENS,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        extra_body={"ignore_eos": True, **extra},  # random weights may choose the end token first
    )
    pieces: list[str] = []
    tokens: list[str] = []
    logprobs: list[float] = []
    first = last = None
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            for entry in (choice.logprobs.content or ()) if choice.logprobs else ():
                tokens.append(entry.token)
                logprobs.append(entry.logprob)
            if choice.delta.content:
                last = clock()
                first = first or last
                pieces.append(choice.delta.content)
    if usage is None or first is None or last is None:
        raise PhaseFailed(f"turn {number}: the stream ended without an answer or without usage numbers")
    details = usage.prompt_tokens_details
    return Answer(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens if details else 0) or 0,
        first_token_seconds=first - start,
        tokens_per_second=(usage.completion_tokens - 1) / (last - first) if last > first else 0.0,
        text="".join(pieces),
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
    )


def format_table(turns: Sequence[Turn]) -> str:
    rows = [COLUMNS] + [
        (
            str(turn.number),
            str(turn.warm.prompt_tokens),
            str(turn.warm.cached_tokens),
            f"{turn.warm.first_token_seconds:.3f}",
            f"{turn.cold.first_token_seconds:.3f}",
            f"{turn.warm.tokens_per_second:.1f}",
            turn.verdict,
            printable(turn.warm.text, 32),
        )
        for turn in turns
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    lines = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    lines.insert(1, "  ".join(["-" * width for width in widths] + ["-" * len(COLUMNS[-1])]))
    return "\n".join(lines)


def printable(text: str, limit: int) -> str:
    """The first characters on one line; what a terminal could not show becomes a dot."""
    shown = "".join(mark if mark.isprintable() and mark != "\ufffd" else "." for mark in text[:limit])
    return shown + ("..." if len(text) > limit else "")


def raise_stopped(signum: int, _frame: FrameType | None) -> None:
    raise Stopped(signum)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """A signal that arrives inside is raised at the end: a process must not be started and then not be known."""
    arrived: list[int] = []
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda number, _frame: arrived.append(number))
    yield
    for signum in STOP_SIGNALS:
        signal.signal(signum, raise_stopped)
    if arrived:
        raise Stopped(arrived[0])


def run(name: str, dtype: str, command_for: Callable[[Path, int], list[str]], work: Path = WORK) -> int:
    """All phases; the exit code. Leaves no process behind."""
    work.mkdir(parents=True, exist_ok=True)
    log_path = work / "server.log"
    phases = Phases()
    server: Server | None = None
    turns: list[Turn] = []
    code = 0
    for signum in STOP_SIGNALS:
        signal.signal(signum, raise_stopped)
    try:
        with phases.phase(f"make a tiny random checkpoint ({name}, {dtype}) with tokenizer and chat template"):
            checkpoint = make_checkpoint(name, dtype)
        with phases.phase("start `vllm serve` on it (imports take a minute on a small machine)"):
            port = free_port()
            with signals_wait():
                server = Server(command_for(checkpoint, port), port, log_path)
            server.wait_until_healthy()
        with phases.phase(f"chat: {len(QUESTIONS)} turns over the OpenAI API, streaming"):
            turns = chat(server.url)
            check(turns)
        with phases.phase("stop the server"):
            server.stop()
    except PhaseFailed as error:
        report_failure(phases, str(error), server)
        code = 1
    except Stopped as stopped:
        print(f"demo: {stopped} in phase {phases.number}/{phases.total}: {phases.name}", file=sys.stderr)
        code = stopped.exit_code
    except Exception as error:  # noqa: BLE001  (reported; the server must be stopped in any case)
        report_failure(phases, f"{type(error).__name__}: {error}", server)
        code = 1
    finally:
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        if server is not None:
            try:
                server.stop()
            except PhaseFailed as error:
                print(f"demo: {error}", file=sys.stderr)
                code = code or 1
    if code == 0:
        print("\n" + format_table(turns))
        print("\nEach turn was asked again cold, under its own cache salt; its answer and logprobs were compared.")
        print("The weights are random, so the answers are noise. The server's log is", log_path)
    return code


def report_failure(phases: Phases, message: str, server: Server | None) -> None:
    if server is not None:
        print("the server's last lines:", file=sys.stderr)
        print("\n".join(f"  | {line}" for line in server.last_lines(FAILURE_LINES)), file=sys.stderr)
    print(f"demo: phase {phases.number}/{phases.total} failed: {phases.name}\n  {message}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve a tiny GDN hybrid and chat with it.")
    parser.add_argument("--name", default="q35_dense", help="a text checkpoint of vllm_gaudi.testing.checkpoints")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    return run(options.name, options.dtype, serve_command)


if __name__ == "__main__":
    sys.exit(main())
