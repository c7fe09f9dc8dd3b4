# SPDX-License-Identifier: Apache-2.0
"""The documentation site: writes the generated parts of docs/, and builds the site with MkDocs into .cache/site.

Owns: the generated sections (in the pages, between ``<!-- generated: NAME -->`` and ``<!-- end -->``). Reads sources
and tables; imports neither torch nor vLLM.
Never: a sentence by hand inside a generated section, or a number that is not computed here or in the package.

Ordering rule: sections are written before the site is built, so a built site is never behind the tree.

    python -m tools.docs          write the generated sections
    python -m tools.docs check    exit 1 when they are not what would be written
    python -m tools.docs build    write them, install MkDocs into .venv where it is missing, build with --strict
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support import operator_table
from tools import install
from tools.model_sizes import DEFAULT_SERVING, GB, Geometry, Model, Serving, grid
from tools.nightly import setting
from vllm_gaudi import capabilities, cli, compat, device, envs
from vllm_gaudi.bucketing.grid import CONFIG_KEYS
from vllm_gaudi.cli import why
from vllm_gaudi.ops import registry
from vllm_gaudi.planning import DEFAULT_SERVING, GB, Geometry, Model, Serving, grid
from vllm_gaudi.testing import operator_table, vllm_contract
from vllm_gaudi.v1.core.sched import block_size, cache_stats
from vllm_gaudi.v1.worker.slots import NUM_RESERVED_ROWS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "vllm_gaudi"
SITE = ROOT / ".cache" / "site"
DOCS_PINS = ROOT / "requirements" / "docs.txt"
SECTION = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.S)
MIB = 2**20


# Numbers out of the sources


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def constant(path: str, name: str) -> Any:
    """Value of a module's constant expression, without importing the module."""
    for node in tree_of(PACKAGE / path).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            expression = ast.Expression(node.value)  # type: ignore[attr-defined]
            return eval(compile(expression, path, "eval"), {"__builtins__": {}}, vars(cache_stats))
    raise LookupError(f"{path} has no constant {name}")


KERNEL_BLOCK: int = block_size.MAX_KERNEL_BLOCK
GDN_CHUNK: int = block_size.DEFAULT_GDN_CHUNK


# Models. Their arithmetic is tools/model_sizes.py's

QWEN35_27B = Model("Qwen3.5-27B, Qwen3.6-27B (dense)", "Qwen/Qwen3.6-27B", 27, 48, 16, 4, 16, 48, 4)
QWEN35_35B = Model("Qwen3.5-35B-A3B, Qwen3.6-35B-A3B", "Qwen/Qwen3.5-35B-A3B", 35, 30, 10, 2, 16, 32, 4)
QWEN3_NEXT = Model(
    "Qwen3-Next-80B-A3B, SSM state in fp32",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    80,
    36,
    12,
    2,
    16,
    32,
    4,
    is_multimodal=False,
    flags=("--mamba-ssm-cache-dtype float32",),
)
QWEN3_NEXT_BF16 = Model(
    "Qwen3-Next-80B-A3B, SSM state in bf16",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    80,
    36,
    12,
    2,
    16,
    32,
    2,
    is_multimodal=False,
)
QWEN35_122B = Model("Qwen3.5-122B-A10B", "Qwen/Qwen3.5-122B-A10B", 122, 36, 12, 2, 16, 64, 4)
QWEN35_397B = Model("Qwen3.5-397B-A17B", "Qwen/Qwen3.5-397B-A17B", 397, 45, 15, 2, 16, 64, 4)
MODELS = (QWEN35_27B, QWEN35_35B, QWEN3_NEXT, QWEN3_NEXT_BF16, QWEN35_122B, QWEN35_397B)
RECIPES = (QWEN3_NEXT, QWEN35_35B, QWEN35_27B, QWEN35_122B, QWEN35_397B)
RANKS = (1, 2, 4, 8)

KNOWN_BLOCKS = ((QWEN35_27B, 1, 896), (QWEN35_35B, 1, 1152), (QWEN35_397B, 8, 640))
"""Published block sizes that the formula must reproduce."""


# Tables


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """A Markdown table; ``right``: columns that are aligned to the right."""
    lines = [head, ["---:" if n in right else "---" for n in range(len(head))], *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def code(text: object) -> str:
    return f"`{text}`"


def placeholders(sentence: str) -> str:
    """``{value}`` -> ``<value>`` and ``{value[dtype]}`` -> ``<dtype>``, in a code span, which Markdown leaves alone."""
    return re.sub(r"\{(?:value\[)?(\w+)\]?\}", r"`<\1>`", sentence)


def entries(text: str) -> list[str]:
    """Flags and variables that a sentence names, without doubles."""
    return list(dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]+|\b(?:VLLM|PT)_[A-Z0-9_]+", text)))


def mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.1f}"


def dimensions() -> str:
    rows = [
        (
            m.name,
            m.gdn_layers,
            m.attention_layers,
            m.kv_heads,
            m.head,
            m.k_heads,
            m.v_heads,
            m.gdn_head,
            m.conv_kernel,
            {4: "fp32", 2: "bf16"}[m.ssm_bytes],
        )
        for m in MODELS
    ]
    head = ("model", "GDN layers", "attention layers", "KV heads", "head", "GDN k heads", "GDN v heads", "GDN head")
    return table((*head, "conv kernel", "SSM state"), rows, range(1, 9))


def block_sizes() -> str:
    for model, ranks, expected in KNOWN_BLOCKS:
        assert Geometry(model, ranks).block == expected, (model.name, ranks)
    rows = []
    for model in MODELS:
        for ranks in RANKS:
            g = Geometry(model, ranks)
            rows.append(
                (
                    model.name,
                    ranks,
                    f"{g.state.num_bytes:,}",
                    f"{g.token_bytes:,}",
                    f"**{g.block:,}**",
                    f"{g.page_bytes:,}",
                    f"{100 * g.fill:.0f} %",
                    "whole heads" if g.has_whole_heads else "SSM cut at the end of K",
                )
            )
    head = ("model", "TP", "state, bytes per layer", "K+V, bytes per token and layer", "B", "page, bytes", "full")
    return table((*head, "packing"), rows, range(1, 7))


def pool_costs() -> str:
    rows = []
    for model in MODELS:
        for ranks in RANKS:
            g = Geometry(model, ranks)
            rows.append(
                (
                    model.name,
                    ranks,
                    f"{g.block:,}",
                    mib(g.block_bytes),
                    mib(g.row_bytes),
                    g.staging_rows(),
                    mib(g.state_bytes()),
                )
            )
    head = ("model", "TP", "B", "one block, MiB", "one state row, MiB", "staging rows", "all state rows, MiB")
    return table(head, rows, range(1, 7))


def staging() -> str:
    budgets = (1024, 2048, 4096, 8192, 16384, 32768)
    rows = []
    for model, ranks in ((QWEN35_27B, 1), (QWEN35_35B, 1), (QWEN3_NEXT, 4), (QWEN35_397B, 8)):
        g = Geometry(model, ranks)
        counts = [g.staging_rows(Serving(max_num_batched_tokens=budget)) for budget in budgets]
        cells = [f"{count} ({mib(count * g.row_bytes)} MiB)" for count in counts]
        rows.append((model.name, ranks, f"{g.block:,}", *cells))
    return table(("model", "TP", "B", *(f"{budget:,}" for budget in budgets)), rows, range(1, 9))


def rooms_left() -> str:
    rows = []
    for model in RECIPES:
        for ranks in RANKS:
            g = Geometry(model, ranks)
            cells = []
            for card in (96 * GB, 128 * GB):
                tokens = g.tokens_left(card)
                cells.append(f"{tokens:,}" if tokens else "does not fit")
            rows.append((model.name, ranks, f"{g.weight_bytes / GB:.1f}", f"{g.state_bytes() / GB:.1f}", *cells))
    head = ("model", "TP", "weights, GB per rank", "state rows, GB per rank", "pool on 96 GB, tokens at most")
    return table((*head, "pool on 128 GB, tokens at most"), rows, range(1, 6))


def fewest_ranks(model: Model, card_bytes: int) -> int | None:
    """Ranks whose pool holds ten conversations of full length, before the profile run's peak comes off."""
    enough = 10 * DEFAULT_SERVING.max_model_len
    return next((r for r in RANKS if Geometry(model, r).tokens_left(card_bytes) >= enough), None)


def recipe_commands() -> str:
    parts = []
    for model in RECIPES:
        ranks = fewest_ranks(model, 128 * GB) or RANKS[-1]
        g = Geometry(model, ranks)
        serving = DEFAULT_SERVING
        lines = [f"vllm serve {model.path}"]
        lines += ["--language-model-only"] if model.is_multimodal else []
        lines += ["--dtype bfloat16", *model.flags]
        lines += [f"--tensor-parallel-size {ranks}"] if ranks > 1 else []
        lines += [
            f"--max-model-len {serving.max_model_len}",
            f"--max-num-seqs {serving.max_num_seqs}",
            f"--max-num-batched-tokens {serving.max_num_batched_tokens}",
            "--enable-prompt-tokens-details",
        ]
        command = " \\\n    ".join(lines)
        parts.append(
            f"### {model.name}\n\n```bash\n{command}\n```\n\n"
            f"B = {g.block:,} tokens on {ranks} rank{'s' if ranks > 1 else ''}. A block takes {mib(g.block_bytes)} MiB,"
            f" a state row {mib(g.row_bytes)} MiB; {serving.max_num_seqs} slots, {NUM_RESERVED_ROWS} reserved and "
            f"{g.staging_rows()} staging rows take {mib(g.state_bytes())} MiB, all per rank.\n"
        )
    return "\n".join(parts)


def environment() -> str:
    rows = []
    for name, var in envs.TABLE.items():
        default = "unset" if var.default is None else int(var.default) if isinstance(var.default, bool) else var.default
        rows.append((code(name), f"{default:g}" if isinstance(default, float) else default, var.doc))
    return table(("variable", "default", "meaning"), rows)


def bridge_defaults() -> str:
    rows = [(code(f"{name}={value}"), why) for name, (value, why) in device.BRIDGE_DEFAULTS.items()]
    return table(("variable", "why"), rows)


LADDERS = {
    "prefill_batch_buckets": ("sequences in a prefill forward", "prefill_batches"),
    "prefill_query_buckets": ("tokens per sequence in a prefill forward, padding included", "prefill_queries"),
    "prefill_block_buckets": ("kernel blocks of context per sequence in a prefill forward", "prefill_blocks"),
    "decode_batch_buckets": ("sequences in the decode batch", "decode_batches"),
    "decode_block_buckets": ("kernel blocks that the decode batch reads", "decode_blocks"),
}


def additional_config() -> str:
    ladders = grid(Geometry(QWEN35_27B, 1).block)
    rows = []
    for key in CONFIG_KEYS:
        meaning, attribute = LADDERS[key]
        rows.append((code(key), meaning, ", ".join(str(step) for step in getattr(ladders, attribute))))
    shapes = len(ladders.all_prefill()), len(ladders.all_decode())
    return (
        table(("key", "sizes of", "ladder without it"), rows)
        + f"\nThe ladders are those of {QWEN35_27B.name} with `--max-model-len {DEFAULT_SERVING.max_model_len}`, "
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
                mib(g.block_bytes),
                mib(groups * g.block_bytes),
                mib(g.row_bytes),
                f"{100 * g.row_bytes / (groups * g.block_bytes):.0f} %",
            )
        )
    head = ("model", "TP", "B", "attention block, MiB", "three GDN blocks, MiB", "bytes moved per save, MiB", "used")
    return table(head, rows, range(1, 7))


def refusal_table() -> str:
    rows = []
    for row in capabilities.TABLE:
        asked = ", ".join(code(name) for name in entries(row.sentence)) or "-"
        models = "hybrids" if row.hybrid_only else "all"
        rows.append((code(row.name), models, asked, placeholders(row.sentence)))
    return table(("row", "models", "change", "sentence"), rows)


def architectures() -> str:
    return "\n".join(f"* `{name}`" for name in capabilities.SUPPORTED_ARCHITECTURES) + "\n"


def raises() -> str:
    """Sentences of the errors that the layout and the cache geometry raise at start."""
    rows = []
    for path in (
        "v1/core/sched/block_size.py",
        "v1/worker/gdn_checkpoint/layout.py",
        "v1/worker/kv_cache.py",
        "v1/worker/hpu_worker.py",
        "attention/backend.py",
        "models/moe.py",
    ):
        for node in ast.walk(tree_of(PACKAGE / path)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                sentence = words(node.exc.args[0])
                if sentence and "; " in sentence:
                    rows.append((code(path), sentence))
    return table(("file", "sentence"), rows)


def words(node: ast.AST) -> str:
    """The text of a string expression, with ``...`` where it is computed."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "..."
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words(node.left) + words(node.right)
    return "..."


def metrics() -> str:
    rows = []
    for name, doc in cache_stats.COUNTERS.items():
        labels = "`model_name`, `engine`" + (", `reason`" if name == cache_stats.MISSES else "")
        rows.append((code(name + "_total"), labels, doc))
    return table(("counter", "labels", "counts"), rows)


def miss_reasons() -> str:
    return table(("`reason`", "meaning"), [(code(reason), doc) for reason, doc in cache_stats.REASONS.items()])


def log_lines() -> str:
    rows = []
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            is_logger = isinstance(node.func.value, ast.Name) and node.func.value.id in ("logger", "_logger")
            if is_logger and len(words(node.args[0])) > 5:
                line = re.sub(r"%[-+0-9.]*[sdf]", "...", words(node.args[0])).replace("%%", "%")
                rows.append((node.func.attr, code(line), code(path.relative_to(ROOT))))
    for line in store_lines():
        rows.append(("info", code(line), code("vllm_gaudi/v1/worker/gdn_checkpoint/store.py")))
    return table(("level", "line", "from"), rows)


def store_lines() -> Iterator[str]:
    for node in ast.walk(tree_of(PACKAGE / "v1/worker/gdn_checkpoint/store.py")):
        if isinstance(node, ast.FunctionDef) and node.name == "describe":
            for step in ast.walk(node):
                if isinstance(step, ast.Return) and step.value is not None:
                    yield words(step.value)


def entry_points() -> str:
    rows = []
    text = (ROOT / "pyproject.toml").read_text()
    for group, body in re.findall(r'^\[project\.entry-points\."([^"]+)"\]\n((?:[^\[\n][^\n]*\n)+)', text, re.M):
        for name, target in re.findall(r'^"?([^"=\s]+)"?\s*=\s*"([^"]+)"', body, re.M):
            rows.append((code(group), code(name), code(target)))
    return table(("group", "name", "object"), rows)


def nightly_variables() -> str:
    return table(("variable", "what it says"), [(code(name), doc) for name, doc in setting.VARIABLES.items()])


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


def compat_rows() -> str:
    rows = [
        (code(row.symbol), row.symptom, row.cause, row.versions, row.removal, code(row.test)) for row in compat.ROWS
    ]
    return table(("symbol", "without it", "why", "versions", "goes when", "test that fails then"), rows)


def ops() -> str:
    rows = []
    for name, (cpu, hpu) in registry.TABLE.items():
        rows.append((code(name), code(cpu), code(hpu) if hpu else "the same"))
    return table(("op", "on a CPU host", "on Gaudi"), rows)


# Rooms, from the docstrings


def sources() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    return [path for path in found if "testing" not in path.relative_to(PACKAGE).parts]


def paragraph(docstring: str, key: str) -> str:
    """The sentences of a docstring that follow ``key``, up to the next key or empty line."""
    following = r"\s(?:Owns|Never|Ordering rule):|\n\n|\Z"
    match = re.search(rf"(?:^|\s){key}: *(.*?)(?={following})", docstring, re.S)
    return tidy(match[1]) if match else ""


def tidy(text: str) -> str:
    """One line; a docstring's double backticks are Markdown's single ones."""
    line = re.sub(r"\s+", " ", text).strip().replace("``", "`")
    line = line[:-1] + "." if line.endswith(":") else line
    return "".join(part if n % 2 else part.replace("*", "\\*") for n, part in enumerate(re.split(r"(`[^`]*`)", line)))


def docstring_of(path: Path) -> str:
    return ast.get_docstring(tree_of(path)) or ""


def owners() -> str:
    rows = []
    for path in sources():
        owns = paragraph(docstring_of(path), "Owns")
        if owns and not owns.startswith("nothing itself"):
            rows.append((code(path.relative_to(PACKAGE)), owns, paragraph(docstring_of(path), "Never") or "-"))
    return table(("file", "owns", "never"), rows)


def ordering_rules() -> str:
    rows = []
    for path in sources():
        rule = paragraph(docstring_of(path), "Ordering rule")
        if rule and not rule.startswith("none"):
            rows.append((code(path.relative_to(PACKAGE)), rule))
    return table(("file", "rule"), rows)


def step_order() -> str:
    """The six rules at the head of the model runner."""
    rows: list[list[str]] = []
    for line in docstring_of(PACKAGE / "v1/worker/step.py").splitlines():
        match = re.match(r"    (\S+ before \S+)\s{2,}(.*)", line)
        if match:
            rows.append([f"**{match[1]}**", match[2]])
        elif rows and line.startswith(" " * 8):
            rows[-1][1] += " " + line.strip()
        elif rows:
            break
    assert rows
    return table(("rule", "why"), rows)


# What is used of vLLM


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


def arguments(command: str) -> str:
    """What `vllm-gaudi COMMAND` takes."""
    rows = []
    for action in cli.parsers()[command]._actions:
        names = ", ".join(code(name) for name in action.option_strings) or code(action.metavar)
        value = code(action.metavar) if action.option_strings and action.metavar else "-"
        if action.dest != "help":
            rows.append((names, value, action.help))
    return table(("argument", "value", "meaning"), rows)


def reused() -> str:
    """What the command tells of some prompts of token ids, B = 4."""
    ten = list(range(10, 20))
    options = cli.parsers()[""].parse_args(["why", str(ten), str([*ten[:6], 99, 17, 18]), "--block-size", "4"])
    return f"```text\n{why.make(options).as_text()}\n```\n"


SECTIONS: dict[str, Callable[[], str]] = {
    "dimensions": dimensions,
    "block-sizes": block_sizes,
    "pool-costs": pool_costs,
    "staging": staging,
    "rooms-left": rooms_left,
    "recipes": recipe_commands,
    "environment": environment,
    "bridge-defaults": bridge_defaults,
    "hits": hits,
    "boundary-cost": boundary_cost,
    "additional-config": additional_config,
    "refusals": refusal_table,
    "start-errors": raises,
    "architectures": architectures,
    "metrics": metrics,
    "operators": operator_table.documentation,
    "miss-reasons": miss_reasons,
    "log-lines": log_lines,
    "entry-points": entry_points,
    "nightly-variables": nightly_variables,
    "pins": pins,
    "compat": compat_rows,
    "ops": ops,
    "owners": owners,
    "ordering-rules": ordering_rules,
    "step-order": step_order,
    "vllm-symbols": vllm_symbols,
    "plan-arguments": lambda: arguments("plan"),
    "why-arguments": lambda: arguments("why"),
    "why-example": reused,
}


# Writing and building


def rendered(text: str) -> str:
    """A page with its generated sections as they are now. Raises LookupError for a section that nobody makes."""

    def section(match: re.Match[str]) -> str:
        if match[2] not in SECTIONS:
            raise LookupError(f"no section is named {match[2]}; sections are {', '.join(SECTIONS)}")
        return f"{match[1]}\n{SECTIONS[match[2]]()}\n{match[3]}"

    return SECTION.sub(section, text)


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def outputs() -> dict[Path, str]:
    """What every file with a generated part should be."""
    return {path: rendered(path.read_text()) for path in pages()}


def stale() -> list[Path]:
    return [path for path, text in outputs().items() if path.read_text() != text]


def write() -> list[Path]:
    """Bring the generated parts up to date; returns what has changed."""
    changed = stale()
    for path, text in outputs().items():
        if path in changed:
            path.write_text(text)
    return changed


def build() -> int:
    for path in write():
        print(f"written: {path.relative_to(ROOT)}", flush=True)
    if not install.have_extra(DOCS_PINS):
        return 1
    command = [str(install.VENV / "bin" / "python"), "-m", "mkdocs", "build", "--strict", "--site-dir", str(SITE)]
    code_of_mkdocs = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code_of_mkdocs == 0:
        print(f"site: {SITE.relative_to(ROOT)}/index.html")
    return code_of_mkdocs


def main() -> int:
    parser = argparse.ArgumentParser(description="The documentation site.")
    parser.add_argument("what", nargs="?", choices=("write", "check", "build"), default="write")
    what = parser.parse_args().what
    if what == "build":
        return build()
    if what == "check":
        found = stale()
        for path in found:
            print(f"not up to date: {path.relative_to(ROOT)}; run make docs", file=sys.stderr)
        return 1 if found else 0
    for path in write():
        print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
