# SPDX-License-Identifier: Apache-2.0
"""What prefix caching on a GDN hybrid cannot do right is refused by the engine that is asked for it, with the flag.

Owns: the refusals that concern checkpoints, each with a real engine that must not start.
Never: the rest of the refusal table.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig

from vllm_gaudi.platform import HpuPlatform
from vllm_gaudi.testing.engine import engine, greedy

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}

REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str, str]] = {
    # flags, environment, what the sentence says, the flag or variable it names
    "a finer match unit": ({"prefix_match_unit": 8}, {}, "in units of 8 tokens", "remove --prefix-match-unit"),
    "fine-grained junctions": (
        {"enable_mamba_fine_grained_prefix_cache": True},
        {},
        "fine-grained prefix caching",
        "remove --enable-mamba-fine-grained-prefix-cache",
    ),
    "the per-block layout": ({}, {"VLLM_COMPACT_GDN": "0"}, "a GDN state per block", "VLLM_COMPACT_GDN"),
    "speculation": (
        {"speculative_config": NGRAM},
        {},
        "speculative decoding (ngram)",
        "remove --speculative-config",
    ),
    "a KV connector": (
        {"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")},
        {},
        "KV connectors",
        "remove --kv-transfer-config",
    ),
    "contiguous paged attention": ({}, {"VLLM_CONTIGUOUS_PA": "1"}, "contiguous paged", "VLLM_CONTIGUOUS_PA"),
    "the defragmenter": ({}, {"VLLM_DEFRAG": "1"}, "defragmenter", "VLLM_DEFRAG"),
}


def refusal(path: Path, **flags: Any) -> str:
    """What the engine says when it does not start."""
    with pytest.raises((RuntimeError, ValueError)) as raised, engine(path, **{"enable_prefix_caching": True, **flags}):
        pass
    return str(raised.value)


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("model", ["q35_dense", "next_moe"])
def test_it_is_refused_with_the_flag_to_change(
    model: str, what: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, environment, says, flag = REFUSED[what]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sentence = refusal(checkpoint(model), **flags)
    assert sentence.count("vllm_gaudi refuses this configuration: ") == 1 and says in sentence and flag in sentence


def with_layers(path: Path, target: Path, kinds: str) -> Path:
    """A copy of a checkpoint whose layers are ``kinds``, l for linear and f for full attention; for dummy weights."""
    shutil.copytree(path, target)
    config = json.loads((target / "config.json").read_text())
    config["layer_types"] = [{"l": "linear_attention", "f": "full_attention"}[kind] for kind in kinds]
    config["num_hidden_layers"] = len(kinds)
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("caching", [True, False])
def test_a_gdn_group_longer_than_the_attention_group_is_refused(
    caching: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    mixed = with_layers(checkpoint("q35_dense"), tmp_path / "mixed", "lflflflfl")
    sentence = refusal(mixed, load_format="dummy", enable_prefix_caching=caching)
    assert "GDN layers but the attention group has only 4" in sentence and "do not line up" in sentence


def test_the_same_layers_in_groups_that_line_up_are_served(
    checkpoint: Callable[..., Path], tmp_path: Path, prompt: Callable[[int], list[int]]
) -> None:
    """The refusal above is about positions: any order of layers with no GDN group longer than attention's is right."""
    mixed = with_layers(checkpoint("q35_dense"), tmp_path / "mixed", "flllfl")
    with engine(mixed, load_format="dummy", enable_prefix_caching=True) as serving:
        text = prompt(3 * serving.block_size + 2)
        first, second = (serving.generate([text], greedy(4))[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 3 * serving.block_size)
        assert first.tokens == second.tokens


@pytest.mark.parametrize("mamba_block_size", [8, 32, 64])
def test_a_mamba_block_size_of_its_own_never_reaches_the_groups(
    mamba_block_size: int, checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    """vLLM takes the flag and then sets it to B wherever GDN blocks are cached."""
    flags = {"block_size": 16, "mamba_block_size": mamba_block_size, "enable_prefix_caching": True}
    with engine(checkpoint("q35_dense"), **flags) as serving:
        groups = serving.scheduler.kv_cache_config.kv_cache_groups
        assert {group.kv_cache_spec.block_size for group in groups} == {16}
        text = prompt(67)
        assert [serving.generate([text], greedy(2))[0].cached_tokens for _ in range(2)] == [0, 64]


def test_groups_of_different_block_sizes_are_refused(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if vLLM let ``--mamba-block-size`` through."""
    resolve = HpuPlatform.update_block_size_for_backend

    def lets_it_through(vllm_config: Any) -> None:
        resolve(vllm_config)
        vllm_config.cache_config.mamba_block_size = 32

    monkeypatch.setattr(HpuPlatform, "update_block_size_for_backend", staticmethod(lets_it_through))
    sentence = refusal(checkpoint("q35_dense"), block_size=16)
    assert "one block size for all" in sentence and "remove --mamba-block-size" in sentence


def test_the_cache_mode_all_becomes_align_before_it_reaches_us(
    checkpoint: Callable[..., Path], prompt: Callable[[int], list[int]]
) -> None:
    """vLLM's own doing for these models, with a line in its log; what is served is right."""
    with engine(checkpoint("q35_dense"), enable_prefix_caching=True, mamba_cache_mode="all") as serving:
        assert serving.vllm_engine.vllm_config.cache_config.mamba_cache_mode == "align"
        text = prompt(67)
        first, second = (serving.generate([text], greedy(4))[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 64)
        assert torch.equal(first.logits, second.logits)  # type: ignore[arg-type]
