# SPDX-License-Identifier: Apache-2.0
"""Repairs, advice and notes of a plan, from literal numbers: no engine, no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi.capabilities import Refused
from vllm_gaudi.cli.plan import Advice, Block, Fit, Flags, MaxConcurrency, Memory, Numbers, Pool, Refusal, State
from vllm_gaudi.cli.plan_builder import (
    Outcome,
    advise,
    model_named,
    notes_on,
    refusals_of,
    repair,
    serve_command,
)

MIB = 2**20
FLAGS = Flags(1, 32768, 8, 2048, "bfloat16", "auto", True, 0)
STATE = State(61440, "bfloat16", 3145728, "float32", 3207168, 147 * MIB, 0.87, True, (), 0.53)
NUMBERS = Numbers(
    flags=FLAGS,
    block=Block(896, 128, 64, 16, (16, 16, 16), 3670016, 58720256),
    state=STATE,
    memory=Memory(
        10**11, False, 0.92, None, 92 * 10**9, 54 * 10**9, 27 * 10**9, 0, 8, 2, 4, 2 * 10**9, 2**23, 36 * 10**9
    ),
    pool=Pool(600, 600 * 58720256, 599 * 896),
    boundary=None,
    max_concurrency=MaxConcurrency(32768, Fit(8.0, 15.0, 600), Fit(8.0, 16.0, 605)),
)


class Asked:
    """Answers every question with ``outcome``, and keeps what was asked."""

    def __init__(self, *outcomes: Outcome | None):
        self._outcomes = list(outcomes)
        self.changes: list[dict[str, Any]] = []

    def __call__(self, **changes: Any) -> Outcome | None:
        self.changes.append(changes)
        return self._outcomes.pop(0)


def outcome(block_size: int = 896, num_blocks: int | None = 100) -> Outcome:
    return Outcome(block_size, 3, 8, num_blocks)


def flags_of(advice: Any) -> list[tuple[str, ...]]:
    return [one.flags for one in advice]


DETAILS = ("--enable-prompt-tokens-details",)


def test_a_command_that_needs_nothing_is_told_how_to_see_its_hits():
    what_if = Asked()
    assert flags_of(advise(NUMBERS, what_if)) == [DETAILS]
    assert what_if.changes == []
    without = replace(NUMBERS, flags=replace(FLAGS, prefix_caching=False))
    assert advise(without, what_if) == advise(replace(NUMBERS, state=None), what_if) == ()
    assert notes_on(NUMBERS, None) == ()


@pytest.mark.parametrize(("other", "grown"), [(outcome(1152), "B is 1,152 with it"), (None, "B grows with it")])
def test_a_state_that_is_kept_in_bf16_is_advised_to_be_float32(other, grown):
    what_if = Asked(other)
    numbers = replace(NUMBERS, state=replace(STATE, ssm_dtype="bfloat16"))
    first, *_ = advise(numbers, what_if)
    assert first.flags == ("--mamba-ssm-cache-dtype", "float32")
    assert first.why.endswith(grown)
    assert what_if.changes == [{"mamba_ssm_cache_dtype": "float32"}]


@pytest.mark.parametrize(("tokens", "is_advised"), [(71, True), (72, False)])
def test_a_budget_that_leaves_no_gdn_chunk_beside_the_decodes_is_raised(tokens, is_advised):
    numbers = replace(NUMBERS, flags=replace(FLAGS, max_num_batched_tokens=tokens))
    assert (("--max-num-batched-tokens", "72") in flags_of(advise(numbers, Asked()))) is is_advised


def test_what_does_not_fit_gets_the_fewest_ranks_that_start_with_the_other_advice_taken():
    numbers = replace(NUMBERS, flags=replace(FLAGS, tensor_parallel_size=2), pool=None)
    numbers = replace(numbers, state=replace(STATE, ssm_dtype="bfloat16"))
    what_if = Asked(outcome(), outcome(num_blocks=None), outcome())
    assert flags_of(advise(numbers, what_if))[-1] == ("--tensor-parallel-size", "8")
    assert what_if.changes[1:] == [
        {"tensor_parallel_size": ranks, "mamba_ssm_cache_dtype": "float32"} for ranks in (4, 8)
    ]
    assert ("--tensor-parallel-size", "16") not in flags_of(advise(replace(NUMBERS, pool=None), Asked(*[None] * 4)))


def test_what_no_flag_mends_is_noted():
    short = replace(NUMBERS, flags=replace(FLAGS, max_model_len=896))
    (note,) = notes_on(short, None)
    assert note == "no prompt can hit: --max-model-len 896 is not longer than a block of 896 tokens"
    many = replace(NUMBERS, flags=replace(FLAGS, max_num_seqs=31))
    (note,) = notes_on(many, None)
    assert note.startswith("a slot takes 147.00 MiB, used or not: --max-num-seqs 31 takes 4.45 GiB, and the pool holds")
    nothing = replace(NUMBERS, max_concurrency=MaxConcurrency(32768, None, None))
    (note,) = notes_on(nothing, None)
    assert note.endswith("takes 1.15 GiB")
    (note,) = notes_on(NUMBERS, 144)
    assert "--block-size 144 is refused" in note
    assert notes_on(NUMBERS, 256) == ()


def test_an_outcome_holds_requests_with_their_checkpoint():
    assert outcome(num_blocks=101).fit(10 * 896 - 1) == Fit(100 / 13, 100 / 13, 101)
    assert replace(outcome(num_blocks=101), max_num_seqs=2).fit(10 * 896) == Fit(2, 100 / 13, 101)
    assert outcome(num_blocks=None).fit(896) is None


# The command


def test_a_lone_config_file_is_not_named_as_a_model(tmp_path):
    for name in ("config.json", "qwen.json"):
        (tmp_path / name).write_text("{}")
    assert model_named(str(tmp_path)) == model_named(str(tmp_path / "config.json")) == str(tmp_path)
    assert model_named(str(tmp_path / "qwen.json")) is None
    assert serve_command(None, ["--max-num-seqs", "8"], ()) == "vllm serve MODEL --max-num-seqs 8"


def test_advice_replaces_what_was_given():
    advice = (Advice(("--dtype", "bfloat16"), "", ("--dtype",)), Advice((), "", ("--kv-cache-dtype",)))
    given = ["--dtype", "float16", "--kv-cache-dtype=fp8", "--max-num-seqs", "8"]
    assert serve_command("m", given, advice) == "vllm serve m --max-num-seqs 8 --dtype bfloat16"


# Repairs


@dataclass(frozen=True)
class Args:
    dtype: str = "float16"
    kv_cache_dtype: str = "fp8"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()


def attempt(error: Exception | None = None) -> Any:
    return SimpleNamespace(config=None, engine=None, error=error)


def refused(*names: str) -> Refused:
    return Refused({name: f"{name} is refused" for name in names})


def test_what_starts_is_left_as_it_is():
    starts = attempt()
    repaired = repair(Args(), lambda args: starts)
    assert (repaired.args, repaired.attempt, repaired.errors, repaired.advice) == (Args(), starts, (), ())


def test_every_row_with_a_repair_is_repaired_at_once():
    errors = iter([refused("dtype", "kv-cache-dtype"), ValueError("too long")])
    repaired = repair(Args(), lambda args: attempt(next(errors)))
    assert (repaired.args.dtype, repaired.args.kv_cache_dtype) == ("bfloat16", "auto")
    assert [type(error) for error in repaired.errors] == [Refused, ValueError]
    assert flags_of(repaired.advice) == [("--dtype", "bfloat16"), ()]
    assert repaired.advice[1].drop == ("--kv-cache-dtype", "--kv-cache-dtype-skip-layers")


@pytest.mark.parametrize("error", [refused("dtype", "lora"), ValueError("too long")], ids=["row", "vLLM's"])
def test_one_row_without_a_repair_leaves_all_as_they_are(error):
    repaired = repair(Args(), lambda args: attempt(error))
    assert (repaired.args, repaired.errors, repaired.advice) == (Args(), (error,), ())


def test_an_error_is_told_by_its_rows_or_as_what_stops_a_start():
    assert refusals_of(refused("dtype", "lora"), "both") == (
        Refusal("dtype", "dtype is refused"),
        Refusal("lora", "lora is refused"),
    )
    assert refusals_of(ValueError("x"), "x of vLLM") == (Refusal("start", "x of vLLM"),)
    assert refusals_of(KeyError("x"), "'x'") == (Refusal("start", "KeyError: 'x'"),)
