# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-gaudi`: what an engine would be, and why a prompt does not hit, without one.

Owns: the two parsers, exit codes, and that an error is a sentence. 0: it would start, or the comparison is made; 1: it
would be refused; 2: the command line or an input is wrong.
Never: vLLM or torch before a command runs, so that --help is instant.

Ordering rule: the environment of a process without a device is set before vLLM is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

from vllm_gaudi import compat, envs

QUIET = {
    "VLLM_USE_FAKE_HPU": "1",  # a Gaudi belongs to the process that serves
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is the answer's
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
}
"""Set where the user set nothing: no device, no hub, no chatter."""


class UsageError(Exception):
    """An input that the user can repair; the message is the sentence to print."""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of the whole command under "", and those of its commands by name. Standard library only."""
    top = argparse.ArgumentParser(
        prog="vllm-gaudi",
        description="Sizes and misses of vllm_gaudi, told without a device.",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    plan = commands.add_parser(
        "plan",
        help="what `vllm serve MODEL` would be: block size, pool, maximum concurrency, refusals",
        description="What `vllm serve MODEL` would be with the same flags: from its config.json alone, without weights "
        "and without a device. Exits with 1 where it would be refused.",
        epilog="MODEL comes first; every other flag of `vllm serve` may follow.",
        allow_abbrev=False,
    )
    plan.add_argument("model", metavar="MODEL", help="a directory with a config.json, or the config.json itself")
    plan.add_argument(
        "--tp", "--tensor-parallel-size", "-tp", dest="tp", type=positive_int, default=1, metavar="N", help="ranks"
    )
    plan.add_argument(
        "--memory",
        type=positive_float,
        metavar="GiB",
        help="memory of one device in GiB; without it 128 GB, a Gaudi 3's, are assumed",
    )
    plan.add_argument(
        "--peak",
        type=not_negative_float,
        default=0.0,
        metavar="GiB",
        help="what the profile run of a started engine took (its log says so); it is measured, so a plan takes 0",
    )
    for flag, metavar, text in (
        ("--max-model-len", "L", "most tokens of a request, prompt and answer"),
        ("--max-num-seqs", "N", "requests that run at a time: slots"),
        ("--max-num-batched-tokens", "N", "tokens of a step"),
        ("--kv-cache-dtype", "TYPE", "type of keys and values"),
        ("--kv-cache-memory-bytes", "BYTES", "memory of pool and states together, instead of a share of the device"),
    ):
        plan.add_argument(flag, metavar=metavar, help=f"{text}; as for `vllm serve`")
    plan.add_argument("--json", action="store_true", help="print JSON, with bytes as whole numbers")
    why = commands.add_parser(
        "why",
        help="what prompt B reuses of prompt A, and where they part",
        description="Where two prompts part, how much a request B reuses after A, and the reason of the miss.",
        epilog="A and B are text, a JSON list of token ids, a JSON list of chat messages, or the JSON body of a "
        "request; or a file that holds one of these.",
        allow_abbrev=False,
    )
    why.add_argument("a", metavar="A", help="the prompt that ran first")
    why.add_argument("b", metavar="B", help="the prompt that misses")
    why.add_argument("--model", metavar="DIR", help="a directory with tokenizer and config.json; token ids need none")
    why.add_argument(
        "--tp", "--tensor-parallel-size", "-tp", dest="tp", type=positive_int, default=1, metavar="N", help="ranks"
    )
    why.add_argument(
        "--block-size",
        type=positive_int,
        metavar="TOKENS",
        help="block size of the engine, as its start-up line tells; else it follows from --model and --tp",
    )
    why.add_argument(
        "--prefix-cache-retention-interval",
        dest="retention",
        type=retention,
        default=0,
        metavar="N",
        help="as the engine's flag of that name: 0 (default), tokens, or None",
    )
    why.add_argument("--json", action="store_true", help="print JSON")
    return {"": top, "plan": plan, "why": why}


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positive_float(text: str) -> float:
    value = not_negative_float(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def not_negative_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB")
    return value


def retention(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor None")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    top = parsers()[""]
    options, rest = top.parse_known_args(arguments)
    if options.command == "why" and rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    for name, value in QUIET.items():
        envs.set_default(name, value)
    run = _plan if options.command == "plan" else _why
    try:
        return run(options, rest)
    except UsageError as error:
        print(f"vllm-gaudi {options.command}: {error}", file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace, rest: list[str]) -> int:
    _require_vllm()
    compat.define_torchvision_schemas()
    from vllm_gaudi.cli import plan_builder

    found = plan_builder.build(options, rest)
    _print(found.as_dict(), found.as_text, options.json)
    return 1 if found.refusals else 0


def _why(options: argparse.Namespace, rest: list[str]) -> int:
    from vllm_gaudi.cli import why

    if options.model is not None:
        _require_vllm()
    found = why.make(options)
    _print(found.as_dict(), found.as_text, options.json)
    return 0


def _require_vllm() -> None:
    from vllm_gaudi import unsupported_vllm

    sentence = unsupported_vllm()
    if sentence is not None:
        raise UsageError(sentence)


def _print(values: dict, as_text: Callable[[], str], is_json: bool) -> None:
    print(json.dumps(values, indent=2, ensure_ascii=False) if is_json else as_text())
