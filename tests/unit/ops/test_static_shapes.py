# SPDX-License-Identifier: Apache-2.0
"""Lint of the op sources: nothing whose shape depends on data, nothing that reads back to the host."""

import ast
from pathlib import Path

import pytest
import torch

import vllm_gaudi.ops
from tests.unit.ops.oracles import VARIANTS
from vllm_gaudi.ops.registry import resolve

ROOT = Path(vllm_gaudi.ops.__file__).parent
# row_copy.py moves bytes outside compiled graphs, by host-known rows, and has its own rules.
SOURCES = sorted(path for path in ROOT.rglob("*.py") if path.name != "row_copy.py")

DATA_DEPENDENT = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "masked_scatter"}
HOST_READS = {"item", "tolist", "numpy", "cpu", "is_nonzero", "equal", "allclose"}
PLACE_DEPENDENT = {"sigmoid", "silu", "softplus", "conv1d", "gelu"}  # as torch.x, F.x or tensor.x: see pointwise.py
ALLOWED_IMPORTS = {"torch", "vllm_gaudi", "functools", "importlib", "collections", "dataclasses", "typing"}


def complaints(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if node.attr in DATA_DEPENDENT | HOST_READS | PLACE_DEPENDENT:
                found.append(f"line {node.lineno}: .{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "where" and len(node.args) == 1:
                found.append(f"line {node.lineno}: where() with one argument is nonzero()")
            if node.func.attr == "view" and any(_is_dtype(arg) for arg in node.args):
                found.append(f"line {node.lineno}: a view of another dtype")
        elif isinstance(node, ast.Subscript) and _is_mask(node.slice):
            found.append(f"line {node.lineno}: indexing by a boolean mask")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"line {node.lineno}: import {n}" for n in names if n.split(".")[0] not in ALLOWED_IMPORTS]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _is_mask_name(node):
            found.append(f"line {node.lineno}: multiplication by a mask")
    return found


def _is_dtype(node: ast.expr) -> bool:
    names = {"float32", "float16", "bfloat16", "int32", "int64", "int8", "uint8", "int16"}
    return isinstance(node, ast.Attribute) and node.attr in names


def _is_mask(node: ast.expr) -> bool:
    inverted = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert)
    return inverted or isinstance(node, ast.Compare) or (isinstance(node, ast.Name) and "mask" in node.id)


def _is_mask_name(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.Name) and side.id in ("mask", "is_padding", "live") for side in (node.left, node.right)
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_are_static(path):
    assert complaints(path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_open_with_their_contract(path):
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    for word in ("Owns:", "Never:", "Ordering rule:"):
        assert word in docstring, f"{path.name} does not say what it {word.lower()}"


@pytest.mark.parametrize(
    "line",
    [
        "y = x[x > 0]",
        "y = x[~alive]",
        "y = x[mask]",
        "n = x.sum().item()",
        "y = x.tolist()",
        "i = torch.where(x)",
        "i = x.nonzero()",
        "y = x.view(torch.int32)",
        "y = torch.sigmoid(x)",
        "y = F.silu(x)",
        "y = x * mask",
        "import vllm",
        "from habana_frameworks.torch import core",
        "import numpy",
    ],
)
def test_the_lint_can_fail(line):
    assert complaints(line)


@pytest.mark.parametrize("variant", VARIANTS)
def test_boundaries_have_a_shape_that_no_value_is_needed_for(variant):
    """Meta tensors have no values to read."""

    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    counts = {"boundary_offset": meta(2, dtype=torch.int32), "boundary_interval": 64}
    heads = meta(2, 100, 1, 8), meta(2, 100, 1, 8), meta(2, 100, 2, 8), meta(2, 100, 2), meta(2, 100, 2)
    *_, states = resolve("chunk_gated_delta_rule", variant)(
        *heads, meta(2, 2, 8, 8), meta(2, dtype=torch.int32), chunk_size=32, **counts
    )
    *_, tails = resolve("causal_conv1d_prefill", variant)(
        meta(2, 100, 5), meta(2, 3, 5), meta(5, 4), None, meta(2, dtype=torch.int32), **counts
    )
    assert (states.shape, tails.shape) == ((2, 2, 2, 8, 8), (2, 2, 3, 5))
