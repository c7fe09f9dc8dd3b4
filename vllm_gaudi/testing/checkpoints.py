# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints with long memory, made on the spot: safetensors, config, tokenizer with a chat template.

Owns the table of models (``RECIPES``), how their weights are drawn, and the tokenizer. Never downloads anything and
never changes a checkpoint once it is in place: what a directory holds follows from its name, which carries a hash of
everything that went into it. Ordering rule: a checkpoint is written beside its place and renamed into it last, so a
reader sees all of it or nothing, and two makers may race.

Long memory: a Gated-DeltaNet layer drawn with a library's default initialisation forgets within a few tokens, and
then a state that was lost or mixed up changes nothing a test could see. Here the decay per token is small (A in
0.005..0.2), so the state of hundreds of tokens ago still moves the logits.

    python -m vllm_gaudi.testing.checkpoints --name q35_dense --dtype float32 --out DIR
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_gaudi.compat import define_torchvision_schemas

DTYPES = ("float32", "bfloat16")
VOCAB_SIZE = 512
# Counts up when the way of drawing, saving or tokenizing changes; recipes are hashed by themselves.
REVISION = 1

WEIGHT_GAIN = 1.2  # standard deviation of a weight is GAIN / sqrt(fan-in)
NORM_SPREAD = 0.1
DT_BIAS_SPREAD = 0.5
DECAY_RANGE = (0.005, 0.2)  # of A = exp(A_log), log-uniform

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOKEN_ID = {token: position for position, token in enumerate(SPECIAL_TOKENS)}

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# Trains the tokenizer. Any text would do; a built-in one gives the same tokens on every machine.
TRAINING_TEXT = """
A cache holds what was computed once so that it need not be computed again. A block of the cache holds the keys and
the values of a fixed number of tokens, and a table tells for each request which blocks hold its tokens, in the order
of the tokens. When a second request begins with the same tokens as the first, the blocks of the first can serve the
second, and only the rest of the prompt has to be read. A layer with a state is different: it keeps one matrix for all
that it has read, and the matrix after a thousand tokens says nothing about the matrix after five hundred. To begin in
the middle, the state of the middle must have been kept. That is what a checkpoint is for.

The scheduler decides how many tokens each request may compute in the next step. The worker prepares the inputs, runs
the model and samples one token for each request that has read its whole prompt. A request that finishes gives back
its blocks and its slot. A request that is preempted gives them back too, and starts again later, from the longest
prefix that is still in the cache. Long prompts are read in pieces, short ones together, and answers are written one
token at a time.

Question: how many apples are in the basket when there were seven and three were eaten? Answer: four apples are left
in the basket. Question: what is the capital of the country? Answer: the largest city is not always the capital.
Question: can you write a short story about a river? Answer: once upon a time a river wanted to see the sea, so it
went on and on, through the hills and through the fields, until there was nothing left to cross. Please tell me more
about it. Thank you, what happened then? Then the river forgot its name, because in the sea there are no names, there
is only water.

def add(first, second):
    return first + second

for number in range(10):
    if number % 2 == 0:
        print(number, "is even")
    else:
        print(number, "is odd")

{"name": "value", "list": [1, 2, 3, 10, 20, 30, 100, 2024], "true": true, "false": false, "null": null}
"""


@dataclass(frozen=True)
class Recipe:
    """One model: the transformers classes and the arguments of its config, text_config and vision_config."""

    config: str
    model: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any] | None = None
    carries_ssm_dtype: bool = False  # real configs of this family name the dtype of the state

    @property
    def is_multimodal(self) -> bool:
        return self.vision is not None


ROPE_QUARTER = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
ROPE_QUARTER_3D = {**ROPE_QUARTER, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
ROPE_FULL = {"rope_type": "default", "rope_theta": 10000.0}

ATTENTION = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
# Value heads are twice the key heads, as in most of the real models.
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MLP = {"intermediate_size": 128}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}

# Every fourth layer of a hybrid is attention: 8 layers are 2 per cache group (3 GDN groups and 1 of attention), 4 are
# 1.
RECIPES: dict[str, Recipe] = {
    "q35_dense": Recipe(
        config="Qwen3_5TextConfig",
        model="Qwen3_5ForCausalLM",
        text={**ATTENTION, **GDN, **MLP, "num_hidden_layers": 8, "rope_parameters": ROPE_QUARTER},
        carries_ssm_dtype=True,
    ),
    "q35_moe": Recipe(
        config="Qwen3_5MoeTextConfig",
        model="Qwen3_5MoeForCausalLM",
        text={
            **ATTENTION,
            **GDN,
            **EXPERTS,
            **SHARED_EXPERT,
            "num_hidden_layers": 4,
            "rope_parameters": ROPE_QUARTER,
        },
        carries_ssm_dtype=True,
    ),
    "next_moe": Recipe(
        config="Qwen3NextConfig",
        model="Qwen3NextForCausalLM",
        text={
            **ATTENTION,
            **GDN,
            **MLP,
            **EXPERTS,
            **SHARED_EXPERT,
            "decoder_sparse_step": 1,
            "num_hidden_layers": 8,
            "rope_parameters": ROPE_QUARTER,
        },
    ),
    "q35_vl": Recipe(
        config="Qwen3_5Config",
        model="Qwen3_5ForConditionalGeneration",
        text={**ATTENTION, **GDN, **MLP, "num_hidden_layers": 4, "rope_parameters": ROPE_QUARTER_3D},
        vision=VISION,
        carries_ssm_dtype=True,
    ),
    "q35_moe_vl": Recipe(
        config="Qwen3_5MoeConfig",
        model="Qwen3_5MoeForConditionalGeneration",
        text={
            **ATTENTION,
            **GDN,
            **EXPERTS,
            **SHARED_EXPERT,
            "num_hidden_layers": 4,
            "rope_parameters": ROPE_QUARTER_3D,
        },
        vision=VISION,
        carries_ssm_dtype=True,
    ),
    "qwen3": Recipe(
        config="Qwen3Config",
        model="Qwen3ForCausalLM",
        text={**ATTENTION, **MLP, "num_hidden_layers": 4, "rope_parameters": ROPE_FULL, "tie_word_embeddings": True},
    ),
    "qwen3_moe": Recipe(
        config="Qwen3MoeConfig",
        model="Qwen3MoeForCausalLM",
        text={
            **ATTENTION,
            **MLP,
            **EXPERTS,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "rope_parameters": ROPE_FULL,
        },
    ),
    "llama": Recipe(
        config="LlamaConfig",
        model="LlamaForCausalLM",
        text={**ATTENTION, **MLP, "num_hidden_layers": 4, "rope_parameters": ROPE_FULL},
    ),
    # For benchmarks: head sizes of the real models, about 50 M parameters.
    "q35_small": Recipe(
        config="Qwen3_5TextConfig",
        model="Qwen3_5ForCausalLM",
        text={
            **ATTENTION,
            "hidden_size": 512,
            "head_dim": 128,
            "max_position_embeddings": 65536,
            "intermediate_size": 1536,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_hidden_layers": 12,
            "rope_parameters": ROPE_QUARTER,
        },
        carries_ssm_dtype=True,
    ),
}


def build(name: str, dtype: str, out_dir: str | Path, *, with_ssm_dtype: bool = True) -> Path:
    """Makes the checkpoint where it is missing and returns its directory, a child of ``out_dir``.

    ``bfloat16`` holds the rounded weights of ``float32``. ``with_ssm_dtype=False`` leaves ``mamba_ssm_dtype`` out of
    a config whose real ones carry it. Raises ValueError for an unknown name or dtype.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown checkpoint {name!r}; there are {', '.join(sorted(RECIPES))}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; there are {', '.join(DTYPES)}")
    recipe = RECIPES[name]
    if not with_ssm_dtype:
        recipe = dataclasses.replace(recipe, carries_ssm_dtype=False)
    root = Path(out_dir)
    target = root / f"{name}-{dtype}-{fingerprint(name, recipe)}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=root))
    try:
        write_model(name, recipe, dtype, scratch)
        write_tokenizer(scratch, recipe.text["max_position_embeddings"])
        scratch.chmod(0o755)
        move_into_place(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def fingerprint(name: str, recipe: Recipe) -> str:
    """Eight hex digits over everything that decides the bytes of a checkpoint, apart from the dtype."""
    facts = {
        "name": name,
        "recipe": dataclasses.asdict(recipe),
        "revision": REVISION,
        "spreads": [WEIGHT_GAIN, NORM_SPREAD, DT_BIAS_SPREAD, *DECAY_RANGE],
        "tokenizer": [TRAINING_TEXT, CHAT_TEMPLATE, *SPECIAL_TOKENS],
        "transformers": importlib.metadata.version("transformers"),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def move_into_place(scratch: Path, target: Path) -> None:
    """Renames, or leaves what another process put there first."""
    try:
        os.rename(scratch, target)
    except OSError:
        if not target.is_dir():
            raise


def draw(model_name: str, parameter: str, shape: tuple[int, ...], initial: np.ndarray) -> np.ndarray:
    """float32 values of one parameter; they depend on both names and the shape, not on the order of drawing.

    ``initial`` is what the library set: norm weights stay around it (0 or 1, by the layer's formula).
    """
    seed = hashlib.sha256(f"{model_name}/{parameter}".encode()).digest()
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(seed[:16], "big")))
    if parameter.endswith("A_log"):
        low, high = (math.log(bound) for bound in DECAY_RANGE)
        return rng.uniform(low, high, shape).astype(np.float32)
    noise = rng.standard_normal(shape, dtype=np.float32)
    if parameter.endswith("dt_bias"):
        return DT_BIAS_SPREAD * noise
    if len(shape) == 1:
        return initial + NORM_SPREAD * noise
    return noise * np.float32(WEIGHT_GAIN / math.sqrt(fan_in(parameter, shape)))


def fan_in(parameter: str, shape: tuple[int, ...]) -> int:
    """Inputs per output: convolutions are [out, in, *kernel], stacked experts [expert, out, in], the rest [out, in]."""
    if "conv1d" in parameter or "patch_embed" in parameter:
        return math.prod(shape[1:])
    return shape[-1]


def make_config(recipe: Recipe) -> Any:
    import transformers

    end = TOKEN_ID["<|im_end|>"]
    text = json.loads(json.dumps(dict(recipe.text)))  # configs keep and change what they are given
    text |= {"bos_token_id": None, "eos_token_id": end, "pad_token_id": TOKEN_ID["<|endoftext|>"]}
    if recipe.carries_ssm_dtype:
        text["mamba_ssm_dtype"] = "float32"
    config_class = getattr(transformers, recipe.config)
    if recipe.vision is None:
        return config_class(**text)
    return config_class(
        text_config=text,
        vision_config=dict(recipe.vision),
        image_token_id=TOKEN_ID["<|image_pad|>"],
        video_token_id=TOKEN_ID["<|video_pad|>"],
        vision_start_token_id=TOKEN_ID["<|vision_start|>"],
        vision_end_token_id=TOKEN_ID["<|vision_end|>"],
    )


def write_model(name: str, recipe: Recipe, dtype: str, directory: Path) -> None:
    """config.json, generation_config.json and model.safetensors."""
    import torch

    define_torchvision_schemas()
    import transformers

    model = getattr(transformers, recipe.model)(make_config(recipe)).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            values = draw(name, parameter_name, tuple(parameter.shape), parameter.numpy())
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)))
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=TOKEN_ID["<|im_end|>"], pad_token_id=TOKEN_ID["<|endoftext|>"]
    )
    model.to(getattr(torch, dtype)).save_pretrained(directory)


def write_tokenizer(directory: Path, max_length: int) -> None:
    """A byte-level BPE of exactly VOCAB_SIZE tokens: every id of the model is a token and every text can be encoded."""
    define_torchvision_schemas()
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the training text gave {tokenizer.get_vocab_size()} tokens, the models have {VOCAB_SIZE}")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vllm_gaudi.testing.checkpoints", description="Make a checkpoint.")
    parser.add_argument("--name", required=True, choices=sorted(RECIPES))
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--out", required=True, type=Path, help="the checkpoint becomes a directory in this one")
    parser.add_argument("--without-ssm-dtype", action="store_true", help="leave mamba_ssm_dtype out of the config")
    options = parser.parse_args(arguments)
    define_torchvision_schemas()
    import transformers

    transformers.utils.logging.disable_progress_bar()
    print(build(options.name, options.dtype, options.out, with_ssm_dtype=not options.without_ssm_dtype))


if __name__ == "__main__":
    main()
