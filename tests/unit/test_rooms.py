# SPDX-License-Identifier: Apache-2.0
"""The rooms of the house (design, section 3): who may import whom, and what may be done in one file only.

Reads sources, imports nothing of the package. ``faults`` is the checker; below it stand the house, which has none, and
one planted fault of each kind, which the checker must find.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Room:
    """Files whose path starts with ``path``. ``only``: all they may import beside the standard library; ``never``: what
    they may not; ``at_once``: all that may stand outside functions. Names are dotted prefixes, None is no rule."""

    path: str
    only: tuple[str, ...] | None = None
    never: tuple[str, ...] = ()
    at_once: tuple[str, ...] | None = None
    types_too: bool = True  # whether imports under TYPE_CHECKING count


ROOMS = (
    Room("vllm_gaudi/", never=("vllm_gaudi.testing",)),
    Room("vllm_gaudi/__init__.py", only=("vllm_gaudi.compat", "vllm_gaudi.layers"), at_once=()),
    Room("vllm_gaudi/envs.py", only=()),
    Room("vllm_gaudi/units.py", only=()),
    Room("vllm_gaudi/request_checks.py", only=("msgspec", "numpy", "vllm.exceptions")),
    Room("vllm_gaudi/capabilities.py", only=("vllm_gaudi.bucketing", "vllm_gaudi.device", "vllm_gaudi.envs")),
    Room(
        "vllm_gaudi/device.py",
        only=("numpy", "torch", "habana_frameworks", "vllm_gaudi.envs"),
        at_once=("vllm_gaudi.envs",),
    ),
    Room("vllm_gaudi/compat.py", only=("torch", "vllm", "vllm_gaudi.envs", "vllm_gaudi.device"), at_once=()),
    Room(
        "vllm_gaudi/platform.py",
        never=("vllm_gaudi.v1", "vllm_gaudi.ops", "vllm_gaudi.layers", "vllm_gaudi.distributed"),
        at_once=(
            "torch",
            "vllm.logger",
            "vllm.platforms",
            "vllm_gaudi.capabilities",
            "vllm_gaudi.device",
            "vllm_gaudi.envs",
        ),
        types_too=False,
    ),
    Room("vllm_gaudi/bucketing/", only=("vllm_gaudi.bucketing",)),
    Room("vllm_gaudi/ops/", only=("torch", "vllm_gaudi.device", "vllm_gaudi.ops")),
    Room("vllm_gaudi/attention/metadata.py", only=("torch", "vllm_gaudi.ops.linear")),
    Room("vllm_gaudi/attention/", never=("vllm_gaudi.v1", "vllm_gaudi.layers", "vllm_gaudi.platform")),
    Room("vllm_gaudi/layers/", never=("vllm_gaudi.v1", "vllm_gaudi.platform")),
    Room("vllm_gaudi/layers/__init__.py", at_once=()),
    Room("vllm_gaudi/distributed/", never=("vllm_gaudi",)),
    Room(
        "vllm_gaudi/v1/core/",
        never=(
            "torch",
            "vllm.v1.worker",
            "vllm_gaudi.v1.worker",
            "vllm_gaudi.ops",
            "vllm_gaudi.layers",
            "vllm_gaudi.attention",
            "vllm_gaudi.device",
        ),
    ),
    Room("vllm_gaudi/v1/core/retention.py", only=()),
    Room("vllm_gaudi/v1/parent_watch.py", only=()),
    Room("vllm_gaudi/cli/__init__.py", at_once=("vllm_gaudi.compat", "vllm_gaudi.envs")),
    Room("vllm_gaudi/cli/plan.py", only=("vllm_gaudi.units",)),
    Room("vllm_gaudi/cli/why.py", never=("torch", "vllm"), at_once=("vllm_gaudi",)),
    Room("vllm_gaudi/v1/worker/", never=("vllm_gaudi.platform",)),
    Room("vllm_gaudi/v1/worker/memory.py", only=()),
    Room("vllm_gaudi/v1/worker/process_groups.py", only=("vllm.distributed",)),
    Room("vllm_gaudi/v1/worker/state_slots.py", only=()),
    Room("vllm_gaudi/v1/worker/requests.py", only=("numpy", "vllm_gaudi.v1.worker.state_slots"), types_too=False),
    Room(
        "vllm_gaudi/v1/worker/gdn_checkpoint/layout.py",
        only=("numpy", "vllm_gaudi.v1.worker.gdn_checkpoint"),
        types_too=False,
    ),
    Room(
        "vllm_gaudi/v1/worker/gdn_checkpoint/plan.py",
        only=("numpy", "vllm_gaudi.v1.worker.gdn_checkpoint"),
        types_too=False,
    ),
)
NOT_IN_THE_WHEEL = ("tests", "tools", "benchmarks", "setup")
ENVIRONMENT_READER = "vllm_gaudi/envs.py"
BRIDGE_IMPORTER = "vllm_gaudi/device.py"
HOST_CHANGER = "vllm_gaudi/compat.py"
MODE_CHOOSERS = ("vllm_gaudi/v1/worker/execution.py", "vllm_gaudi/ops/registry.py")
MODE_READERS = ("vllm_gaudi/v1/worker/", "vllm_gaudi/ops/", "vllm_gaudi/layers/")
HOSTS = ("vllm", "torch", "transformers", "habana_frameworks")
ENVIRONMENT = ("environ", "environb", "getenv", "putenv", "unsetenv")
FILLERS = ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "index_fill_", "pad")


@dataclass(frozen=True)
class Import:
    name: str  # dotted, with the imported name at its end
    line: int
    is_typing: bool
    is_at_once: bool


def imports_of(path: str, tree: ast.Module) -> Iterator[Import]:
    def walk(node: ast.AST, is_typing: bool, is_at_once: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, is_typing, is_at_once)
        elif isinstance(node, ast.ImportFrom):
            package = Path(path).parent.parts
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, is_typing, is_at_once)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                yield from walk(child, True, is_at_once)
            for child in node.orelse:
                yield from walk(child, is_typing, is_at_once)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, is_typing, is_at_once and not is_function)

    yield from walk(tree, False, True)


def starts_with(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def is_standard(name: str) -> bool:
    top = name.split(".")[0]
    return top in sys.stdlib_module_names or top == "__future__"


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` of an attribute chain, through calls of nothing and subscripts (``a.b[0].c`` gives ``a.b.c``)."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    return None


def host_names(tree: ast.Module) -> set[str]:
    """Local names that stand for something imported from a host."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if starts_with(alias.name, HOSTS):
                    found.add(alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and not node.level and starts_with(node.module or "", HOSTS):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def changed_targets(tree: ast.Module) -> Iterator[tuple[ast.AST, int]]:
    """Expressions on something that is assigned to, deleted or given to setattr."""
    for node in ast.walk(tree):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr") and node.args:
            yield node.args[0], node.lineno
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += target.elts
            elif isinstance(target, ast.Attribute | ast.Subscript):
                yield target.value, target.lineno


def is_minus_one(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and ast.dump(node.operand) == ast.dump(
        ast.Constant(1)
    )  # fmt: skip


def faults(path: str, source: str) -> list[str]:
    """What is wrong with a file of the house: ``path`` from the top of the tree, with slashes."""
    tree = ast.parse(source)
    found = []

    def fault(line: int, text: str) -> None:
        found.append(f"{path}:{line}: {text}")

    if not source.startswith("# SPDX-License-Identifier: Apache-2.0\n"):
        fault(1, "no SPDX header in the first line")
    if tree.body and ast.get_docstring(tree) is None:
        fault(1, "no module docstring")
    if not path.startswith("vllm_gaudi/"):
        return found

    for imported in imports_of(path, tree):
        if starts_with(imported.name, NOT_IN_THE_WHEEL):
            fault(imported.line, f"imports {imported.name}, which the wheel does not hold")
        for room in ROOMS:
            is_inside = path.startswith(room.path)
            is_testing = path.startswith("vllm_gaudi/testing/")
            if not is_inside or is_testing or (imported.is_typing and not room.types_too):
                continue
            foreign = not is_standard(imported.name)
            if room.only is not None and foreign and not starts_with(imported.name, room.only):
                fault(
                    imported.line,
                    f"imports {imported.name}; {room.path} may import {', '.join(room.only) or 'nothing'}",
                )
            if starts_with(imported.name, room.never):
                fault(imported.line, f"imports {imported.name}; {room.path} never does")
            is_early = imported.is_at_once and foreign and not imported.is_typing
            if is_early and room.at_once is not None and not starts_with(imported.name, room.at_once):
                fault(imported.line, f"imports {imported.name} outside a function")
        is_ours = starts_with(imported.name, ("vllm_gaudi",)) and not imported.is_typing
        last = imported.name.rsplit(".", 1)[-1]
        if path == "vllm_gaudi/platform.py" and is_ours and last[0].isupper() and not last.isupper():
            fault(imported.line, f"imports the class {imported.name}; name it by a dotted string")
        if path != ENVIRONMENT_READER and imported.name in [f"os.{name}" for name in ENVIRONMENT]:
            fault(imported.line, f"imports {imported.name}; only {ENVIRONMENT_READER} reads the environment")

    if path != ENVIRONMENT_READER:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and dotted(node.value) == "os":
                fault(node.lineno, f"uses os.{node.attr}; only {ENVIRONMENT_READER} reads the environment")
    if path.startswith(MODE_READERS) and path not in MODE_CHOOSERS:
        for node in ast.walk(tree):
            name = dotted(node.func) if isinstance(node, ast.Call) else None
            if name is not None and name.rsplit(".", 1)[-1] == "is_hpu" or name == "envs.get":
                fault(node.lineno, f"calls {name}; only {MODE_CHOOSERS[0]} chooses, the others read its record")
    if path != BRIDGE_IMPORTER and "habana_frameworks" in source:
        fault(1, f"names habana_frameworks; only {BRIDGE_IMPORTER} does")
    if path != HOST_CHANGER:
        hosts = host_names(tree)
        for target, line in changed_targets(tree):
            name = dotted(target)
            if name is not None and name.split(".")[0] in hosts:
                fault(line, f"changes {name}, which is the host's; write a row in {HOST_CHANGER}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            filler = (dotted(node.func) or getattr(node.func, "attr", "")).rsplit(".", 1)[-1]
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if filler in FILLERS and any(is_minus_one(value) for value in given):
                fault(node.lineno, "fills with -1; padding is real rows")
    return found


@functools.cache
def sources() -> dict[str, str]:
    folders = ("vllm_gaudi", "tests", "tools", "benchmarks")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))] + [ROOT / "setup.py"]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def test_the_house_has_no_faults():
    found = [fault for path, source in sources().items() for fault in faults(path, source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.path)
def test_every_rule_has_files_to_hold(room):
    """A renamed file would leave its rule without any."""
    assert any(path.startswith(room.path) for path in sources())


def test_class_paths_in_strings_lead_to_a_class():
    """Platform and capabilities name classes by dotted string; a typo there shows up only when an engine starts."""
    named = set()
    for path in ("vllm_gaudi/__init__.py", "vllm_gaudi/platform.py", "vllm_gaudi/capabilities.py"):
        for node in ast.walk(ast.parse(sources()[path])):
            value = getattr(node, "value", None)
            if isinstance(value, str) and value.startswith("vllm_gaudi.") and " " not in value:
                named.add(value)
    assert len(named) >= 6
    for name in named:
        module, _, class_name = name.rpartition(".")
        tree = ast.parse(sources()[module.replace(".", "/") + ".py"])
        assert class_name in [node.name for node in tree.body if isinstance(node, ast.ClassDef)], name


HEADER = '# SPDX-License-Identifier: Apache-2.0\n"""Planted."""\n'

PLANTED = (
    # room, line that is wrong, what the checker says about it
    ("vllm_gaudi/bucketing/x.py", "import numpy", "imports numpy"),
    ("vllm_gaudi/bucketing/x.py", "from vllm_gaudi import envs", "imports vllm_gaudi.envs"),
    ("vllm_gaudi/bucketing/x.py", "from ..ops.registry import get_ops", "imports vllm_gaudi.ops.registry.get_ops"),
    ("vllm_gaudi/ops/x.py", "def f():\n    from vllm.config import VllmConfig", "imports vllm.config.VllmConfig"),
    ("vllm_gaudi/ops/moe/x.py", "import numpy as np", "imports numpy"),
    ("vllm_gaudi/ops/x.py", "from vllm_gaudi.v1.worker import state_slots", "imports vllm_gaudi.v1.worker.state_slots"),
    (
        "vllm_gaudi/ops/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.config import VllmConfig",
        "imports vllm.config.VllmConfig",
    ),
    ("vllm_gaudi/capabilities.py", "import torch", "imports torch"),
    ("vllm_gaudi/capabilities.py", "def f():\n    import vllm.envs", "imports vllm.envs"),
    ("vllm_gaudi/envs.py", "import torch", "imports torch"),
    ("vllm_gaudi/device.py", "import torch", "imports torch outside a function"),
    ("vllm_gaudi/__init__.py", "from vllm_gaudi import layers", "outside a function"),
    ("vllm_gaudi/compat.py", "import torch", "outside a function"),
    ("vllm_gaudi/v1/core/sched/x.py", "import torch.nn.functional", "never does"),
    (
        "vllm_gaudi/v1/core/sched/x.py",
        "def f():\n    from vllm_gaudi.v1.worker.state_slots import StateSlotPool",
        "never does",
    ),
    ("vllm_gaudi/v1/core/sched/x.py", "from vllm_gaudi.ops import registry", "never does"),
    ("vllm_gaudi/platform.py", "from vllm.config import VllmConfig", "outside a function"),
    ("vllm_gaudi/platform.py", "def f():\n    from vllm_gaudi.v1.worker.hpu_worker import HPUWorker", "never does"),
    (
        "vllm_gaudi/platform.py",
        "def f():\n    from vllm_gaudi.attention.backend import HPUAttentionBackend",
        "name it by a dotted string",
    ),
    ("vllm_gaudi/attention/x.py", "from vllm_gaudi.v1.worker import inputs", "never does"),
    ("vllm_gaudi/layers/x.py", "from vllm_gaudi.v1.worker.kv_cache import KVCaches", "never does"),
    ("vllm_gaudi/layers/__init__.py", "from vllm_gaudi.layers import moe", "outside a function"),
    ("vllm_gaudi/v1/worker/gdn_checkpoint/plan.py", "import torch", "imports torch"),
    ("vllm_gaudi/v1/worker/gdn_checkpoint/layout.py", "from vllm.v1 import kv_cache_interface", "imports vllm.v1"),
    ("vllm_gaudi/v1/worker/requests.py", "import torch", "imports torch"),
    ("vllm_gaudi/v1/worker/inputs.py", "from vllm_gaudi.testing import engine", "never does"),
    ("vllm_gaudi/v1/worker/memory.py", "import torch", "imports torch"),
    ("vllm_gaudi/v1/worker/x.py", "def f():\n    from tests.support import faults", "the wheel does not hold"),
    ("vllm_gaudi/testing/x.py", "from tools.model_sizes import Geometry", "the wheel does not hold"),
    ("vllm_gaudi/cli/__init__.py", "import vllm", "imports vllm outside a function"),
    ("vllm_gaudi/cli/plan.py", "from vllm_gaudi.cli import dry_run", "imports vllm_gaudi.cli.dry_run"),
    ("vllm_gaudi/cli/why.py", "def f():\n    import torch", "never does"),
    ("vllm_gaudi/v1/worker/x.py", "def f():\n    return device.is_hpu()", "calls device.is_hpu"),
    ("vllm_gaudi/ops/x.py", "def f():\n    return is_hpu()", "calls is_hpu"),
    ("vllm_gaudi/layers/x.py", 'def f():\n    return envs.get("A")', "calls envs.get"),
    ("vllm_gaudi/platform.py", 'import os\nX = os.environ.get("A")', "uses os.environ"),
    ("vllm_gaudi/v1/worker/x.py", 'import os\ndef f():\n    os.environ["A"] = "1"', "uses os.environ"),
    ("vllm_gaudi/v1/worker/x.py", 'import os\nX = os.getenv("A")', "uses os.getenv"),
    ("vllm_gaudi/v1/worker/x.py", "from os import environ", "imports os.environ"),
    ("vllm_gaudi/v1/worker/x.py", "import habana_frameworks.torch", "names habana_frameworks"),
    ("vllm_gaudi/ops/x.py", 'import importlib\nX = importlib.import_module("habana_frameworks")', "names habana"),
    ("vllm_gaudi/v1/worker/x.py", "import torch\ntorch.empty = torch.zeros", "changes torch"),
    (
        "vllm_gaudi/v1/worker/x.py",
        "import torch\ndef f():\n    torch.backends.mkldnn.enabled = False",
        "changes torch.",
    ),
    (
        "vllm_gaudi/layers/x.py",
        "from vllm.v1.core.sched.scheduler import Scheduler\nScheduler.schedule = None",
        "changes Scheduler",
    ),
    ("vllm_gaudi/layers/x.py", "from vllm import envs\nenvs.environment_variables['A'] = None", "changes envs."),
    ("vllm_gaudi/layers/x.py", "import vllm.envs as e\nsetattr(e, 'A', 1)", "changes e"),
    ("vllm_gaudi/layers/x.py", "import torch\ndel torch.hpu", "changes torch"),
    ("vllm_gaudi/layers/x.py", "import torch\n(torch.a, b), c = f()", "changes torch"),
    ("vllm_gaudi/v1/worker/x.py", "import numpy as np\nX = np.full(3, -1)", "fills with -1"),
    ("vllm_gaudi/ops/x.py", "def f(t):\n    return t.masked_fill_(t > 0, -1)", "fills with -1"),
    ("vllm_gaudi/ops/x.py", "import torch\nX = torch.nn.functional.pad(t, (0, 1), value=-1)", "fills with -1"),
)


@pytest.mark.parametrize(("path", "line", "said"), PLANTED, ids=range(len(PLANTED)))
def test_a_planted_fault_is_found(path, line, said):
    assert not faults(path, HEADER)
    found = faults(path, HEADER + line + "\n")
    assert len(found) >= 1
    assert any(said in fault for fault in found), found


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('"""No licence."""\n', "no SPDX header"),
        ("# SPDX-License-Identifier: Apache-2.0\nx = 1\n", "no module docstring"),
        ("# SPDX-License-Identifier: MIT\n", "no SPDX header"),
    ],
)
@pytest.mark.parametrize("path", ["vllm_gaudi/ops/x.py", "tests/unit/x.py"])
def test_a_planted_bare_file_is_found(path, source, said):
    assert [said in fault for fault in faults(path, source)] == [True]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("vllm_gaudi/envs.py", "import os\nX = os.environ"),
        ("vllm_gaudi/device.py", "def f():\n    import habana_frameworks.torch"),
        ("vllm_gaudi/compat.py", "def f():\n    import torch\n    torch.accelerator.synchronize = None"),
        ("vllm_gaudi/layers/x.py", "import torch\ndef f(layer):\n    layer.weight = torch.zeros(1)"),
        ("vllm_gaudi/layers/x.py", "import torch\nX = torch.zeros(3).reshape(-1)"),
        ("vllm_gaudi/platform.py", "def f():\n    from vllm.config import CompilationMode"),
        (
            "vllm_gaudi/v1/worker/requests.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.v1.request import Request",
        ),
        ("tests/unit/x.py", "import os\nX = os.environ"),
    ],
    ids=range(8),
)
def test_what_is_allowed_is_not_a_fault(path, line):
    assert not faults(path, HEADER + line + "\n")
