# SPDX-License-Identifier: Apache-2.0
"""`vllm-gaudi why` on literal token ids, and on what is no prompt. Whether an engine agrees is e2e/test_why.py's."""

from __future__ import annotations

import json

import pytest

from vllm_gaudi.v1.core.sched.cache_stats import DEFERRED, EVICTED, NO_CHECKPOINT, SHORT

B = 4
TEN = list(range(10, 20))


def with_change_at(place, tokens=TEN):
    return [*tokens[:place], 99, *tokens[place + 1 :]]


# A, B, common tokens, then hit and reason: fresh, pressed, together, full
CASES = {
    "identical": (TEN, TEN, 10, (8, None), (8, None), (8, DEFERRED), (8, None)),
    "extended": (TEN, [*TEN, *TEN], 10, (8, None), (8, None), (8, DEFERRED), (8, None)),
    "shortened": (TEN, TEN[:7], 7, (4, None), (0, EVICTED), (4, DEFERRED), (0, NO_CHECKPOINT)),
    "shorter than a block": (TEN, TEN[:4], 4, (0, SHORT), (0, SHORT), (0, SHORT), (0, SHORT)),
    "a block and a token": (TEN, TEN[:5], 5, (4, None), (0, EVICTED), (4, DEFERRED), (0, NO_CHECKPOINT)),
    "at the first token": (TEN, with_change_at(0), 0, (0, None), (0, None), (0, None), (0, None)),
    "in the first block": (TEN, with_change_at(3), 3, (0, None), (0, None), (0, None), (0, None)),
    "right after a boundary": (TEN, with_change_at(4), 4, (4, None), (0, EVICTED), (4, DEFERRED), (0, NO_CHECKPOINT)),
    "after the last boundary": (TEN, with_change_at(9), 9, (8, None), (8, None), (8, DEFERRED), (8, None)),
    "B on a boundary": (TEN[:8], TEN[:8], 8, (4, None), (4, None), (4, DEFERRED), (4, None)),
}


def why(run, a, b, *flags):
    code, out, err = run("why", json.dumps(a), json.dumps(b), "--block-size", B, "--json", *flags)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("case", CASES)
def test_what_is_reused_and_why_not(case, run):
    a, b, common, *expected = CASES[case]
    found = why(run, a, b)
    assert (found["common_tokens"], found["common_blocks"]) == (common, common // B)
    states = [found[key] for key in ("fresh", "pressed", "together", "full")]
    assert [(state["tokens"], state["reason"]) for state in states] == expected


@pytest.mark.parametrize(
    ("interval", "boundaries", "pressed"), [("0", [8], 0), ("4", [4, 8], 4), ("8", [8], 0), ("None", [4, 8], 4)]
)
def test_retention_decides_what_is_left_under_pressure(interval, boundaries, pressed, run):
    found = why(run, TEN, with_change_at(6), "--prefix-cache-retention-interval", interval)
    assert found["boundaries"] == boundaries
    assert found["pressed"]["tokens"] == pressed and found["fresh"]["tokens"] == 4


def test_the_place_is_shown_in_both(run):
    code, text, _ = run("why", json.dumps(TEN), json.dumps(with_change_at(6)), "--block-size", B)
    assert code == 0
    assert "A token 16:      ...10 11 12 13 14 15>>>16<<<17 18 19" in text
    assert "B token 99:      ...10 11 12 13 14 15>>>99<<<17 18 19" in text
    _, text, _ = run("why", json.dumps(TEN), json.dumps(TEN[:7]), "--block-size", B)
    assert "B ends:" in text and ">>>end<<<" in text and "A token 17:" in text
    _, text, _ = run("why", json.dumps(TEN), json.dumps(TEN), "--block-size", B)
    assert "the prompts are the same 10 tokens" in text and ">>>" not in text


def test_the_words_have_the_numbers_of_the_json(run):
    a, b = list(range(5000)), [*range(4001), *range(7000, 9000)]
    _, text, _ = run("why", json.dumps(a), json.dumps(b), "--block-size", 896)
    found = json.loads(run("why", json.dumps(a), json.dumps(b), "--block-size", 896, "--json")[1])
    assert found["fresh"]["tokens"] == 3584 and found["pressed"]["tokens"] == 0 and found["boundaries"] == [4480]
    for number in ("5,000", "6,001", "4,001", "3,584", "4,480", "896"):
        assert number in text
    assert f"whole blocks in common      {found['common_blocks']} " in text


def test_another_salt_shares_nothing(run):
    salted = {"prompt_token_ids": TEN, "cache_salt": "x"}
    found = why(run, TEN, salted)
    assert found["common_tokens"] == 10 and found["fresh"] == {"tokens": 0, "reason": None}
    assert any("cache_salt" in note for note in found["notes"])
    assert why(run, salted, salted)["fresh"]["tokens"] == 8


def test_prompt_logprobs_do_not_look_into_the_cache(run):
    found = why(run, TEN, {"prompt": TEN, "prompt_logprobs": 1})
    assert found["fresh"] == {"tokens": 0, "reason": None}
    assert any("prompt_logprobs" in note for note in found["notes"])


def test_a_file_is_read(tmp_path, run):
    (tmp_path / "a.json").write_text(json.dumps(TEN))
    (tmp_path / "b").write_text(json.dumps({"prompt_token_ids": TEN}))
    code, out, _ = run("why", tmp_path / "a.json", tmp_path / "b", "--block-size", B, "--json")
    assert code == 0 and json.loads(out)["fresh"]["tokens"] == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("[1]", "[2]"), "the block size is not known; pass --block-size"),
        (("[1]", "two", "--block-size", 4), "B: text and chats need a tokenizer; pass --model DIR"),
        (("one", "two", "--block-size", 4), "A and B: text and chats need a tokenizer"),
        (("[1]", "nothing.json", "--block-size", 4), "B: there is no file nothing.json"),
        (("[1]", "[]", "--block-size", 4), "B: a JSON list is of token ids, or of chat messages"),
        (("[1]", "[true]", "--block-size", 4), "B: a JSON list is of token ids, or of chat messages"),
        (("[-1]", "[1]", "--block-size", 4), "A: -1 is not a token id"),
        (("{}", "[1]", "--block-size", 4), "A: a JSON object is the body of a request"),
        (
            ("[1]", "[2]", "--block-size", 4, "--prefix-cache-retention-interval", 6),
            "is not a multiple of the block size 4",
        ),
        (("[1]", "[2]", "--block-size", 4, "--prefix-cache-retention-interval", "x"), "neither a number of tokens nor"),
        (("[1]", "[2]", "--block-size", 0), "is not a positive whole number"),
        (("[1]", "[2]", "--model", "nowhere"), "there is no file or directory nowhere"),
        (("[1]", "[2]", "--nope"), "unrecognized arguments: --nope"),
    ],
)
def test_what_is_no_prompt_is_a_sentence(arguments, said, run):
    code, out, err = run("why", *arguments)
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
