# SPDX-License-Identifier: Apache-2.0
"""What the target models need, as tables: block sizes, state rows, memory, buckets, and the commands that serve them.

Owns: the dimensions of the target models. Never: their arithmetic, which is ``tools/model_sizes.py``'s.

Ordering rule: none; every function is pure.
"""

from __future__ import annotations

from dataclasses import replace

from tools.docs.markdown import code, table
from tools.model_sizes import DEFAULT_SERVING, GB, Geometry, Model, Serving, grid
from vllm_gaudi.bucketing.grid import CONFIG_KEYS

MIB = 2**20
_NEXT = "Qwen/Qwen3-Next-80B-A3B-Instruct"

# Billions of parameters, GDN and attention layers, KV heads, GDN k and v heads, bytes per element of the SSM state.
QWEN35_27B = Model("Qwen3.5-27B, Qwen3.6-27B (dense)", "Qwen/Qwen3.6-27B", 27, 48, 16, 4, 16, 48, 4)
QWEN35_35B = Model("Qwen3.5-35B-A3B, Qwen3.6-35B-A3B", "Qwen/Qwen3.5-35B-A3B", 35, 30, 10, 2, 16, 32, 4)
QWEN3_NEXT_BF16 = Model("Qwen3-Next-80B-A3B, bf16 state", _NEXT, 80, 36, 12, 2, 16, 32, 2, is_multimodal=False)
QWEN3_NEXT = replace(
    QWEN3_NEXT_BF16, name="Qwen3-Next-80B-A3B", ssm_bytes=4, flags=("--mamba-ssm-cache-dtype float32",)
)
QWEN35_122B = Model("Qwen3.5-122B-A10B", "Qwen/Qwen3.5-122B-A10B", 122, 36, 12, 2, 16, 64, 4)
QWEN35_397B = Model("Qwen3.5-397B-A17B", "Qwen/Qwen3.5-397B-A17B", 397, 45, 15, 2, 16, 64, 4)
MODELS = (QWEN3_NEXT, QWEN3_NEXT_BF16, QWEN35_35B, QWEN35_27B, QWEN35_122B, QWEN35_397B)
RANKS = (1, 2, 4, 8)
CARDS = (96 * GB, 128 * GB)

KNOWN_BLOCKS = ((QWEN35_27B, 1, 896), (QWEN35_35B, 1, 1152), (QWEN35_397B, 8, 640))
"""Published block sizes that the formula must reproduce."""


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.1f}"


def recipes() -> str:
    """One command whole, and the first line of the others'."""
    serving, first, rows = DEFAULT_SERVING, {}, []
    for model in MODELS:
        if model is not QWEN3_NEXT_BF16:
            ranks = _fewest_ranks(model, CARDS[-1])
            flags = [*(["--language-model-only"] if model.is_multimodal else []), *model.flags]
            flags += [f"--tensor-parallel-size {ranks}"] if ranks > 1 else []
            first[model] = " ".join((f"vllm serve {model.path}", *flags))
            rows.append((model.name, code(first[model]), f"{Geometry(model, ranks).block:,}"))
    return (
        f"```bash\n{first[QWEN3_NEXT]} \\\n    --dtype bfloat16 --max-model-len {serving.max_model_len} "
        f"--max-num-seqs {serving.max_num_seqs} --max-num-batched-tokens {serving.max_num_batched_tokens} "
        f"\\\n    --enable-prompt-tokens-details --shutdown-timeout 30\n```\n\n"
        "The other models differ in the first line:\n\n" + table(("model", "first line", "B"), rows, (2,))
    )


def _fewest_ranks(model: Model, card_bytes: int) -> int:
    """Ranks whose pool holds ten conversations of full length, before the profile run's peak comes off."""
    enough = 10 * DEFAULT_SERVING.max_model_len
    return next(r for r in RANKS if Geometry(model, r).tokens_left(card_bytes) >= enough)


def dimensions() -> str:
    """What differs between the models, and the B that follows."""
    rows = []
    for m in MODELS:
        blocks = (f"{Geometry(m, ranks).block:,}" for ranks in RANKS)
        ssm = {4: "fp32", 2: "bf16"}[m.ssm_bytes]
        rows.append((m.name, m.gdn_layers, m.attention_layers, m.kv_heads, m.v_heads, ssm, *blocks))
    head = ("model", "GDN layers", "attention layers", "KV heads", "v heads", "SSM state")
    ((k_heads, size, gdn_size, kernel),) = {(m.k_heads, m.head, m.gdn_head, m.conv_kernel) for m in MODELS}
    same = (
        f"All of them have {k_heads} k heads, a head of {size}, a GDN head of {gdn_size} and a conv kernel of {kernel}."
    )
    text = table((*head, *(f"B, TP {ranks}" for ranks in RANKS)), rows, (1, 2, 3, 4, *range(6, 10)))
    return f"{text}\n{same}\n"


def staging() -> str:
    budgets = (1024, 2048, 4096, 8192, 16384, 32768)
    rows = []
    for model, ranks in ((QWEN3_NEXT, 4), (QWEN35_35B, 1), (QWEN35_27B, 1), (QWEN35_397B, 8)):
        g = Geometry(model, ranks)
        counts = [g.staging_rows(Serving(max_num_batched_tokens=budget)) for budget in budgets]
        cells = [f"{count} ({_mib(count * g.row_bytes)} MiB)" for count in counts]
        rows.append((model.name, ranks, f"{g.block:,}", *cells))
    return table(("model", "TP", "B", *(f"{budget:,}" for budget in budgets)), rows, range(1, 9))


def memory() -> str:
    """Where at least one of the cards has something left for the pool."""
    rows = []
    for model in MODELS:
        for g in (Geometry(model, ranks) for ranks in RANKS):
            left = [g.tokens_left(card) for card in CARDS]
            cells = (_mib(g.block_bytes), _mib(g.row_bytes), g.staging_rows(), _mib(g.state_bytes()))
            if any(left):
                pools = (f"{tokens:,}" if tokens else "does not fit" for tokens in left)
                rows.append((model.name, g.ranks, f"{g.weight_bytes / GB:.1f}", *cells, *pools))
    head = ("model", "TP", "weights, GB", "one block, MiB", "one state row, MiB", "staging rows", "all state rows, MiB")
    return table((*head, *(f"pool on {card // GB} GB, tokens" for card in CARDS)), rows, range(1, 9))


USER_BUCKETS = {
    "prefill_batch_buckets": ("sequences in a prefill forward", "prefill_batches"),
    "prefill_query_buckets": ("tokens per sequence in a prefill forward, padding included", "prefill_queries"),
    "prefill_block_buckets": ("kernel blocks of context per sequence in a prefill forward", "prefill_blocks"),
    "decode_batch_buckets": ("sequences in the decode batch", "decode_batches"),
    "decode_block_buckets": ("kernel blocks that the decode batch reads", "decode_blocks"),
}


def additional_config() -> str:
    buckets = grid(Geometry(QWEN35_27B, 1).block)
    rows = []
    for key in CONFIG_KEYS:
        meaning, attribute = USER_BUCKETS[key]
        rows.append((code(key), meaning, ", ".join(str(step) for step in getattr(buckets, attribute))))
    shapes = len(buckets.all_prefill()), len(buckets.all_decode())
    return (
        table(("key", "sizes of", "default"), rows)
        + f"\nThe buckets are those of {QWEN35_27B.name} with `--max-model-len {DEFAULT_SERVING.max_model_len}`, "
        f"`--max-num-seqs {DEFAULT_SERVING.max_num_seqs}` and `--max-num-batched-tokens "
        f"{DEFAULT_SERVING.max_num_batched_tokens}`, in a pool large enough for all of them; they give {shapes[0]} "
        f"prefill and {shapes[1]} decode shapes.\n"
    )


def hits() -> str:
    """What a repeat of a prompt reuses: whole blocks below its last token."""
    lengths = (500, 897, 1153, 4000, 20000, 32000)
    blocks = sorted({block for _, _, block in KNOWN_BLOCKS})
    rows = [(f"{n:,}", *(f"{(n - 1) // block * block:,}" for block in blocks)) for n in lengths]
    return table(("prompt, tokens", *(f"reused, B = {block:,}" for block in blocks)), rows, range(len(blocks) + 1))


def boundary_cost() -> str:
    """What one kept boundary takes of the pool."""
    groups = 3
    rows = []
    for model, ranks, _ in KNOWN_BLOCKS:
        g = Geometry(model, ranks)
        rows.append(
            (
                model.name,
                ranks,
                f"{g.block:,}",
                _mib(g.block_bytes),
                _mib(groups * g.block_bytes),
                _mib(g.row_bytes),
                f"{100 * g.row_bytes / (groups * g.block_bytes):.0f} %",
            )
        )
    head = ("model", "TP", "B", "attention block, MiB", "three GDN blocks, MiB", "bytes moved per save, MiB", "used")
    return table(head, rows, range(1, 7))
