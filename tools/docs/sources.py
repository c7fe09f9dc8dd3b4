# SPDX-License-Identifier: Apache-2.0
"""What is only in the source text of the package: contracts of the modules, and sentences of errors and log lines.

Owns: reading it, with ``ast`` and without an import. Never: torch or vLLM.

Ordering rule: a module's docstring says ``Owns:``, ``Never:`` and ``Ordering rule:``, in this spelling alone.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tools.docs.markdown import code, table
from tools.install import ROOT

PACKAGE = ROOT / "vllm_gaudi"


@functools.cache
def _tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    return [path for path in found if "testing" not in path.relative_to(PACKAGE).parts]


def docstrings() -> dict[Path, str]:
    """By the module's path in the package; those that are empty are left out."""
    found = {path.relative_to(PACKAGE): ast.get_docstring(_tree_of(path)) for path in modules()}
    return {path: text for path, text in found.items() if text}


def owners() -> str:
    rows = []
    for path, text in docstrings().items():
        owns = _paragraph(text, "Owns")
        if owns and not owns.startswith("nothing itself"):
            rows.append((code(path), owns, _paragraph(text, "Never") or "-"))
    return table(("file", "owns", "never does"), rows)


def ordering_rules() -> str:
    rules = {path: _paragraph(text, "Ordering rule") for path, text in docstrings().items()}
    rows = [(code(path), rule) for path, rule in rules.items() if rule and not rule.startswith("none")]
    return table(("file", "rule"), rows)


def _paragraph(docstring: str, key: str) -> str:
    """The sentences of a docstring that follow ``key``, up to the next key or empty line."""
    following = r"\s(?:Owns|Never|Ordering rule):|\n\n|\Z"
    match = re.search(rf"(?:^|\s){key}: *(.*?)(?={following})", docstring, re.S)
    return _tidy(match[1]) if match else ""


def _tidy(text: str) -> str:
    """One line; a docstring's double backticks are Markdown's single ones."""
    line = re.sub(r"\s+", " ", text).strip().replace("``", "`")
    line = line[:-1] + "." if line.endswith(":") else line
    return "".join(part if n % 2 else part.replace("*", "\\*") for n, part in enumerate(re.split(r"(`[^`]*`)", line)))


def step_order() -> str:
    """The six rules at the head of the step."""
    rows: list[list[str]] = []
    for line in docstrings()[Path("v1/worker/step.py")].splitlines():
        match = re.match(r"    (\S+ before \S+)\s{2,}(.*)", line)
        if match:
            rows.append([f"**{match[1]}**", match[2]])
        elif rows and line.startswith(" " * 8):
            rows[-1][1] += " " + line.strip()
        elif rows:
            break
    assert rows
    return table(("rule", "why"), rows)


def start_errors() -> str:
    """Sentences of the errors that the layout and the cache geometry raise at start."""
    rows = []
    for path in (
        "v1/core/sched/block_size.py",
        "v1/worker/gdn_checkpoint/layout.py",
        "v1/worker/kv_cache.py",
        "v1/worker/hpu_worker.py",
        "attention/backend.py",
        "layers/moe.py",
    ):
        for node in ast.walk(_tree_of(PACKAGE / path)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                sentence = _words(node.exc.args[0])
                if sentence and "; " in sentence:
                    rows.append((code(path), sentence))
    return table(("file", "sentence"), rows)


def log_lines() -> str:
    rows = []
    for path in modules():
        for node in ast.walk(_tree_of(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            is_logger = isinstance(node.func.value, ast.Name) and node.func.value.id in ("logger", "_logger")
            if is_logger and len(_words(node.args[0])) > 5:
                line = re.sub(r"%[-+0-9.]*[sdf]", "...", _words(node.args[0])).replace("%%", "%")
                rows.append((node.func.attr, code(line), code(path.relative_to(ROOT))))
    for line in _store_lines():
        rows.append(("info", code(line), code("vllm_gaudi/v1/worker/gdn_checkpoint/store.py")))
    return table(("level", "line", "file"), rows)


def _store_lines() -> Iterator[str]:
    for node in ast.walk(_tree_of(PACKAGE / "v1/worker/gdn_checkpoint/store.py")):
        if isinstance(node, ast.FunctionDef) and node.name == "describe":
            for step in ast.walk(node):
                if isinstance(step, ast.Return) and step.value is not None:
                    yield _words(step.value)


def _words(node: ast.AST) -> str:
    """The text of a string expression, with ``...`` where it is computed."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "..."
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left) + _words(node.right)
    return "..."
