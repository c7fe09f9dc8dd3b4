# SPDX-License-Identifier: Apache-2.0
"""The oracle: full forwards that agree with each other, and no kernel package in transformers' place."""

import importlib.util

import numpy as np
import pytest
import torch

from tests.support import oracle
from vllm_gaudi.testing import checkpoints

NAMES = sorted(name for name in checkpoints.RECIPES if name != "q35_small")
PROMPT = np.random.default_rng(1).integers(len(checkpoints.SPECIAL_TOKENS), checkpoints.VOCAB_SIZE, 37).tolist()


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("name", NAMES)
def test_greedy_and_one_forward_over_its_answer_agree(name, out_dir):
    path = checkpoints.build(name, "float32", out_dir)
    answer, chosen_from = oracle.greedy(path, PROMPT, 5)
    whole = oracle.logits(path, PROMPT + answer)
    assert whole.shape == (len(PROMPT) + 5, checkpoints.VOCAB_SIZE) and whole.dtype == torch.float32
    torch.testing.assert_close(whole[len(PROMPT) - 1 : -1], chosen_from, atol=5e-5, rtol=0)
    assert chosen_from.argmax(-1).tolist() == answer


def test_one_token_is_enough(out_dir):
    path = checkpoints.build("q35_dense", "float32", out_dir)
    assert oracle.logits(path, [9]).shape == (1, checkpoints.VOCAB_SIZE)


def test_a_bfloat16_checkpoint_is_computed_in_float32(out_dir):
    exact = oracle.logits(checkpoints.build("llama", "float32", out_dir), PROMPT)
    rounded = oracle.logits(checkpoints.build("llama", "bfloat16", out_dir), PROMPT)
    assert rounded.dtype == torch.float32
    assert 0 < (exact - rounded).abs().max() < 0.5
    assert not torch.equal(rounded, rounded.to(torch.bfloat16).float())


def test_the_text_part_of_a_vision_checkpoint_uses_every_text_weight(out_dir):
    """A text prompt through the whole model equals the language model and the head by themselves."""
    path = checkpoints.build("q35_vl", "float32", out_dir)
    model = oracle.load(path)
    with torch.inference_mode():
        hidden = model.model.language_model(input_ids=torch.tensor([PROMPT])).last_hidden_state
        assert torch.equal(model.lm_head(hidden)[0], oracle.logits(path, PROMPT))


def test_models_are_kept_and_a_result_does_not_change_with_the_next_call(out_dir):
    path = checkpoints.build("q35_dense", "float32", out_dir)
    assert oracle.load(path) is oracle.load(str(path))
    first = oracle.logits(path, PROMPT)
    kept = first.clone()
    oracle.logits(path, PROMPT[::-1])
    assert torch.equal(first, kept)
    assert torch.equal(first, oracle.logits(path, PROMPT))


def test_gdn_layers_run_on_transformers_own_torch_code():
    for package in oracle.KERNEL_PACKAGES:
        assert importlib.util.find_spec(package) is None


def test_a_kernel_package_is_refused(monkeypatch, out_dir):
    path = checkpoints.build("llama", "float32", out_dir)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "fla" or find_spec(name, *rest))
    with pytest.raises(RuntimeError, match="'fla' is installed"):
        oracle.load(path)
