# SPDX-License-Identifier: Apache-2.0
"""Token ids of a prompt as the server would make them: vLLM's renderer, with the tokenizer of a directory.

Owns: the calls of vLLM's renderer that `vllm serve` makes for a text and for a chat.
Never: a template or a tokenizer of its own.

Ordering rule: the renderer needs a configuration; what that one is refused for does not change a token.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm.inputs import PromptType
from vllm.renderers import ChatParams
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.renderers.params import merge_kwargs
from vllm.renderers.registry import renderer_from_config

from vllm_gaudi.cli import UsageError, dry_run
from vllm_gaudi.v1.worker.memory import CARD_BYTES

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class Renderer(contextlib.ExitStack):
    """``given``: a directory with config.json and, unless ``ids_only``, a tokenizer; ``ranks``: for B."""

    def __init__(self, given: str, ranks: int, ids_only: bool):
        super().__init__()
        self._given = given
        self._directory = self.enter_context(dry_run.model_directory(given))
        # Without a file transformers would make up a tokenizer that knows no word.
        has_tokenizer = any((self._directory / name).is_file() for name in TOKENIZER_FILES)
        if not has_tokenizer and not ids_only:
            raise UsageError(f"{given} holds no tokenizer ({', '.join(TOKENIZER_FILES)})")
        args = dry_run.engine_args(self._directory, ["--tensor-parallel-size", str(ranks)])
        # Texts only: what a vision tower would add to a prompt cannot be given here.
        self._args = dataclasses.replace(args, language_model_only=True)
        self._renderer: Any = None
        if not has_tokenizer:
            return
        try:
            self._config = dry_run.configuration(dataclasses.replace(self._args, skip_tokenizer_init=False))
            self._renderer = renderer_from_config(self._config)
            self._renderer.get_tokenizer()
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            sentence = dry_run.message_of(error, self._directory, given)
            raise UsageError(f"{given} gives no tokenizer for a model that can be served: {sentence}") from error

    def ids(self, prompt: Any) -> list[int]:
        """Tokens of a ``why.Prompt``."""
        if prompt.kind == "ids":
            return prompt.content
        try:
            if prompt.kind == "text":
                rendered = self._text(prompt.content, prompt.request)
            else:
                rendered = self._chat(prompt.content, prompt.request)
        except Exception as error:  # a chat template raises what it likes
            sentence = dry_run.message_of(error, self._directory, self._given)
            raise UsageError(f"the {prompt.kind} cannot be turned into tokens: {sentence}") from error
        return list(rendered["prompt_token_ids"])

    def text(self, ids: Sequence[int]) -> str:
        """What is shown of some tokens."""
        if self._renderer is None:
            return " ".join(map(str, ids))
        return self._renderer.get_tokenizer().decode(list(ids)) if ids else ""

    def block_size(self) -> int:
        """B of an engine with this model."""
        try:
            engine = dry_run.DryRun(dry_run.configuration(self._args), CARD_BYTES, peak=0)
        except (RuntimeError, ValueError) as error:
            sentence = dry_run.message_of(error, self._directory, self._given)
            raise UsageError(
                f"the block size does not follow from {self._given}; pass --block-size: {sentence}"
            ) from error
        return engine.runner.step.caches.geometry.block_size

    def _text(self, content: str, request: dict[str, Any]) -> Any:
        prompt: PromptType = content
        kwargs = {key: request[key] for key in ("add_special_tokens",) if key in request}
        params = self._renderer.default_cmpl_tok_params.with_kwargs(**kwargs)
        (rendered,) = self._renderer.render_cmpl([parse_model_prompt(self._config.model_config, prompt)], params)
        return rendered

    def _chat(self, messages: list[Any], request: dict[str, Any]) -> Any:
        chat = ChatParams(
            chat_template=request.get("chat_template"),
            chat_template_kwargs=merge_kwargs(
                request.get("chat_template_kwargs"),
                {
                    "add_generation_prompt": request.get("add_generation_prompt", True),
                    "continue_final_message": request.get("continue_final_message", False),
                    "tools": request.get("tools"),
                    "tokenize": False,
                },
            ),
        )
        params = self._renderer.default_chat_tok_params.with_kwargs(
            add_special_tokens=request.get("add_special_tokens", False)
        )
        _, (rendered,) = self._renderer.render_chat([messages], chat, params)
        return rendered
