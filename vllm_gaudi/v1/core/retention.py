# SPDX-License-Identifier: Apache-2.0
"""Which boundaries are kept until they are evicted: the rule behind vLLM's --prefix-cache-retention-interval.

Owns: the rule, as numbers. Standard library only; never blocks, never requests.

Ordering rule: none.
"""

from __future__ import annotations


def prompt_ends(num_prompt: int, block_size: int) -> tuple[int, int]:
    """The prompt's last boundaries, in blocks: the one that a repeat can resume from, and the one it may end on.

    They differ where the prompt ends on a boundary, since a repeat must compute its last token.
    """
    return (num_prompt - 1) // block_size, num_prompt // block_size


def is_kept(boundary: int, block_size: int, retention: int | None, num_prompt: int, shared: int) -> bool:
    """Whether ``boundary`` (in blocks) of a prompt of ``num_prompt`` tokens is kept once it is passed.

    ``retention`` tokens: None keeps every boundary, N > 0 every N-th token's, 0 none but the prompt's ends and
    ``shared``, how far (in tokens) another request's blocks reach into the prompt, 0 where none does.
    """
    if retention is None:
        return True
    if retention and boundary * block_size % retention == 0:
        return True
    return boundary in prompt_ends(num_prompt, block_size) or boundary == shared // block_size
