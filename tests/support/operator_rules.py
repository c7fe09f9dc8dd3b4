# SPDX-License-Identifier: Apache-2.0
"""The rules that a Gaudi holds the operators of a step to, one function each.

Owns: ``BEFORE`` and ``AFTER``, the rules by name, and ``may_read``, the rule for reads by the host.
Never: what let a call pass (``operator_table.EXEMPTIONS`` says so), or how a call was seen (``operator_recorder``).

Ordering rule: indices are looked at before the call is made: on a CPU one that is out of range ends it.

A rule takes a ``Call`` and yields one text for each violation, empty where the rule's name says it all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.support.operator_table import Exceptions

SHAPE_DEPENDS_ON_DATA = (
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "unique",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave.Tensor",
)
# These take (tensor, dim, indices, ...).
INDEXED = (
    "aten::index_select",
    "aten::index_copy_",
    "aten::index_copy",
    "aten::index_add_",
    "aten::index_fill_",
    "aten::gather",
    "aten::scatter",
    "aten::scatter_",
    "aten::scatter_add_",
)
MASKED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
SELECTIONS = ("aten::where", "aten::masked_fill", "aten::masked_fill_")
INT64 = (torch.int64, torch.uint64)
FLOAT64 = (torch.float64, torch.complex64, torch.complex128)
BOOLEAN = (torch.bool, torch.uint8)

WAIT = "the host waits for the device"


@dataclass(frozen=True)
class Call:
    """One call of an operator in ``phase`` of a step; ``out`` is None before it is made.

    ``owners``: data pointer of a storage -> the tensor over all of it, for tensors that exist before the graph runs.
    """

    func: Any
    args: Any
    kwargs: Mapping[str, Any]
    out: Any
    phase: str
    is_in_graph: bool
    owners: Mapping[int, torch.Tensor]
    allowed: Exceptions

    @property
    def schema(self) -> Any:
        return self.func._schema

    @functools.cached_property
    def given(self) -> list[torch.Tensor]:
        return _tensors([self.args, self.kwargs])

    @functools.cached_property
    def made(self) -> list[torch.Tensor]:
        return _tensors(self.out)

    @property
    def base(self) -> str:
        """``index_select`` of ``aten::index_select``."""
        return self.schema.name.split("::")[1]

    @property
    def short(self) -> str:
        """``base`` with its overload, where it has one."""
        return f"{self.base}.{self.schema.overload_name}" if self.schema.overload_name else self.base


def may_read(site: str, phase: str, allowed: Exceptions) -> bool:
    """Whether the host may ask for a tensor's values at ``module:function``; input batch rows are host tensors."""
    return phase == "rows" or site in allowed.reads


def _index_out_of_range(call: Call) -> Iterator[str]:
    for index, size in _indices(call.schema.name, call.args):
        if index.numel():
            low, high = int(index.min()), int(index.max())
            if low < 0 or high >= size:
                yield f"{low}..{high} into {size}"


def _shape_of_data(call: Call) -> Iterator[str]:
    if call.short in SHAPE_DEPENDS_ON_DATA or call.base in SHAPE_DEPENDS_ON_DATA:
        yield ""
    if call.schema.name in MASKED:
        yield from ("boolean index" for index in call.args[1] if index is not None and index.dtype in BOOLEAN)


def _wait(call: Call) -> Iterator[str]:
    if call.short == "_local_scalar_dense" and call.phase != "output":
        yield ""


def _float64(call: Call) -> Iterator[str]:
    if any(tensor.dtype in FLOAT64 for tensor in (*call.given, *call.made)):
        yield ""


def _int64(call: Call) -> Iterator[str]:
    if call.phase == "rows" or call.base in call.allowed.int64_moves:
        return
    if not any(tensor.dtype in INT64 for tensor in (*call.given, *call.made)):
        return
    takes_indices = call.schema.name in INDEXED or call.base in ("embedding", "index")
    if takes_indices and not any(tensor.dtype in INT64 for tensor in (*call.given[:1], *call.made)):
        return  # int64 as an index alone
    phases, _ = call.allowed.int64.get(call.base, ("", ""))
    if call.phase not in phases.split():
        yield f"{[dtype_of(tensor) for tensor in call.given]} -> {[dtype_of(tensor) for tensor in call.made]}"


def _dtype_view_in_graph(call: Call) -> Iterator[str]:
    if call.is_in_graph and call.short == "view.dtype":
        yield ""


def _integer_selection_in_graph(call: Call) -> Iterator[str]:
    is_selection = call.is_in_graph and call.schema.name in SELECTIONS
    if is_selection and any(not tensor.is_floating_point() for tensor in call.made):
        yield ""


def _view_written_in_graph(call: Call) -> Iterator[str]:
    if not call.is_in_graph:
        return
    for i, argument in enumerate(call.schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for tensor in _tensors(call.args[i] if i < len(call.args) else call.kwargs.get(argument.name)):
            owner = call.owners.get(tensor.untyped_storage().data_ptr())
            if owner is not None and _extent(tensor) != _extent(owner):
                yield f"{_extent(tensor)} of {_extent(owner)}"


Rule = Callable[[Call], Iterator[str]]
BEFORE: dict[str, Rule] = {"an index is negative or too large": _index_out_of_range}
AFTER: dict[str, Rule] = {
    "the shape depends on data": _shape_of_data,
    WAIT: _wait,
    "float64 or complex numbers": _float64,
    "int64 arithmetic": _int64,
    "a view of another dtype in a compiled region": _dtype_view_in_graph,
    "a write through a view in a compiled region": _view_written_in_graph,
    "integers are selected in a compiled region": _integer_selection_in_graph,
}


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _indices(name: str, args: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Every index tensor of a call, with the number of rows that it points into."""
    if name == "aten::embedding":
        yield args[1], args[0].shape[0]
    elif name in ("aten::index", "aten::index_put_"):
        for dim, index in enumerate(args[1]):
            if index is not None and index.dtype not in BOOLEAN:
                yield index, args[0].shape[dim]
    elif name in INDEXED:
        yield args[2], args[0].shape[args[1]]
    elif name == "vllm_gaudi::copy_rows_":
        for tensors, rows in ((args[0], args[2]), (args[1], args[3])):
            yield rows, min(tensor.shape[0] for tensor in tensors)
    elif name == "vllm_gaudi::zero_rows_":
        yield args[1], min(tensor.shape[0] for tensor in args[0])


def _extent(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), dtype_of(tensor)
