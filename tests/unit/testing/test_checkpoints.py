# SPDX-License-Identifier: Apache-2.0
"""The checkpoint factory: what it makes follows from the name alone, and lost state is seen in the logits."""

import copy
import hashlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support import oracle
from vllm_gaudi.testing import checkpoints

SMALL_ENOUGH = sorted(name for name in checkpoints.RECIPES if name != "q35_small")
HYBRIDS = [name for name in SMALL_ENOUGH if "linear_num_key_heads" in checkpoints.RECIPES[name].text]
PROMPT = np.random.default_rng(0).integers(len(checkpoints.SPECIAL_TOKENS), checkpoints.VOCAB_SIZE, 70).tolist()


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def file_hashes(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_the_same_name_gives_the_same_bytes(tmp_path, out_dir):
    first = checkpoints.build("next_moe", "float32", out_dir)
    second = checkpoints.build("next_moe", "float32", tmp_path)
    assert first.name == second.name
    assert file_hashes(first) == file_hashes(second)


def test_a_checkpoint_that_is_there_is_not_touched(out_dir):
    first = checkpoints.build("llama", "float32", out_dir)
    before = (first / "config.json").stat().st_mtime_ns
    assert checkpoints.build("llama", "float32", out_dir) == first
    assert (first / "config.json").stat().st_mtime_ns == before


def test_a_maker_that_comes_second_leaves_the_first_ones_work_and_no_scratch(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: checkpoints.build("qwen3", "float32", tmp_path), range(2)))
    assert made[0] == made[1]
    assert list(tmp_path.iterdir()) == [made[0]]


def test_a_broken_maker_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "TRAINING_TEXT", "too short")
    with pytest.raises(RuntimeError, match="training text"):
        checkpoints.build("llama", "float32", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_directory_name_changes_with_anything_that_changes_the_bytes(monkeypatch):
    recipe = checkpoints.RECIPES["q35_dense"]
    before = checkpoints.fingerprint("q35_dense", recipe)
    monkeypatch.setattr(checkpoints, "WEIGHT_GAIN", 1.3)
    assert checkpoints.fingerprint("q35_dense", recipe) != before


@pytest.mark.parametrize("name", SMALL_ENOUGH)
def test_bfloat16_is_float32_rounded(name, out_dir):
    exact = load_file(checkpoints.build(name, "float32", out_dir) / "model.safetensors")
    rounded = load_file(checkpoints.build(name, "bfloat16", out_dir) / "model.safetensors")
    assert exact.keys() == rounded.keys()
    for key, value in exact.items():
        assert rounded[key].dtype == torch.bfloat16
        assert torch.equal(value.to(torch.bfloat16), rounded[key]), key


@pytest.mark.parametrize("name", SMALL_ENOUGH)
def test_weights_have_the_spread_that_lets_state_matter(name, out_dir):
    weights = load_file(checkpoints.build(name, "float32", out_dir) / "model.safetensors")
    decays = [value.exp() for key, value in weights.items() if key.endswith("A_log")]
    assert len(decays) == checkpoints.RECIPES[name].text["num_hidden_layers"] * 3 // 4 * (name in HYBRIDS)
    for decay in decays:
        assert decay.min() >= 0.005 and decay.max() <= 0.2
    for key, value in weights.items():
        assert value.isfinite().all()
        if value.dim() == 2 and value.numel() >= 4096:
            assert value.std() == pytest.approx(1.2 / math.sqrt(value.shape[1]), rel=0.05), key


@pytest.mark.parametrize("name", SMALL_ENOUGH)
def test_the_config_names_its_architecture_and_the_dtype_of_the_state(name, out_dir):
    recipe = checkpoints.RECIPES[name]
    config = json.loads((checkpoints.build(name, "bfloat16", out_dir) / "config.json").read_text())
    text = config["text_config"] if recipe.is_multimodal else config
    assert config["architectures"] == [recipe.model]
    assert config["dtype"] == "bfloat16"
    assert text.get("mamba_ssm_dtype") == ("float32" if recipe.carries_ssm_dtype else None)
    assert text["vocab_size"] == checkpoints.VOCAB_SIZE


def test_the_state_dtype_can_be_left_out(out_dir):
    path = checkpoints.build("q35_dense", "bfloat16", out_dir, with_ssm_dtype=False)
    assert path != checkpoints.build("q35_dense", "bfloat16", out_dir)
    assert "mamba_ssm_dtype" not in json.loads((path / "config.json").read_text())


def test_real_expert_names_are_in_the_file(out_dir):
    keys = load_file(checkpoints.build("next_moe", "float32", out_dir) / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.7.gate_proj.weight" in keys


@pytest.mark.parametrize(("name", "dtype", "named"), [("gpt", "float32", "q35_dense"), ("llama", "fp32", "bfloat16")])
def test_an_unknown_name_or_dtype_says_what_there_is(name, dtype, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        checkpoints.build(name, dtype, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_covers_every_id_and_every_text(out_dir):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints.build("q35_dense", "float32", out_dir))
    assert len(tokenizer) == checkpoints.VOCAB_SIZE
    for text in ("plain words", "  spaces\n\ttabs", '{"key": [1, 2.5, null]}', "é 漢字 \U0001f600", "\x00\x7f"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == checkpoints.TOKEN_ID["<|im_end|>"]
    assert {
        token: tokenizer.convert_tokens_to_ids(token) for token in checkpoints.SPECIAL_TOKENS
    } == checkpoints.TOKEN_ID


def test_a_longer_conversation_begins_with_the_tokens_of_the_shorter_one(out_dir):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints.build("q35_dense", "float32", out_dir))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you?"}]
    first = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    messages += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "And then?"}]
    second = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert second[: len(first)] == first
    assert first.count(checkpoints.TOKEN_ID["<|im_start|>"]) == 3


# The argument's name differs between the two transformers releases of requirements/host.txt; both know the old one.
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("name", HYBRIDS)
def test_losing_the_state_moves_the_logits(name, out_dir):
    """What the whole recipe is for. Only the recurrent state is lost; convolution tail and attention cache stay."""
    path = checkpoints.build(name, "float32", out_dir)
    model = oracle.load(path)
    with torch.inference_mode():
        cache = model(input_ids=torch.tensor([PROMPT[:64]]), use_cache=True).past_key_values
        emptied = copy.deepcopy(cache)
        states = [state for layer in emptied.layers for state in recurrent_states(layer)]
        assert len(states) == checkpoints.RECIPES[name].text["num_hidden_layers"] * 3 // 4
        for state in states:
            state.zero_()
        rest = torch.tensor([PROMPT[64:]])
        kept = model(input_ids=rest, past_key_values=cache, use_cache=True).logits[0]
        lost = model(input_ids=rest, past_key_values=emptied, use_cache=True).logits[0]
    torch.testing.assert_close(kept, oracle.logits(path, PROMPT)[64:], atol=5e-5, rtol=0)
    assert (kept - lost).abs().max() > 1.0


def recurrent_states(layer):
    """The recurrent state tensors of one layer of transformers' cache; none for an attention layer."""
    states = getattr(layer, "recurrent_states", None)
    if states is None:
        return []
    return list(states.values()) if isinstance(states, dict) else [states]


def test_the_command_line_prints_the_directory_it_made(tmp_path, capfd):
    checkpoints.main(["--name", "llama", "--out", str(tmp_path)])
    out, err = capfd.readouterr()
    path = Path(out.strip())
    assert path.parent == tmp_path and (path / "config.json").is_file()
    assert err == ""
