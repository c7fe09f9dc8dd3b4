# SPDX-License-Identifier: Apache-2.0
"""``hpu_backend``: aot_eager underneath, with what compile-only mode means.

In that mode the bridge compiles a graph and does not run it. So here a graph runs on copies of its tensors, none of its
writes reaches them, and every float it returns is NaN: whoever relies on a value of warm-up finds out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend, register_backend

from habana_frameworks.calls import check, note
from habana_frameworks.torch.internal.bridge_config import is_compile_only

_OPTIONS = ("force_static_compile", "use_graph_freezing")


def _custom_operators(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Calls in ``graph`` of operators that a library has defined, opaque to it."""
    kinds = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    nodes = [node for node in graph.graph.nodes if isinstance(node.target, kinds)]
    return [node for node in nodes if str(node.target).split(".")[0] not in ("aten", "prims")]


def _makes_a_list(node: torch.fx.Node) -> bool:
    """Whether a list that the call is given holds tensors which the graph itself makes."""
    lists = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, (list, tuple))]
    return any(isinstance(x, torch.fx.Node) and x.op != "placeholder" for value in lists for x in value)


def _undefined(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.full_like(value, float("nan"))
    return value


@register_backend(name="hpu_backend")
def hpu_backend(graph: torch.fx.GraphModule, example_inputs: list[Any], *, options: Any = None, **kwargs: Any) -> Any:
    check(not kwargs and all(key in _OPTIONS for key in options or {}), f"unknown options {options} {kwargs}")
    compiled = lookup_backend("aot_eager")(graph, example_inputs)
    nodes = _custom_operators(graph)
    note(
        "compile",
        is_compile_only=is_compile_only(),
        operators=sorted({str(node.target) for node in nodes}),
        makes_lists=sorted({str(node.target) for node in nodes if _makes_a_list(node)}),
    )

    def run(*args: Any) -> Any:
        only = is_compile_only()
        note("run", is_compile_only=only)
        if not only:
            return compiled(*args)
        copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return [_undefined(value) for value in compiled(*copies)]

    return run
