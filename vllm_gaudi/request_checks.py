# SPDX-License-Identifier: Apache-2.0
"""What a request must be so that no step raises over it. Used by the front end, and by the scheduler behind it.

Owns: the rules that vLLM's own checks leave out.
Never: torch, the worker, or what the engine does with a request that is refused.

Ordering rule: types before values; a value is compared only once its type is right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from vllm.exceptions import VLLMValidationError

SMALLEST_SEED, LARGEST_SEED = -(2**63), 2**64 - 1
"""What ``torch.Generator.manual_seed`` takes."""


def check_sampling_params(params: Any) -> None:
    """Raises VLLMValidationError (400 over HTTP) where a ``SamplingParams`` would raise inside a step.

    Its fields are declared with types that nothing enforces. Here msgpack does, which carries them to the engine's
    process: a value that would not arrive there is refused, whether there is such a process or not.
    """
    _check_seed(params.seed, params.n)
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(params, enc_hook=_encode_other), type=type(params))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise VLLMValidationError(f"sampling parameters that no engine can read: {error}") from error
    for token_id, bias in (params.logit_bias or {}).items():
        if math.isnan(bias):
            raise VLLMValidationError(
                f"logit_bias must be a number, got {bias} for token id {token_id}", parameter="logit_bias", value=bias
            )


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises VLLMValidationError (400 over HTTP) on a token id that is no integer of 0..``vocab_size`` - 1.

    vLLM's own bound is the larger one of the model's vocabulary and the tokenizer's, off by one for the latter.
    """
    try:
        msgspec.convert(token_ids, _token_ids_below(vocab_size))
    except msgspec.ValidationError as error:
        wrong = [t for t in token_ids if type(t) is not int or not 0 <= t < vocab_size][0]
        raise VLLMValidationError(
            f"token id {wrong!r} is not one of the model's vocabulary: integers from 0 to {vocab_size - 1}",
            parameter="prompt_token_ids",
            value=wrong,
        ) from error


@functools.cache
def _token_ids_below(vocab_size: int) -> Any:
    """The type of a list of them: one pass of compiled code over what may be a hundred thousand."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def _check_seed(seed: Any, n: Any) -> None:
    """The i-th of ``n`` outputs is sampled with ``seed + i``."""
    if type(seed) is not int or type(n) is not int:
        return
    if not SMALLEST_SEED <= seed <= LARGEST_SEED - (n - 1):
        raise VLLMValidationError(
            f"seed must be from {SMALLEST_SEED} to {LARGEST_SEED - (n - 1)}, got {seed}", parameter="seed", value=seed
        )


def _encode_other(value: Any) -> None:
    """Called for what msgpack has no form for: in ``extra_args`` it is between the caller and a custom processor."""
    if isinstance(value, np.generic):
        raise TypeError(f"{value!r} is a number of numpy's; pass {value.item()!r}")
