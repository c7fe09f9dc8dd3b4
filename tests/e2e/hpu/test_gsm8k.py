# SPDX-License-Identifier: Apache-2.0
"""GSM8K with caching on and off. On a host: a tiny model on questions of our own, which must be answered the same.

Downloads lm-eval into .cache/lm-eval when it is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.nightly import gsm8k
from tools.nightly import setting as settings

pytestmark = [pytest.mark.hpu, pytest.mark.timeout(8 * 3600)]
FLAGS = ("--language-model-only", "--max-model-len", "8192", "--max-num-seqs", "32")
TINY_FLAGS = (
    *("--dtype", "float32", "--block-size", "64", "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
)


@pytest.mark.parametrize("gate", gsm8k.GATES, ids=lambda gate: gate.name)
def test_the_score_reaches_its_floor_with_caching_on_and_off(gate, setting, cannot):
    if not setting.is_device:
        pytest.skip("a host tries the script on a tiny model, below")
    model = settings.read(gate.variable)
    if not model:
        cannot(f"{gate.variable} does not name a checkpoint of {gate.name}")
    gsm8k.run(gate, model, settings.read("NIGHTLY_GSM8K"), Path(setting.out), FLAGS, is_exact=False)


def test_caching_changes_no_answer_of_a_tiny_model_and_a_missed_floor_fails(setting, tmp_path, monkeypatch):
    if setting.is_device:
        pytest.skip("the real models are asked, above")
    monkeypatch.setitem(os.environ, "VLLM_SKIP_WARMUP", "1")
    gsm8k.write_questions(tmp_path, num_examples=8, num_questions=24)
    gate = gsm8k.Gate("tiny", "", floor=0.0, num_examples=3, limit=24)
    on, off = gsm8k.run(gate, setting.model, str(tmp_path), Path(setting.out), TINY_FLAGS, is_exact=True)
    assert on["of them cached"] > 0 == off["of them cached"] and on["questions"] == on["same answers"] == 24
    answers = gsm8k.Answers(on["score"], {"0": ""}, 1, 1)
    with pytest.raises(AssertionError, match="floor 0.900"):
        gsm8k.check(gsm8k.GATES[0], answers, gsm8k.Answers(on["score"], {"0": ""}, 0, 1), is_exact=True)
