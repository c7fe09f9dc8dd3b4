# SPDX-License-Identifier: Apache-2.0
"""Tables that the package, its command line, its tests and its requirements hold already, for a reader.

Owns: their columns. Never: a row; that belongs to the table it is taken from.

Ordering rule: none; every function is pure.
"""

from __future__ import annotations

import re

from tests.support import operator_table, vllm_contract
from tools.docs.markdown import code, table
from tools.install import ROOT
from tools.nightly import setting
from vllm_gaudi import capabilities, cli, compat, device, envs
from vllm_gaudi.cli import why
from vllm_gaudi.ops import registry
from vllm_gaudi.v1.core.sched import cache_stats


def environment() -> str:
    rows = []
    for name, var in envs.TABLE.items():
        default = "unset" if var.default is None else int(var.default) if isinstance(var.default, bool) else var.default
        rows.append((code(name), f"{default:g}" if isinstance(default, float) else default, var.doc))
    return table(("variable", "default", "meaning"), rows)


def bridge_defaults() -> str:
    rows = [(code(f"{name}={value}"), why) for name, (value, why) in device.BRIDGE_DEFAULTS.items()]
    return table(("variable", "why"), rows)


def refusals() -> str:
    rows = []
    for row in capabilities.TABLE:
        asked = ", ".join(code(name) for name in _entries(row.sentence)) or "-"
        models = "hybrids" if row.hybrid_only else "all"
        rows.append((code(row.name), models, asked, _placeholders(row.sentence)))
    return table(("name", "models", "flag to change", "sentence"), rows)


def _entries(text: str) -> list[str]:
    """Flags and variables that a sentence names, without doubles."""
    return list(dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]+|\b(?:VLLM|PT)_[A-Z0-9_]+", text)))


def _placeholders(sentence: str) -> str:
    """``{value}`` -> ``<value>`` and ``{value[dtype]}`` -> ``<dtype>``, in a code span, which Markdown leaves alone."""
    return re.sub(r"\{(?:value\[)?(\w+)\]?\}", r"`<\1>`", sentence)


def architectures() -> str:
    return "\n".join(f"* `{name}`" for name in capabilities.SUPPORTED_ARCHITECTURES) + "\n"


def metrics() -> str:
    rows = []
    for name, doc in cache_stats.COUNTERS.items():
        labels = "`model_name`, `engine`" + (", `reason`" if name == cache_stats.MISSES else "")
        rows.append((code(name + "_total"), labels, doc))
    return table(("counter", "labels", "counts"), rows)


def miss_reasons() -> str:
    return table(("`reason`", "meaning"), [(code(reason), doc) for reason, doc in cache_stats.REASONS.items()])


def arguments(command: str) -> str:
    """What `vllm-gaudi COMMAND` takes."""
    rows = []
    for action in cli.parsers()[command]._actions:
        names = ", ".join(code(name) for name in action.option_strings) or code(action.metavar)
        value = code(action.metavar) if action.option_strings and action.metavar else "-"
        if action.dest != "help":
            rows.append((names, value, action.help))
    return table(("argument", "value", "meaning"), rows)


def why_example() -> str:
    """What the command tells of some prompts of token ids, B = 4."""
    ten = list(range(10, 20))
    options = cli.parsers()[""].parse_args(["why", str(ten), str([*ten[:6], 99, 17, 18]), "--block-size", "4"])
    return f"```text\n{why.make(options).as_text()}\n```\n"


def ops() -> str:
    rows = []
    for name, (cpu, hpu) in registry.TABLE.items():
        rows.append((code(name), code(cpu), code(hpu) if hpu else "the same"))
    return table(("op", "on a CPU host", "on Gaudi"), rows)


def operators() -> str:
    return operator_table.documentation()


def host_changes() -> str:
    rows = [
        (code(row.symbol), row.symptom, row.cause, row.versions, row.removal, code(row.test)) for row in compat.ROWS
    ]
    return table(("change", "without it", "cause", "versions", "removed when", "test that fails then"), rows)


def vllm_symbols() -> str:
    """The rows of the contract, by the module of ours that depends on them and the class or module of vLLM."""
    users: dict[str, dict[str, list[str]]] = {}
    for row in vllm_contract.ROWS:
        owner, _, name = row.symbol.rpartition(".")
        users.setdefault(row.used_by, {}).setdefault(owner, []).append(code(name))
    rows = []
    for user, owners in sorted(users.items()):
        rows.append((user, "; ".join(f"{code(owner)}: {', '.join(names)}" for owner, names in sorted(owners.items()))))
    return table(("module of vllm_gaudi", "class or module of vLLM, and what is used of it"), rows)


def nightly_variables() -> str:
    return table(("variable", "meaning"), [(code(name), doc) for name, doc in setting.VARIABLES.items()])


def pins() -> str:
    rows: list[list[str]] = []
    for name in ("host.txt", "build.txt", "test.txt", "docs.txt", "nightly.txt"):
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            requirement, _, why = line.partition("#")
            if requirement.strip():
                rows.append([code(requirement.strip()), code(f"requirements/{name}"), why.strip() or "-"])
            elif requirement and rows:  # an indented comment goes on with the line above it
                rows[-1][2] += " " + why.strip()
    return table(("pin", "file", "reason"), rows)


def entry_points() -> str:
    rows = []
    text = (ROOT / "pyproject.toml").read_text()
    for group, body in re.findall(r'^\[project\.entry-points\."([^"]+)"\]\n((?:[^\[\n][^\n]*\n)+)', text, re.M):
        for name, target in re.findall(r'^"?([^"=\s]+)"?\s*=\s*"([^"]+)"', body, re.M):
            rows.append((code(group), code(name), code(target)))
    return table(("group", "name", "object"), rows)
