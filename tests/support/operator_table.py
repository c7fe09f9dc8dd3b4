# SPDX-License-Identifier: Apache-2.0
"""The operators that a step may ask of the device, each with the reason why that is safe on a Gaudi.

Owns: the table (``OPERATORS``), the exceptions from the rules (``EXEMPTIONS``), and what ``docs/hpu-operators.md``
shows. Never: torch; the documentation is made without it. The rules are in ``operator_rules``.

Ordering rule: a new operator is recorded first (a test names it and its phases), then gets its row here.

Operators are torch's dispatched ones: what torch makes of several others (``torch.nn.functional.linear``,
``Tensor.reshape``) is listed as those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

VIEW = "a view: nothing moves, shape and strides follow from the bucket"
MOVE = "makes, copies or fills whole tensors whose shape follows from the bucket"
POINTWISE = "element by element in a floating dtype or int32; int64 only as listed below"
MASK = "makes or joins masks, which are never indices: they only select"
SELECT = "selects by a mask of the same shape, so that NaN on the other side is left behind; inside graphs floats only"
REDUCE = "reduces over a dimension of known size"
PRODUCT = "a matrix product of known shape"
INDEX = "rows by an index tensor; every index is a real row, padding included, which each recording checks"
ORDER = "the largest elements or their order; the indices it gives are int64 by definition"
RANDOM = "draws from the device's generator, outside graphs"
OURS = "moves int32 words by row, outside graphs, so that no bit is interpreted"
KERNEL = "a fused kernel of Gaudi's bridge; the name is that of the stub in the tests, except mixture_of_experts"


@dataclass(frozen=True)
class Operator:
    """``phases`` of a step that ask for it; ``path``: "host" or "gaudi" where only one of them does.

    ``made_of``: what it comes down to where the bridge registers no operator of this name.
    """

    why: str
    phases: str
    path: str = ""
    made_of: str = ""


@dataclass(frozen=True)
class Exceptions:
    """What the rules let pass.

    ``int64``: operator, without overload -> (phases in which it may take or give int64, why). ``int64_moves``: those
    that move or cast int64 and compute nothing. ``reads``: ``module:function`` that may read on the host -> why.
    """

    int64: dict[str, tuple[str, str]] = field(default_factory=dict)
    int64_moves: frozenset[str] = frozenset()
    reads: dict[str, str] = field(default_factory=dict)


_COUNTS = "vLLM counts tokens for penalties; the counts stay below 2^31"
EXEMPTIONS = Exceptions(
    int64={
        "argmax": ("sampler", "token ids, below 2^31; cast to int32 before the model sees them"),
        "topk": ("sampler prefill decode", "token ids, and expert ids, which are cast to int32 at once"),
        "sort": ("sampler", "the order that top-p puts back with scatter_"),
        "where": ("sampler", "greedy or sampled token id, outside graphs"),
        "rsub": ("sampler", "vocabulary size less k"),
        "sum": ("sampler", "the rank of a token: how many logprobs are larger"),
        "gt": ("sampler", _COUNTS),
        "mul": ("sampler", _COUNTS),
        "scatter_add_": ("sampler", _COUNTS),
        "mixture_of_experts": (
            "prefill decode",
            "expert ids, in the dtype of the bridge's documentation",
        ),
    },
    int64_moves=frozenset(
        (
            "_to_copy",
            "cat",
            "lift_fresh",
            "ones_like",
            "slice",
            "unsqueeze",
            "view",
            "zeros",
        )
    ),
    reads={
        "vllm_gaudi.v1.worker.sampling:tokens": "the one copy of a step's sampled tokens",
        "vllm.v1.outputs:tolists": "logprobs that were asked for, which travel with the tokens",
        "vllm.utils.torch_utils:make_tensor_with_pad": "a tensor made on the host, on its way to the device",
    },
)

OPERATORS: dict[str, Operator] = {
    "aten._log_softmax.default": Operator(REDUCE, "sampler"),
    "aten._softmax.default": Operator(REDUCE, "sampler"),
    "aten._to_copy.default": Operator(MOVE, "prefill decode sampler", made_of="empty and copy_"),
    "aten._unsafe_view.default": Operator(VIEW, "prefill decode"),
    "aten.abs.default": Operator(POINTWISE, "prefill decode"),
    "aten.add.Tensor": Operator(POINTWISE, "prefill decode"),
    "aten.add_.Tensor": Operator(POINTWISE, "prefill decode sampler"),
    "aten.addcmul_.default": Operator(POINTWISE, "prefill decode", path="host"),
    "aten.alias.default": Operator(VIEW, "prefill decode logits"),
    "aten.amax.default": Operator(REDUCE, "prefill decode sampler"),
    "aten.any.dim": Operator(MASK, "prefill decode"),
    "aten.arange.default": Operator(MOVE, "prefill decode"),
    "aten.arange.start": Operator(MOVE, "inputs prefill"),
    "aten.arange.start_step": Operator(MOVE, "prefill"),
    "aten.argmax.default": Operator(ORDER, "sampler"),
    "aten.baddbmm_.default": Operator(PRODUCT, "prefill decode", path="host"),
    "aten.bitwise_and.Tensor": Operator(MASK, "prefill decode"),
    "aten.bitwise_not.default": Operator(MASK, "prefill decode"),
    "aten.bitwise_or.Tensor": Operator(MASK, "decode sampler"),
    "aten.bmm.default": Operator(PRODUCT, "prefill decode"),
    "aten.bmm.out": Operator(PRODUCT, "prefill", path="host"),
    "aten.cat.default": Operator(MOVE, "prefill decode logits sampler"),
    "aten.clamp.default": Operator(POINTWISE, "prefill decode"),
    "aten.clone.default": Operator(MOVE, "prefill decode"),
    "aten.constant_pad_nd.default": Operator(MOVE, "prefill decode logits"),
    "aten.copy_.default": Operator(MOVE, "prefill decode rows"),
    "aten.cumsum.default": Operator(REDUCE, "prefill"),
    "aten.cumsum.out": Operator(REDUCE, "sampler"),
    "aten.detach.default": Operator(VIEW, "prefill decode", path="host", made_of="a view"),
    "aten.detach_.default": Operator(VIEW, "rows", made_of="a view"),
    "aten.diagonal.default": Operator(VIEW, "prefill", path="host", made_of="a view"),
    "aten.div.Tensor": Operator(POINTWISE, "prefill decode"),
    "aten.div_.Tensor": Operator(POINTWISE, "sampler"),
    "aten.embedding.default": Operator(INDEX, "prefill decode"),
    "aten.empty.memory_format": Operator(MOVE, "prefill sampler"),
    "aten.empty_like.default": Operator(MOVE, "prefill decode", made_of="empty"),
    "aten.eq.Scalar": Operator(MASK, "prefill decode", path="host"),
    "aten.eq.Tensor": Operator(MASK, "prefill decode"),
    "aten.exp.default": Operator(POINTWISE, "prefill decode"),
    "aten.exp_.default": Operator(POINTWISE, "prefill decode"),
    "aten.expand.default": Operator(VIEW, "prefill decode"),
    "aten.exponential_.default": Operator(RANDOM, "sampler"),
    "aten.eye.default": Operator(MOVE, "prefill", path="host", made_of="empty, zero_ and fill_"),
    "aten.fill_.Scalar": Operator(MOVE, "rows"),
    "aten.fill_.Tensor": Operator(MOVE, "rows sampler"),
    "aten.floor_divide.default": Operator(POINTWISE, "prefill"),
    "aten.gather.default": Operator(INDEX, "sampler"),
    "aten.ge.Scalar": Operator(MASK, "prefill", path="host"),
    "aten.ge.Tensor": Operator(MASK, "prefill decode sampler"),
    "aten.gt.Scalar": Operator(MASK, "decode sampler"),
    "aten.gt.Tensor": Operator(MASK, "prefill"),
    "aten.index.Tensor": Operator(INDEX, "sampler"),
    "aten.index_copy_.default": Operator(INDEX, "inputs prefill decode logits"),
    "aten.index_put_.default": Operator(INDEX, "rows sampler", made_of="_index_put_impl_"),
    "aten.index_select.default": Operator(INDEX, "inputs prefill decode logits sampler"),
    "aten.index_select.out": Operator(INDEX, "prefill", path="host"),
    "aten.le.Scalar": Operator(MASK, "prefill", path="host"),
    "aten.le.Tensor": Operator(MASK, "prefill sampler"),
    "aten.lift_fresh.default": Operator(VIEW, "inputs store logits rows sampler", made_of="the tensor itself"),
    "aten.log1p.default": Operator(POINTWISE, "prefill decode"),
    "aten.lt.Scalar": Operator(MASK, "decode sampler"),
    "aten.lt.Tensor": Operator(MASK, "prefill sampler"),
    "aten.masked_fill.Scalar": Operator(SELECT, "prefill decode", path="gaudi"),
    "aten.masked_fill_.Scalar": Operator(SELECT, "prefill decode sampler"),
    "aten.maximum.default": Operator(POINTWISE, "prefill decode", path="host"),
    "aten.mean.dim": Operator(REDUCE, "prefill decode"),
    "aten.minimum.default": Operator(POINTWISE, "prefill"),
    "aten.mm.default": Operator(PRODUCT, "prefill decode logits"),
    "aten.mul.Tensor": Operator(POINTWISE, "prefill decode sampler"),
    "aten.mul.out": Operator(POINTWISE, "prefill", path="host"),
    "aten.mul_.Tensor": Operator(POINTWISE, "prefill decode sampler"),
    "aten.neg.default": Operator(POINTWISE, "prefill decode"),
    "aten.neg_.default": Operator(POINTWISE, "prefill", path="host"),
    "aten.new_empty.default": Operator(MOVE, "prefill", path="host", made_of="empty"),
    "aten.new_zeros.default": Operator(MOVE, "prefill", path="host"),
    "aten.ones.default": Operator(MOVE, "prefill", path="host", made_of="empty and fill_"),
    "aten.ones_like.default": Operator(MOVE, "sampler", made_of="empty and fill_"),
    "aten.permute.default": Operator(VIEW, "prefill"),
    "aten.pow.Tensor_Scalar": Operator(POINTWISE, "prefill decode"),
    "aten.reciprocal.default": Operator(POINTWISE, "sampler"),
    "aten.reciprocal_.default": Operator(POINTWISE, "prefill decode"),
    "aten.remainder.Scalar": Operator(POINTWISE, "prefill", path="host"),
    "aten.repeat.default": Operator(MOVE, "prefill sampler"),
    "aten.roll.default": Operator(MOVE, "decode", path="host"),
    "aten.rsqrt.default": Operator(POINTWISE, "prefill decode"),
    "aten.rsub.Scalar": Operator(POINTWISE, "sampler"),
    "aten.scalar_tensor.default": Operator(MOVE, "prefill decode sampler"),
    "aten.scatter_.src": Operator(INDEX, "sampler"),
    "aten.scatter_add_.default": Operator(INDEX, "sampler"),
    "aten.select.int": Operator(VIEW, "prefill decode rows sampler"),
    "aten.sigmoid.default": Operator(POINTWISE, "prefill decode"),
    "aten.silu.default": Operator(POINTWISE, "prefill decode"),
    "aten.slice.Tensor": Operator(VIEW, "prefill decode logits rows sampler output"),
    "aten.sort.default": Operator(ORDER, "sampler"),
    "aten.split.Tensor": Operator(VIEW, "prefill decode"),
    "aten.split_with_sizes.default": Operator(VIEW, "prefill decode"),
    "aten.stack.default": Operator(MOVE, "prefill decode", made_of="cat"),
    "aten.sub.Tensor": Operator(POINTWISE, "prefill decode"),
    "aten.sub_.Tensor": Operator(POINTWISE, "prefill decode sampler"),
    "aten.sum.dim_IntList": Operator(REDUCE, "prefill decode sampler"),
    "aten.t.default": Operator(VIEW, "prefill decode logits"),
    "aten.topk.default": Operator(ORDER, "prefill decode sampler"),
    "aten.transpose.int": Operator(VIEW, "prefill decode"),
    "aten.tril_.default": Operator(SELECT, "prefill", path="host"),
    "aten.triu_.default": Operator(SELECT, "prefill", path="host"),
    "aten.unbind.int": Operator(VIEW, "prefill decode logits sampler"),
    "aten.unsqueeze.default": Operator(VIEW, "prefill decode sampler"),
    "aten.unsqueeze_.default": Operator(VIEW, "rows"),
    "aten.view.default": Operator(VIEW, "prefill decode logits sampler"),
    "aten.where.self": Operator(SELECT, "prefill decode sampler"),
    "aten.where.self_out": Operator(SELECT, "prefill sampler"),
    "aten.zero_.default": Operator(MOVE, "decode"),
    "aten.zeros.default": Operator(MOVE, "prefill decode rows sampler", made_of="empty and zero_"),
    "habana_stub.fused_sdpa.default": Operator(KERNEL, "prefill", path="gaudi"),
    "habana_stub.rms_norm.default": Operator(KERNEL, "prefill decode", path="gaudi"),
    "habana_stub.rotary.default": Operator(KERNEL, "prefill decode", path="gaudi"),
    "hpu.mixture_of_experts.fused_weights": Operator(KERNEL, "prefill decode", path="gaudi"),
    "vllm_gaudi.copy_rows_.default": Operator(OURS, "store"),
    "vllm_gaudi.zero_rows_.default": Operator(OURS, "store"),
}


def documentation() -> str:
    """The tables of docs/hpu-operators.md."""
    paths = {"": "both", "host": "host only", "gaudi": "Gaudi only"}
    lines = ["| operator | asked for in | path | why it is safe |", "| --- | --- | --- | --- |"]
    for name, row in OPERATORS.items():
        made_of = f"; not registered by itself: {row.made_of}" if row.made_of else ""
        phases = ", ".join(row.phases.split())
        lines.append(f"| `{name}` | {phases} | {paths[row.path]} | {row.why}{made_of} |")
    lines += ["", "Arithmetic on int64 that is let pass:", "", "| operator | in | why |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {', '.join(in_.split())} | {why} |" for name, (in_, why) in EXEMPTIONS.int64.items()]
    lines += ["", "Reads by the host that are let pass:", "", "| place | why |", "| --- | --- |"]
    lines += [f"| `{place}` | {why} |" for place, why in EXEMPTIONS.reads.items()]
    return "\n".join(lines)
