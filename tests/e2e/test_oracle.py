# SPDX-License-Identifier: Apache-2.0
"""Logits against transformers' own forward, and plain prefix caching against its cold twin.

Owns: the claim that what the engine computes is the model. Every row of logits is compared, those of the prompt (raw
prompt logprobs over the whole vocabulary) and those that the answer was chosen from, so agreement of tokens is never
taken for agreement of numbers.
Never: bitwise claims about the chunk grid or the batch (``test_determinism``), or an oracle for bf16: greedy answers in
bf16 are chaotic, there only finite numbers are asked for.

Ordering rule: a test proves its path (chunks, a cache hit) before it compares.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.share import share_of
from tests.support import oracle
from vllm_gaudi.testing.checkpoints import VOCAB_SIZE
from vllm_gaudi.testing.engine import Engine, Result, engine, greedy

DENSE, EXPERTS = 1e-4, 1e-3
TOLERANCE = {
    "q35_dense": DENSE,
    "q35_moe": EXPERTS,
    "next_moe": EXPERTS,
    "q35_vl": DENSE,
    "q35_moe_vl": EXPERTS,
    "qwen3": DENSE,
    "qwen3_moe": EXPERTS,
    "llama": DENSE,
}
TOKENS = 16
BLOCK_SIZES = (16, 128)  # B equal to the GDN chunk, and B of two chunks
WHOLE = 512  # a budget that every prompt fits into
EVERY_LOGIT = {"logprobs_mode": "raw_logits", "max_logprobs": -1}


def flags_of(name: str) -> dict[str, bool]:
    return {"language_model_only": True} if name.endswith("_vl") else {}


def lengths_around(block: int) -> list[int]:
    """Prompt lengths around the GDN chunk and the block."""
    return sorted({1, 2, 3, 63, 64, 65, block - 1, block, block + 1, math.floor(3.3 * block)})


def ragged(block: int) -> list[int]:
    return [block + 1, 1, math.floor(3.3 * block), 65, 2, block - 1]


def prompt_of(length: int) -> list[int]:
    """One prompt per length, the same for every engine, so that the oracle reads it once per model.

    A GDN layer divides its output by its norm, and over the first few tokens that norm may be near zero: about one
    random prompt in twenty has an early row that a single rounding moves by more than DENSE, in any implementation.
    The seed is one without such rows (``test_one_rounding_per_product_moves_the_oracle_less_than_the_tolerance``).
    """
    source = random.Random(20000 + length)
    return [source.randrange(10, 500) for _ in range(length)]


@functools.lru_cache(maxsize=256)
def expected(path: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """The oracle's logits after each token."""
    return oracle.logits(path, tokens)


@functools.lru_cache(maxsize=2)
def exact_model(path: Path) -> tuple[torch.nn.Module, dict[str, float]]:
    """The oracle in fp64, and the relative noise that each of its matrix products adds."""
    model = copy.deepcopy(oracle.load(path)).double()
    noise = {"amount": 0.0}
    source = torch.Generator().manual_seed(0)

    def round_off(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + noise["amount"] * torch.randn(output.shape, generator=source, dtype=output.dtype))

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(round_off)
    return model, noise


def exact(path: Path, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] in fp64, and per row [T] how far noise of half an fp32 ulp on every matrix product moves them."""
    model, noise = exact_model(path)
    with torch.inference_mode():
        noise["amount"] = 0.0
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double()
        noise["amount"] = 2.0**-24
        moved = model(input_ids=torch.tensor([tokens] * 4), use_cache=False).logits.double()
    return logits, (moved - logits).abs().amax(-1).amax(0)


def all_rows(prompt: list[int], result: Result) -> torch.Tensor:
    """[prompt + answer - 1, V] logits of one request: after each prompt token, then after each token of the answer."""
    assert result.logits is not None
    if len(prompt) == 1:
        return result.logits
    flat = result.prompt_logprobs
    assert len(flat) == len(prompt) and flat.start_indices[1] == 0
    ids = torch.tensor(flat.token_ids).view(len(prompt) - 1, VOCAB_SIZE + 1)
    rows = torch.full((len(prompt) - 1, VOCAB_SIZE), float("nan"))
    rows.scatter_(1, ids, torch.tensor(flat.logprobs).view_as(ids))
    return torch.cat([rows, result.logits])


def distance(path: Path, prompt: list[int], result: Result) -> float:
    """Largest difference to the oracle over all rows and tokens; NaN where a row is not finite."""
    assert len(result.tokens) == len(result.logits) > 0
    assert result.tokens == result.logits.argmax(-1).tolist()
    rows = all_rows(prompt, result)
    want = expected(path, tuple(prompt + result.tokens[:-1]))
    assert rows.shape == want.shape
    return (rows - want).abs().max().item()


def assert_near(path: Path, prompts: list[list[int]], results: list[Result], tolerance: float) -> None:
    far = {}
    for prompt, result in zip(prompts, results, strict=True):
        found = distance(path, prompt, result)
        if not found <= tolerance:  # NaN is far, too
            far[len(prompt)] = found
    assert not far, f"by prompt length: {far}"


def ask(num_tokens: int = TOKENS):
    return greedy(num_tokens, prompt_logprobs=-1, flat_logprobs=True)


def check(path: Path, opened: Engine, lengths: list[int], tolerance: float, num_tokens: int = TOKENS) -> None:
    """Prompts of these lengths, run together, against the oracle."""
    prompts = [prompt_of(length) for length in lengths]
    assert_near(path, prompts, opened.generate(prompts, ask(num_tokens)), tolerance)


# The model


@pytest.mark.parametrize("name", ["q35_dense", "q35_vl"])
def test_one_rounding_per_product_moves_the_oracle_less_than_the_tolerance(name, checkpoint):
    """What makes DENSE a fair demand on these prompts."""
    path = checkpoint(name)
    moved = {}
    for length in sorted({length for block in BLOCK_SIZES for length in lengths_around(block)}):
        tokens = prompt_of(length)[:40]
        if length < 40:
            tokens = tokens + oracle.greedy(path, tokens, TOKENS)[0]
        moved[length] = exact(path, tokens)[1].max().item()
    assert min(moved.values()) > 0 and max(moved.values()) < 0.8 * DENSE, moved


@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("name", TOLERANCE)
def test_every_logit_is_the_oracles_for_prompts_read_in_one_step(name, block, checkpoint):
    path = checkpoint(name)
    with engine(path, block_size=block, max_num_batched_tokens=WHOLE, **EVERY_LOGIT, **flags_of(name)) as opened:
        assert opened.block_size == block
        for length in lengths_around(block):
            check(path, opened, [length], TOLERANCE[name])
        check(path, opened, ragged(block), TOLERANCE[name])


@pytest.mark.parametrize(
    ("name", "block", "tokens"),
    share_of(  # every budget on one model, and on each one above a chunk and one below it
        ((name, *b) for name in TOLERANCE for b in ((16, 17), (16, 24), (128, 17), (128, 64), (128, 192))),
        lambda name, block, tokens: name == "q35_dense" or (block, tokens) in ((16, 24), (128, 17)),
    ),
)
def test_every_logit_is_the_oracles_for_prompts_read_in_chunks(name, block, tokens, checkpoint, schedule_of):
    """``tokens``: budgets of 17 and 64 tokens and of one and a half blocks."""
    path = checkpoint(name)
    longest = math.floor(3.3 * block)
    with engine(path, block_size=block, max_num_batched_tokens=tokens, **EVERY_LOGIT, **flags_of(name)) as opened:
        steps = schedule_of(opened)
        check(path, opened, [longest], TOLERANCE[name], num_tokens=4)
        assert max(sum(step.values()) for step in steps) <= tokens
        chunks = list(itertools.accumulate(sum(step.values()) for step in steps)).index(longest) + 1
        assert chunks >= longest / tokens
        # Half the tokens: once a prompt is read, decoding it is what the test above has seen.
        check(path, opened, ragged(block), TOLERANCE[name], num_tokens=TOKENS // 2)


# Inputs that a triangular inverse dislikes


def assert_near_exact(path: Path, prompt: list[int], result: Result) -> None:
    """DENSE, and more only in rows where a rounding in any implementation gives more; those are few."""
    rows = all_rows(prompt, result)
    want, noise = exact(path, prompt + result.tokens[:-1])
    assert (noise < DENSE / 2).double().mean() > 0.8
    error = (rows - want).abs().amax(-1)
    assert (error <= DENSE + 4 * noise).all(), (error.max(), noise[error.argmax()])


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_a_prompt_of_one_repeated_token_stays_on_the_oracle(block, checkpoint):
    path = checkpoint("q35_dense")
    with engine(path, block_size=block, **EVERY_LOGIT) as opened:
        for token in (11, 300):
            prompt = [token] * 300
            assert_near_exact(path, prompt, opened.generate([prompt], ask())[0])


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_a_prompt_of_one_repeated_token_stays_on_the_oracle_with_experts(block, checkpoint):
    path = checkpoint("next_moe")
    with engine(path, block_size=block, **EVERY_LOGIT) as opened:
        prompts = [[token] * 300 for token in (11, 300)]
        assert_near(path, prompts, opened.generate(prompts, ask()), EXPERTS)


@pytest.fixture(scope="module")
def near_identical_keys(checkpoint, tmp_path_factory) -> Path:
    """q35_dense whose tokens are all but the same, written with beta near 1 and forgotten slowly."""
    source = checkpoint("q35_dense")
    target = tmp_path_factory.mktemp("near_identical_keys")
    shutil.copytree(source, target, dirs_exist_ok=True)
    model = copy.deepcopy(oracle.load(source))
    tokens = torch.tensor([prompt_of(300)])
    reached = []
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.copy_(table[7] + 0.003 * (table - table[7]))
        for layer in model.model.layers:
            mixer = layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj
            mixer.weight.mul_(0.1)  # so that what a layer remembers does not tell the tokens of the next layer apart
            if not hasattr(layer, "linear_attn"):
                continue
            gdn, seen = layer.linear_attn, []
            hook = gdn.register_forward_pre_hook(
                lambda _, args, kwargs, seen=seen: seen.append(kwargs), with_kwargs=True
            )
            model(input_ids=tokens, use_cache=False)
            hook.remove()
            hidden = seen[0]["hidden_states"][0]
            mean = hidden.mean(0)
            gdn.in_proj_b.weight.copy_((6 * mean / mean.square().sum()).expand_as(gdn.in_proj_b.weight))
            gdn.A_log.fill_(math.log(0.005))
            beta = torch.sigmoid(gdn.in_proj_b(hidden))
            width = gdn.head_k_dim
            keys = gdn.in_proj_qkv(hidden)[:, gdn.key_dim : gdn.key_dim + width]
            reached.append((beta.min(), torch.cosine_similarity(keys, keys[150:151]).median()))
    assert all(beta > 0.85 and cosine > 0.98 for beta, cosine in reached), reached
    model.save_pretrained(target)
    shutil.copy(source / "config.json", target)
    return target


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_near_identical_keys_with_beta_near_one_stay_on_the_oracle(block, near_identical_keys):
    with engine(near_identical_keys, block_size=block, **EVERY_LOGIT) as opened:
        prompts = [prompt_of(300), prompt_of(65)]
        for prompt, result in zip(prompts, opened.generate(prompts, ask()), strict=True):
            assert_near_exact(near_identical_keys, prompt, result)


# No oracle, but finite


@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("name", ["q35_dense", "next_moe", "llama"])
def test_every_logit_of_a_bfloat16_engine_is_finite(name, block, checkpoint):
    with engine(
        checkpoint(name, "bfloat16"), block_size=block, dtype="bfloat16", **EVERY_LOGIT, **flags_of(name)
    ) as opened:
        prompts = [prompt_of(length) for length in ragged(block)] + [[11] * 100]
        for prompt, result in zip(prompts, opened.generate(prompts, ask()), strict=True):
            rows = all_rows(prompt, result)
            assert torch.isfinite(rows).all()
            assert rows.shape == (len(prompt) + TOKENS - 1, VOCAB_SIZE)
            assert rows.std() > 0.1


# Plain prefix caching: attention models

PLAIN = ("qwen3", "llama")


def cold(opened: Engine, prompt: list[int], num_tokens: int = TOKENS) -> Result:
    """The prompt by itself with a salt of its own, so that it hits nothing."""
    (result,) = opened.generate([prompt], greedy(num_tokens), cache_salt=f"cold {len(prompt)}")
    assert result.cached_tokens == 0
    return result


def same_bits(one: Result, other: Result) -> bool:
    return one.tokens == other.tokens and torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("name", PLAIN)
def test_a_hit_is_bitwise_its_cold_twin(name, block, checkpoint):
    with engine(checkpoint(name), block_size=block) as opened:
        prefix = prompt_of(math.floor(2.84 * block))
        opened.generate([prefix], greedy(1))
        for hit_blocks, prompt in (
            (2, prefix + prompt_of(65)),
            (2, prefix),  # 0.84 of a block is left to compute
            (2, prefix[: 2 * block + 1]),  # one token is left
            (1, prefix[: 2 * block]),  # the last token is always computed
        ):
            (hit,) = opened.generate([prompt])
            assert hit.cached_tokens == hit_blocks * block
            assert same_bits(hit, cold(opened, prompt)), (len(prompt), hit_blocks)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("name", PLAIN)
def test_two_requests_of_one_step_where_the_second_hits_what_the_first_fills_in_it(
    name, block, is_async, checkpoint, schedule_of
):
    with engine(checkpoint(name), block_size=block, max_num_batched_tokens=WHOLE, async_scheduling=is_async) as opened:
        shared = prompt_of(2 * block)
        first, second = shared + prompt_of(3), shared + prompt_of(17)
        steps = schedule_of(opened)
        one, two = opened.generate([first, second])
        assert list(steps[0].values()) == [len(first), len(second) - 2 * block]
        assert (one.cached_tokens, two.cached_tokens) == (0, 2 * block)
        assert same_bits(one, cold(opened, first))
        assert same_bits(two, cold(opened, second))


@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("name", PLAIN)
def test_a_request_admitted_in_the_step_whose_decode_fills_the_block_it_hits(name, block, checkpoint, schedule_of):
    """Sync scheduling only: there the scheduler knows, and publishes, the token that the decode of a step computes."""
    path = checkpoint(name)
    with engine(path, block_size=block, async_scheduling=False) as opened:
        start = prompt_of(block - 3)
        (lead_in,) = opened.generate([start], greedy(4), cache_salt="lead-in")
        block_tokens = start + lead_in.tokens[:3]
        prompt = block_tokens + prompt_of(9)
        writer = opened.add(start, greedy(8))
        for _ in range(3):  # the prompt and two decodes: tokens 0 .. block - 2 are computed
            opened.step()
        steps = schedule_of(opened)
        together = opened.add(prompt)
        opened.step()
        assert sorted(steps[0].values()) == [1, 9], "the decode of the block's last token and the hit share no step"
        opened.run([writer, together])
        assert opened.take(writer).tokens[:4] == lead_in.tokens
        same_step, later = opened.take(together), opened.generate([prompt])[0]
        assert same_step.cached_tokens == later.cached_tokens == block
        assert same_bits(same_step, later)
        # Keys made by decode differ from those of a prefill by rounding, so the cold twin is only near.
        twin = cold(opened, prompt)
        assert same_step.tokens == twin.tokens
        assert (same_step.logits - twin.logits).abs().max() <= DENSE
