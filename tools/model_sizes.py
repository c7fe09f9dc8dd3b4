# SPDX-License-Identifier: Apache-2.0
"""What a published model needs, from its dimensions alone: block size, pages, state rows, what is left for tokens.

Owns: ``Model``, ``Serving`` and ``Geometry``, with the formulas that the documentation's tables are made from.
Never: a config file, a tensor, vLLM. A started engine's own numbers are ``vllm-gaudi plan``'s.

Ordering rule: B first; pages, rows and tokens follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_gaudi.bucketing.grid import PREFILL_ROW_TILE, BucketGrid
from vllm_gaudi.v1.core.sched.block_size import MAX_KERNEL_BLOCK
from vllm_gaudi.v1.worker.gdn_checkpoint.layout import WORD_BYTES, StateShape, pack
from vllm_gaudi.v1.worker.memory import per_block_layout_factor
from vllm_gaudi.v1.worker.state_slots import NUM_RESERVED_ROWS

GB = 10**9


@dataclass(frozen=True)
class Model:
    """One model's dimensions as its published config gives them; bf16 keys, values and conv tail."""

    name: str
    path: str  # what `vllm serve` is given
    billions: int  # parameters, nominal: the number in the name
    gdn_layers: int
    attention_layers: int
    kv_heads: int
    k_heads: int
    v_heads: int
    ssm_bytes: int  # per element of the SSM state
    head: int = 256
    gdn_head: int = 128
    conv_kernel: int = 4
    is_multimodal: bool = True
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Serving:
    """The flags that memory depends on."""

    max_model_len: int = 32768
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 8192
    share: float = 0.92  # vLLM's default of --gpu-memory-utilization


DEFAULT_SERVING = Serving()


@dataclass(frozen=True)
class Geometry:
    """One model on ``ranks`` ranks; all bytes are of one rank."""

    model: Model
    ranks: int

    @property
    def state(self) -> StateShape:
        model = self.model
        conv_dim = (2 * model.k_heads + model.v_heads) * model.gdn_head // self.ranks
        heads = model.v_heads // self.ranks
        return StateShape(
            (model.conv_kernel - 1, conv_dim), 2, (heads, model.gdn_head, model.gdn_head), model.ssm_bytes
        )

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one attention layer; a KV head is never cut, so ranks beyond their number copy it."""
        return 2 * max(1, self.model.kv_heads // self.ranks) * self.model.head * 2

    @property
    def block(self) -> int:
        """B: the fewest tokens, in whole kernel blocks, whose K and V hold one layer's state."""
        return MAX_KERNEL_BLOCK * -(-self.state.num_bytes // (MAX_KERNEL_BLOCK * self.token_bytes))

    @property
    def page_bytes(self) -> int:
        return self.block * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """What one block of the pool takes over all attention layers."""
        return self.page_bytes * self.model.attention_layers

    @property
    def row_bytes(self) -> int:
        """One state row (a slot, a reserved or a staging row) over all GDN layers; also one checkpoint."""
        return self.state.num_bytes * self.model.gdn_layers

    @property
    def fill(self) -> float:
        return self.state.num_bytes / self.page_bytes

    @property
    def has_whole_heads(self) -> bool:
        return pack(self.state, self.page_bytes // 2 // WORD_BYTES)[1]

    @property
    def factor(self) -> float:
        return per_block_layout_factor(self.page_bytes, self.state.num_bytes)

    @property
    def weight_bytes(self) -> int:
        """Nominal: every parameter in two bytes and cut evenly."""
        return 2 * self.model.billions * GB // self.ranks

    def staging_rows(self, serving: Serving = DEFAULT_SERVING) -> int:
        return grid(self.block, serving).num_staging

    def state_bytes(self, serving: Serving = DEFAULT_SERVING) -> int:
        return self.row_bytes * (serving.max_num_seqs + NUM_RESERVED_ROWS + self.staging_rows(serving))

    def tokens_left(self, card_bytes: int, serving: Serving = DEFAULT_SERVING) -> int:
        """Tokens of attention that the pool holds at most: the profile run's peak comes off too and is not known."""
        left = int(serving.share * card_bytes) - self.weight_bytes - self.state_bytes(serving)
        return max(0, left // self.block_bytes - 1) * self.block


def grid(block: int, serving: Serving = DEFAULT_SERVING) -> BucketGrid:
    """The buckets that an engine with these flags has, on a pool that never limits them."""
    return BucketGrid(
        query_multiple=PREFILL_ROW_TILE,
        max_query=serving.max_num_batched_tokens,
        max_batch=serving.max_num_seqs,
        max_context=serving.max_model_len,
        kernel_block=MAX_KERNEL_BLOCK,
        max_blocks=1 << 30,
        block_size=block,
    )
