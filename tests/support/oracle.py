# SPDX-License-Identifier: Apache-2.0
"""The independent oracle: transformers' own forward of a checkpoint, in fp32 with eager attention.

Owns how a checkpoint is loaded for that and a small cache of loaded models. Never uses a line of the plugin's
arithmetic, a KV cache or a kernel package: each call is one full forward over all tokens, so a fault in caching
cannot hide on both sides. A bf16 checkpoint is computed in fp32 from its rounded weights.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_gaudi.compat import define_torchvision_schemas

define_torchvision_schemas()

import torch  # noqa: E402
import transformers  # noqa: E402

# Each of these, when installed, silently replaces transformers' torch code of a Gated-DeltaNet layer.
KERNEL_PACKAGES = ("fla", "causal_conv1d")
CACHED_MODELS = 4


def logits(checkpoint_dir: str | Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits after each token: float32 [T, V]. Row t predicts token t + 1.

    The cheapest way to check a greedy answer is one call over prompt and answer together: rows P-1 .. P+N-2 must have
    their largest entry at the answer's tokens.
    """
    with torch.inference_mode():
        return load(checkpoint_dir)(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].clone()


def greedy(checkpoint_dir: str | Path, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The next ``num_tokens`` tokens and the logits each was chosen from, float32 [num_tokens, V]. Goes past end
    tokens."""
    token_ids = list(prompt_ids)
    chosen_from = []
    for _ in range(num_tokens):
        last = logits(checkpoint_dir, token_ids)[-1]
        chosen_from.append(last)
        token_ids.append(int(last.argmax()))
    return token_ids[len(prompt_ids) :], torch.stack(chosen_from)


def load(checkpoint_dir: str | Path) -> Any:
    """The model, from the cache if it was used lately. Raises RuntimeError where a kernel package would take over."""
    for package in KERNEL_PACKAGES:
        if importlib.util.find_spec(package) is not None:
            raise RuntimeError(
                f"the oracle needs transformers' own torch code of Gated-DeltaNet layers, but {package!r} is installed "
                "and would replace it; uninstall it from the test environment"
            )
    return _load(Path(checkpoint_dir).resolve())


@functools.lru_cache(maxsize=CACHED_MODELS)
def _load(checkpoint_dir: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(checkpoint_dir)
    (architecture,) = config.architectures
    model_class = getattr(transformers, architecture)
    return model_class.from_pretrained(checkpoint_dir, dtype=torch.float32, attn_implementation="eager").eval()
