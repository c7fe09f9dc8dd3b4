# SPDX-License-Identifier: Apache-2.0
"""The documentation site without MkDocs: generated parts are up to date, and what a page names is there.

Owns: links, flags, metrics, log lines and paths of docs/, and the arithmetic behind its tables. `make docs` builds the
site itself, with --strict. vLLM's sources are read and not imported.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from tools.docs import site, sizes, sources, tables
from tools.model_sizes import Geometry, Serving
from vllm_gaudi import cli
from vllm_gaudi.bucketing.grid import CONFIG_KEYS
from vllm_gaudi.v1.core.sched.block_size import DEFAULT_GDN_CHUNK, MAX_KERNEL_BLOCK
from vllm_gaudi.v1.core.sched.cache_stats import COUNTERS, REASONS

ROOT = Path(__file__).resolve().parents[3]
TEXT = {page.relative_to(site.DOCS).as_posix(): page.read_text() for page in sorted(site.DOCS.rglob("*.md"))}
CONFIG = (ROOT / "mkdocs.yml").read_text()
VLLM = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Files of another project, which the proposal compares ours with.
THEIRS = {
    "vllm_gaudi/ops/hpu_gdn_pytorch.py",
    "vllm_gaudi/ops/causal_conv1d_pytorch.py",
    "vllm_gaudi/layers/qwen3_5.py",
}
OF_PIP = {"--no-deps", "--no-build-isolation", "--no-binary"}
OF_MKDOCS = {"--strict"}
OF_DOCKER = {"--build-arg", "--no-healthcheck", "--runtime"}


def anchors(text: str) -> set[str]:
    """Ids that MkDocs gives to a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M):
        plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", plain))
    return found


def strings_of_the_package() -> str:
    """Every string of the package in one text; what an f-string computes is left out, a %-format stands as it is."""
    found = []
    for path in (ROOT / "vllm_gaudi").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        found += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(re.sub(r"%[-+0-9.]*[sdf]", "\0", text) for text in found)


def test_the_generated_parts_are_what_the_generator_gives_now():
    assert site.check() == 0, "run make docs, or python -m tools.docs"


def with_section(tmp_path, monkeypatch, call, end="<!-- [[[end]]] -->"):
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- [[[cog show({call}) ]]] -->\n| old |\n{end}\nafter\n")
    monkeypatch.setattr(site, "DOCS", tmp_path)
    return page


def test_a_section_that_is_behind_its_source_is_noticed(tmp_path, monkeypatch, capfd):
    page = with_section(tmp_path, monkeypatch, "tables.miss_reasons()")
    assert site.check() == site.STALE
    assert "-| old |" in capfd.readouterr().out
    assert site.write() == site.check() == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "| old |" not in text
    assert all(f"`{reason}`" in text for reason in REASONS)


@pytest.mark.parametrize(
    ("call", "end"), [("tables.weather()", "<!-- [[[end]]] -->"), ("tables.miss_reasons()", "<!-- end -->")]
)
def test_a_section_that_nobody_makes_or_ends_is_an_error(tmp_path, monkeypatch, call, end):
    page = with_section(tmp_path, monkeypatch, call, end)
    assert site.check() and site.write()
    assert "| old |" in page.read_text()


def test_every_section_is_on_a_page():
    shown = {name for text in TEXT.values() for name in re.findall(r"\[\[\[cog show\((\w+\.\w+)\(", text)}
    made = {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in (sizes, sources, tables)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        if inspect.signature(value).return_annotation == "str"
    }
    assert shown == made and len(made) > 20


def test_the_navigation_names_every_page_once():
    named = re.findall(r": (\S+\.md)$", CONFIG, re.M)
    assert sorted(named) == sorted(TEXT)


def test_a_rule_of_order_has_one_spelling():
    """The table of ordering rules would leave another one out."""
    for path, text in sources.docstrings().items():
        starts = [line for line in text.splitlines() if re.match(r"Order(?:ing rules?)?\b", line)]
        assert all(line.startswith("Ordering rule: ") for line in starts), path


@pytest.mark.parametrize("page", TEXT)
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in LINK.findall(TEXT[page]):
        path, _, anchor = target.partition("#")
        file = site.DOCS / path if path else site.DOCS / page
        assert file.is_file(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


@pytest.mark.parametrize("page", TEXT)
def test_no_page_names_a_place_of_a_machine_or_another_host(page):
    text = TEXT[page]
    assert str(ROOT) not in text
    assert not re.findall(r"(?<![\w.])/(?:home|root|work|tmp|opt|usr|mnt|srv|etc|var)\b", text)
    assert not re.findall(r"https?://(?!localhost)\S+", text)


def test_neither_configuration_nor_picture_loads_anything_from_elsewhere():
    picture = (site.DOCS / "assets" / "pool.svg").read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?://\S+", CONFIG + picture)
    assert "highlightjs: false" in CONFIG


@pytest.mark.parametrize("page", TEXT)
def test_every_path_of_the_repository_exists(page):
    named = re.findall(r"`((?:vllm_gaudi|tests|tools|benchmarks|requirements)/[\w./-]*)`", TEXT[page])
    missing = {path for path in named if not (ROOT / path).exists()} - (THEIRS if page == "upstream.md" else set())
    assert not missing


@pytest.mark.parametrize("page", TEXT)
def test_every_make_target_exists(page):
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.M))
    asked = set(re.findall(r"(?:`|^)make ([a-z0-9]+)", TEXT[page], re.M))
    assert asked <= targets


def test_every_flag_is_vllms_or_a_command_s_own():
    files = [VLLM / "engine" / "arg_utils.py", *(VLLM / "config").glob("*.py")]
    files += [path for path in (VLLM / "entrypoints").rglob("*.py") if "arg" in path.name]
    known = "\n".join(path.read_text() for path in files).replace("-", "_")
    named = {flag for text in TEXT.values() for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text)}
    assert len(named) > 50
    named -= OF_PIP | OF_MKDOCS | OF_DOCKER
    named -= {flag for one in cli.parsers().values() for flag in one._option_string_actions}
    named -= {
        flag for path in (ROOT / "benchmarks").glob("*.py") for flag in re.findall(r'"(--[a-z-]+)"', path.read_text())
    }
    names = {flag: flag.removeprefix("--").replace("-", "_") for flag in named}
    missing = {
        flag
        for flag, name in names.items()
        if not re.search(rf"\b_*{name}\b", known) and not re.search(rf"\b_*{name.removeprefix('no_')}\b", known)
    }
    assert not missing


def test_every_metric_of_vllm_exists():
    loggers = (VLLM / "v1" / "metrics" / "loggers.py").read_text()
    named = {name for text in TEXT.values() for name in re.findall(r"`(vllm:\w+)`", text)}
    assert len(named) >= 5
    assert {name for name in named if f'"{name.removesuffix("_total")}"' not in loggers} == set()


def test_every_metric_of_the_plugin_is_one_that_it_has():
    known = {name + "_total" for name in COUNTERS}
    named = {name for text in TEXT.values() for name in re.findall(r"`(vllm_gaudi:\w+)`", text)}
    entry_points = {name for name in named if ":register" in name}
    assert named - entry_points == known
    reasons = {reason for text in TEXT.values() for reason in re.findall(r'reason="(\w+)"', text)}
    assert reasons <= set(REASONS)


def test_every_quoted_log_line_is_one_that_the_package_says():
    said = strings_of_the_package()
    quoted = [line for text in TEXT.values() for line in re.findall(r"```log\n(.*?)\n```", text, re.S)]
    assert len(quoted) >= 8
    for line in quoted:
        for part in (part.strip() for part in line.split("...")):
            assert part.strip("(): ") in said, f"{part!r} of {line!r}"


@pytest.mark.parametrize(("model", "ranks", "block"), sizes.KNOWN_BLOCKS, ids=lambda value: str(value)[:5])
def test_the_formula_gives_the_published_block_sizes(model, ranks, block):
    assert Geometry(model, ranks).block == block


@pytest.mark.parametrize("ranks", sizes.RANKS)
@pytest.mark.parametrize("model", sizes.MODELS, ids=lambda model: model.name)
def test_a_state_fits_the_page_that_the_formula_gives_and_no_smaller_one(model, ranks):
    geometry = Geometry(model, ranks)
    assert geometry.state.num_bytes <= geometry.page_bytes
    assert geometry.state.num_bytes > geometry.page_bytes - MAX_KERNEL_BLOCK * geometry.token_bytes
    assert geometry.has_whole_heads
    assert geometry.block % DEFAULT_GDN_CHUNK == 0


@pytest.mark.parametrize("budget", [128, 1000, 4480, 8192, 65536])
@pytest.mark.parametrize("model", sizes.MODELS, ids=lambda model: model.name)
def test_staging_rows_are_few(model, budget):
    geometry = Geometry(model, 1)
    serving = Serving(max_num_batched_tokens=budget)
    assert geometry.staging_rows(serving) <= max(budget, geometry.block) / geometry.block + 4


def test_the_dimensions_are_those_of_transformers_defaults():
    """Its config classes have the dimensions of one released model each as defaults."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    for model, config in ((sizes.QWEN3_NEXT, Qwen3NextConfig()), (sizes.QWEN35_35B, Qwen3_5MoeTextConfig())):
        assert config.layer_types.count("linear_attention") == model.gdn_layers
        assert config.layer_types.count("full_attention") == model.attention_layers
        assert (config.num_key_value_heads, config.head_dim) == (model.kv_heads, model.head)
        assert (config.linear_num_key_heads, config.linear_num_value_heads) == (model.k_heads, model.v_heads)
        assert config.linear_key_head_dim == config.linear_value_head_dim == model.gdn_head
        assert config.linear_conv_kernel_dim == model.conv_kernel


def test_every_configuration_key_has_its_meaning():
    assert set(sizes.USER_BUCKETS) == set(CONFIG_KEYS)


def test_every_symbol_of_the_contract_with_vllm_has_its_place():
    shown = re.findall(r"`([^`]+)`(?=[,;] | \|)", tables.vllm_symbols())
    assert sorted(shown) == sorted(row.symbol.rpartition(".")[2] for row in tables.vllm_contract.ROWS)


def test_attributes_of_vllm_without_a_row_are_in_both_sources():
    table = TEXT["upgrading.md"].split("| attribute | used for |\n")[1].split("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert len(named) >= 5
    for folder in ((ROOT / "vllm_gaudi").rglob("*.py"), (VLLM / "v1").rglob("*.py")):
        text = "\n".join(path.read_text() for path in folder)
        assert {name for name in named if not re.search(rf"\b{name}\b", text)} == set()


@pytest.mark.parametrize("name", ["docs.txt", "nightly.txt"])
def test_what_a_target_adds_is_pinned_with_a_reason(name):
    text = (ROOT / "requirements" / name).read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w\[\]-]+==[\w.]+ +# .+", line), line
